"""Activations of networks with complex hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manopt_torch.nn.init import uniform_
from manopt_torch.precision import widen

#: both epsilons of the soft modReLU, which bound its slope by 1 + b/√EPSILON
EPSILON = 1e-5
#: |z|² up to which the exact modReLU takes z for zero
TINY = 1e-36
#: half-width of the uniform distribution that the bias starts from (Wisdom et al., 2016, released code)
BIAS_BOUND = 0.01


def modrelu(z: Tensor, bias: Tensor, hard: bool = False) -> Tensor:
    """modReLU of ``z`` with ``bias`` broadcast against it; see :class:`ModReLU`."""
    dtype, z, bias = torch.promote_types(z.dtype, bias.dtype), widen(z), widen(bias)
    if hard:
        zero = z.abs().square() <= TINY
        r = torch.where(zero, 1, z).abs()  # second derivatives too are finite
        return torch.where(zero, 0, z * (torch.relu(r + bias) / r)).to(dtype)
    s = (z.abs().square() + EPSILON).sqrt()
    return (z * (torch.relu(s + bias) / (s + EPSILON))).to(dtype)


class ModReLU(nn.Module):
    """Soft threshold of the modulus that keeps the phase (Arjovsky, Shah and Bengio, 2016, eq. 8), elementwise.

    ::

        soft (default)   σ(z) = z · max(s + b, 0) / (s + ε),   s = √(|z|² + ε),   ε = 1e-5
        hard             σ(z) = z/|z| · max(|z| + b, 0),       σ(0) = 0

    The soft form has a bounded gradient everywhere. The gradient of the hard one, with u = z/|z| and incoming g, is
    dz = u [Re(ū g) + i (1 + b/|z|) Im(ū g)] and db = Re(ū g) where |z| + b > 0, and 0 elsewhere and at z = 0; for
    b > 0 it grows without bound as z → 0.

    Shape: ``(..., num_units)``, real or complex, to the same. ``bias``, one real b for each unit, is learned.

    Args:
        num_units: size of the last dimension.
        hard: the exact hard threshold.
        dtype, device: of ``bias``, a real dtype.

    Raises:
        ValueError: for a last dimension other than ``num_units``, or a ``dtype`` that is not real floating point.
    """

    def __init__(
        self,
        num_units: int,
        hard: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_units < 1:
            raise ValueError(f"num_units must be at least 1, got {num_units}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"the bias of ModReLU is real: dtype must be real floating point, got {dtype}")
        self.num_units = num_units
        self.hard = hard
        self.bias = nn.Parameter(torch.empty(num_units, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the bias from the uniform distribution on (−0.01, 0.01)."""
        uniform_(self.bias, BIAS_BOUND)

    def forward(self, z: Tensor) -> Tensor:
        """σ(z), elementwise: ``(..., num_units)`` to the same."""
        if z.shape[-1:] != self.bias.shape:
            raise ValueError(
                f"ModReLU({self.num_units}) needs a last dimension of {self.num_units}, got shape {tuple(z.shape)}"
            )
        return modrelu(z, self.bias, self.hard)

    def extra_repr(self) -> str:
        return f"{self.num_units}, hard=True" if self.hard else f"{self.num_units}"


class OnModulus(nn.Module):
    """Any activation f of real numbers on complex ones: z ↦ f(|z| + b) z/|z|, 0 ↦ 0, which keeps the phase.

    With f = ReLU it is the hard :class:`ModReLU`. Real z keep their sign in place of the phase.

    Shape: ``(..., num_units)``, real or complex, to the same. ``bias``, one real b for each unit, is learned.

    Args:
        activation: f, a module.
        num_units: size of the last dimension.
        dtype, device: of ``bias``, a real dtype.

    Raises:
        ValueError: for a last dimension other than ``num_units``.
    """

    def __init__(
        self,
        activation: nn.Module,
        num_units: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.bias = nn.Parameter(torch.empty(num_units, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the bias from the uniform distribution on (−0.01, 0.01), and f anew if it can."""
        uniform_(self.bias, BIAS_BOUND)
        if callable(reset := getattr(self.activation, "reset_parameters", None)):
            reset()

    def forward(self, z: Tensor) -> Tensor:
        """f(|z| + b) z/|z|, elementwise: ``(..., num_units)`` to the same."""
        if z.shape[-1:] != self.bias.shape:
            raise ValueError(f"expected (..., {len(self.bias)}), got shape {tuple(z.shape)}")
        zero = z == 0
        size = torch.where(zero, 1, z).abs()
        return torch.where(zero, 0, z * (self.activation(size + self.bias) / size))
