"""The truncated Gaussian unit, whose truncation points make its nonlinearity, and can be learned."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from manopt_torch import special

#: least distance of learned truncation points
MIN_WIDTH = 1e-3
#: the variance of all experiments and figures of the paper
SIGMA2 = 0.2


class TruG(nn.Module):
    """Truncated Gaussian unit (Su, Liao and Carin, 2017, eqs. 1-3), elementwise.

    ::

        p(h | z) ∝ exp(−(h − z)²/(2σ²))  for ξ₁ ≤ h ≤ ξ₂
        E h = z + σ (φ(a) − φ(b)) / (Φ(b) − Φ(a)),    a = (ξ₁ − z)/σ,  b = (ξ₂ − z)/σ

    The layer returns E h, or with ``stochastic`` and in training a sample of h, reparametrized. As σ → 0 the mean tends
    to z clipped to [ξ₁, ξ₂]. Figure 1 of the paper is ``TruG.relu()`` ([0, ∞)), ``TruG.tanh()`` ([−1, 1]),
    ``TruG.sigmoid()`` ([0, 1], centred at z = ½) and ``TruG.ramp()`` ([0, 4]), resemblances rather than equalities:
    with σ² = 0.2 the largest distance from max(z, 0) is σ√(2/π) = 0.36, that from tanh z 0.13.

    What is learned is ξ₁ and the width: ``lower``, and ``raw_width`` with ξ₂ = ξ₁ + 10⁻³ + softplus(raw_width), so that
    ξ₁ < ξ₂ holds whatever the step. Beside an infinite end only the other one is learned, as it is. What is not
    learned is a buffer. :attr:`xi1` and :attr:`xi2` are the truncation points in any case.

    Shape: ``(..., num_units)`` to the same, or any shape without ``num_units``. Computed in float64
    (``manopt_torch.special``), returned in the dtype of the input.

    Args:
        num_units: size of the last dimension; None: any shape.
        sigma2: the variance σ² of the Gaussian before truncation, fixed.
        lower, upper: ξ₁ and ξ₂, numbers or tensors of shape ``(num_units,)``; if learned, what they are at first.
        learn: one pair of truncation points for each "unit", one pair "shared" by all, or None.
        stochastic: sample in training.
        dtype, device: of the truncation points.

    Raises:
        ValueError: for a ``sigma2`` that is not positive, ends that are not ``lower < upper`` (by more than 10⁻³ if
            learned), ``learn="unit"`` without ``num_units``, ends of the wrong shape or only in part infinite;
            in ``forward`` for a last dimension other than ``num_units``.
        TypeError: in ``forward``, for an input that is not real floating point.
    """

    lower: Tensor
    upper: Tensor
    raw_width: Tensor

    def __init__(
        self,
        num_units: int | None = None,
        sigma2: float = SIGMA2,
        *,
        lower: Tensor | float = 0.0,
        upper: Tensor | float = math.inf,
        learn: Literal["unit", "shared"] | None = "shared",
        stochastic: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_units is not None and num_units < 1:
            raise ValueError(f"num_units must be at least 1, or None, got {num_units}")
        if not 0 < sigma2 < math.inf:
            raise ValueError(f"sigma2 must be positive, got {sigma2}")
        if learn not in ("unit", "shared", None):
            raise ValueError(f'learn must be "unit", "shared" or None, got {learn!r}')
        if learn == "unit" and num_units is None:
            raise ValueError('learn="unit" needs num_units; learn="shared" has one pair for all units')
        self.num_units, self.sigma2, self.learn, self.stochastic = num_units, float(sigma2), learn, stochastic
        self._start = low, high = self._points(lower, upper)
        finite = [bool(end.isfinite().all()) for end in (low, high)]
        if learn is not None and not (low < high - MIN_WIDTH).all():
            raise ValueError(f"TruG learns lower + {MIN_WIDTH} < upper, got lower {lower} and upper {upper}")
        if not (low < high).all():
            raise ValueError(f"TruG needs lower < upper, got lower {lower} and upper {upper}")
        if learn is not None and finite != [bool(end.isfinite().any()) for end in (low, high)]:
            raise ValueError(f"an end is learned for all units or infinite for all, got lower {lower}, upper {upper}")
        if learn is not None and not any(finite):
            raise ValueError("there is nothing to learn without a finite end: pass learn=None")

        def register(name: str, learned: bool) -> None:
            value = torch.empty(low.shape, dtype=dtype, device=device)
            if learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

        register("lower", learn is not None and finite[0])
        self.learns_width = learn is not None and all(finite)
        register("raw_width" if self.learns_width else "upper", learn is not None and finite[1])
        self.reset_parameters()

    def _points(self, lower: Tensor | float, upper: Tensor | float) -> tuple[Tensor, Tensor]:
        """Both ends in float64, in the shape in which they are kept."""
        ends = [torch.as_tensor(end, dtype=torch.float64, device="cpu").detach() for end in (lower, upper)]
        shape = torch.broadcast_shapes(*(end.shape for end in ends), (self.num_units,) if self.learn == "unit" else ())
        if shape not in ((), (self.num_units,)) or (self.learn == "shared" and shape != ()):
            allowed = (
                "numbers" if self.learn == "shared" or self.num_units is None else f"numbers or ({self.num_units},)"
            )
            raise ValueError(f"lower and upper must be {allowed}, got shapes {[tuple(end.shape) for end in ends]}")
        low, high = (end.expand(shape).clone() for end in ends)
        return low, high

    @classmethod
    def relu(
        cls,
        num_units: int | None = None,
        sigma2: float = SIGMA2,
        *,
        learn: Literal["unit", "shared"] | None = "shared",
        stochastic: bool = False,
    ) -> TruG:
        """On [0, ∞)."""
        return cls(num_units, sigma2, lower=0.0, upper=math.inf, learn=learn, stochastic=stochastic)

    @classmethod
    def tanh(
        cls,
        num_units: int | None = None,
        sigma2: float = SIGMA2,
        *,
        learn: Literal["unit", "shared"] | None = "shared",
        stochastic: bool = False,
    ) -> TruG:
        """On [−1, 1]."""
        return cls(num_units, sigma2, lower=-1.0, upper=1.0, learn=learn, stochastic=stochastic)

    @classmethod
    def sigmoid(
        cls,
        num_units: int | None = None,
        sigma2: float = SIGMA2,
        *,
        learn: Literal["unit", "shared"] | None = "shared",
        stochastic: bool = False,
    ) -> TruG:
        """On [0, 1]."""
        return cls(num_units, sigma2, lower=0.0, upper=1.0, learn=learn, stochastic=stochastic)

    @classmethod
    def ramp(
        cls,
        num_units: int | None = None,
        sigma2: float = SIGMA2,
        *,
        learn: Literal["unit", "shared"] | None = "shared",
        stochastic: bool = False,
    ) -> TruG:
        """On [0, 4]: linear between two soft bends."""
        return cls(num_units, sigma2, lower=0.0, upper=4.0, learn=learn, stochastic=stochastic)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Put the truncation points back to where they began."""
        low, high = self._start
        self.lower.copy_(low)
        if self.learns_width:
            excess = high - low - MIN_WIDTH
            self.raw_width.copy_(excess + torch.log(-torch.expm1(-excess)))
        else:
            self.upper.copy_(high)

    def truncation_points(self) -> tuple[Tensor, Tensor]:
        """ξ₁ and ξ₂ in float64, as they are used: ``(num_units,)`` or ``()``."""
        low = self.lower.double()
        return low, low + MIN_WIDTH + softplus(self.raw_width.double()) if self.learns_width else self.upper.double()

    @property
    def xi1(self) -> Tensor:
        """ξ₁, ``(num_units,)`` or ``()``."""
        return self.lower

    @property
    def xi2(self) -> Tensor:
        """ξ₂, ``(num_units,)`` or ``()``."""
        return self.truncation_points()[1].to(self.lower.dtype)

    def forward(self, z: Tensor) -> Tensor:
        """E h, or a sample of h, of the shape and dtype of ``z``."""
        if not z.is_floating_point():
            raise TypeError(f"TruG takes real floating point input, got {z.dtype}")
        if self.num_units is not None and z.shape[-1:] != (self.num_units,):
            raise ValueError(f"TruG({self.num_units}) needs a last dimension of that size, got shape {tuple(z.shape)}")
        unit = special.sample if self.stochastic and self.training else special.mean
        return unit(z, math.sqrt(self.sigma2), *self.truncation_points()).to(z.dtype)

    def extra_repr(self) -> str:
        ends = [f"{end.item():.4g}" if end.dim() == 0 else f"{tuple(end.shape)}" for end in (self.xi1, self.xi2)]
        said = f"{self.num_units}, sigma2={self.sigma2:g}, lower={ends[0]}, upper={ends[1]}, learn={self.learn!r}"
        return said + ", stochastic=True" * self.stochastic
