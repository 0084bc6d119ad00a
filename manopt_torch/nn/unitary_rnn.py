"""The full-capacity unitary recurrent network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manopt_torch.manifolds import Unitary
from manopt_torch.nn.activations import ModReLU
from manopt_torch.nn.init import glorot_uniform_, haar_, uniform_
from manopt_torch.parameter import ManifoldParameter


class UnitaryRNN(nn.Module):
    """Recurrent layer with complex state and unitary recurrence (Wisdom et al., 2016), called like ``torch.nn.RNN``.

    ::

        h_t = σ(W h_{t-1} + V x_t),   W ∈ U(N),   σ = modReLU with bias b

    W preserves norms, so that gradients neither vanish nor explode through it. It ranges over the whole of U(N), of
    real dimension N². An optimizer that knows manifolds keeps it there: ``RiemannianAdam(param_groups(rnn))``.

    Parameters: ``weight_hh`` W (N, N) on ``Unitary()``; ``weight_ih`` V (N, M) complex; ``modrelu.bias`` b (N,) real;
    ``h0`` (N,) complex, the state that a sequence starts from when no ``hx`` is given.

    Shapes, with T steps, B sequences, M inputs, N units: ``input`` (T, B, M), or (B, T, M) with ``batch_first``, or
    (T, M); ``hx`` and ``h_n`` (1, B, N), or (1, N); ``output``, every h_t, as ``input`` with N in place of M. ``input``
    is real or complex, the rest complex.

    Initial values: W Haar-distributed or the identity; V Glorot uniform, ±√(6 / (M + 2N)); b uniform on ±0.01; h0
    uniform on ±√(3 / (2N)), so that E‖h0‖² = 1 (Wisdom et al., 2016, released code).

    Args:
        input_size: M.
        hidden_size: N.
        batch_first: sequences along the first dimension of ``input`` and ``output``.
        init: what W starts from, ``"haar"`` or ``"identity"``.
        hard: the exact hard threshold as modReLU, see :class:`ModReLU`.
        dtype: a complex dtype.
        device: of all parameters.

    Raises:
        ValueError: for sizes below 1, an unknown ``init``, a ``dtype`` that is not complex, a tensor of a wrong shape,
            an empty sequence.
        TypeError: for a tensor of a wrong dtype, or a ``PackedSequence``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        batch_first: bool = False,
        *,
        init: Literal["haar", "identity"] = "haar",
        hard: bool = False,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if init not in ("haar", "identity"):
            raise ValueError(f"init must be 'haar' or 'identity', got {init!r}")
        _check_layer("UnitaryRNN", dtype, input_size=input_size, hidden_size=hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.batch_first = batch_first
        self.init = init
        identity = torch.eye(hidden_size, dtype=dtype, device=device)
        self.weight_hh = ManifoldParameter(identity, Unitary())
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, dtype=dtype, device=device))
        self.modrelu = ModReLU(hidden_size, hard, dtype=dtype.to_real(), device=device)
        self.h0 = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        if self.init == "haar":
            haar_(self.weight_hh)
        else:
            nn.init.eye_(self.weight_hh)
        glorot_uniform_(self.weight_ih, self.input_size, 2 * self.hidden_size)
        uniform_(self.h0, math.sqrt(3 / (2 * self.hidden_size)))
        self.modrelu.reset_parameters()

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(output, h_n)``: every state, and the last one; shapes as in ``torch.nn.RNN``."""
        self._check(input, hx)
        batched = input.dim() == 3
        time = 1 if batched and self.batch_first else 0
        x = F.linear(input.to(self.weight_ih.dtype), self.weight_ih)  # all steps at once
        x = x if batched else x.unsqueeze(1)
        steps = x.unbind(time)  # not slices: the gradient of each would be as large as the sequence
        if hx is None:
            hx = self.h0.expand(1, *steps[0].shape)
        h = hx.reshape(steps[0].shape)
        W = self.weight_hh.mT  # rows are states
        states = []
        for x_t in steps:
            h = self.modrelu(torch.addmm(x_t, h, W))
            states.append(h)
        output = torch.stack(states, dim=time)
        return (output, h.unsqueeze(0)) if batched else (output.squeeze(1), h)

    def _check(self, input: Tensor, hx: Tensor | None) -> None:
        if not isinstance(input, Tensor):
            raise TypeError(f"input must be a tensor, got {type(input).__name__}: pad the sequences")
        M, N, dtype = self.input_size, self.hidden_size, self.weight_ih.dtype
        if input.dim() not in (2, 3) or input.shape[-1] != M:
            wanted = f"(B, T, {M})" if self.batch_first else f"(T, B, {M})"
            raise ValueError(f"input must have shape {wanted} or (T, {M}), got {tuple(input.shape)}")
        if input.shape[1 if input.dim() == 3 and self.batch_first else 0] == 0:
            raise ValueError(f"input has no time step: shape {tuple(input.shape)}")
        if input.dtype not in (dtype, dtype.to_real()) and not torch.is_autocast_enabled(input.device.type):
            raise TypeError(
                f"input must be {dtype.to_real()} or {dtype}, as the weights are {dtype}, got {input.dtype}: "
                "convert the input, or the layer with .double() or .float()"
            )
        if hx is None:
            return
        state = (1, N) if input.dim() == 2 else (1, input.shape[0 if self.batch_first else 1], N)
        if tuple(hx.shape) != state:
            raise ValueError(
                f"hx must have shape {state} for input of shape {tuple(input.shape)}, got {tuple(hx.shape)}"
            )
        if hx.dtype != dtype:
            raise TypeError(f"hx must be {dtype}, as the weights are, got {hx.dtype}: write hx.to({dtype})")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UnitaryRNN:
        return super()._apply(_on_real_parts(fn), recurse)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, batch_first={self.batch_first}, init={self.init!r}"


class RealReadout(nn.Module):
    """Real output of a complex state: y = Re(U h + c), with U (L, N) complex and c (L,) real.

    The same as a real linear map of (Re h, Im h). Glorot uniform U, ±√(6 / (2N + L)), and c = 0 (Wisdom et al., 2016).

    Shape: ``(..., hidden_size)`` complex to ``(..., output_size)`` real.

    Args:
        hidden_size: N.
        output_size: L.
        dtype: a complex dtype, that of ``weight``; ``bias`` has its real counterpart.
        device: of both.

    Raises:
        ValueError: for sizes below 1, a ``dtype`` that is not complex, or a state of a wrong size.
        TypeError: for a state of another dtype than ``weight``.
    """

    def __init__(
        self,
        hidden_size: int,
        output_size: int,
        *,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_layer("RealReadout", dtype, hidden_size=hidden_size, output_size=output_size)
        self.hidden_size = hidden_size
        self.output_size = output_size
        self.weight = nn.Parameter(torch.empty(output_size, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype.to_real(), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw U anew, and set c = 0."""
        glorot_uniform_(self.weight, 2 * self.hidden_size, self.output_size)
        nn.init.zeros_(self.bias)

    def forward(self, h: Tensor) -> Tensor:
        """Re(U h + c): ``(..., N)`` to ``(..., L)``."""
        if h.shape[-1] != self.hidden_size:
            raise ValueError(f"h must have {self.hidden_size} units, got shape {tuple(h.shape)}")
        if h.dtype != self.weight.dtype:
            raise TypeError(f"h must be {self.weight.dtype}, as the weight is, got {h.dtype}")
        # not conj(): it would leave a lazily conjugated weight.grad, which torch's optimizers cannot view as real
        U = torch.stack([self.weight.real, -self.weight.imag], dim=-1).flatten(-2)
        return F.linear(torch.view_as_real(h.resolve_conj()).flatten(-2), U, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RealReadout:
        return super()._apply(_on_real_parts(fn), recurse)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.output_size}"


def _check_layer(name: str, dtype: torch.dtype, **sizes: int) -> None:
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{size} of {name} must be at least 1, got {value}")
    if not dtype.is_complex:
        raise ValueError(f"dtype of {name} must be complex, got {dtype}: write torch.complex64 or complex128")


def _on_real_parts(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A conversion ``fn`` applied to (Re, Im): ``.double()`` skips complex tensors, ``.to(float64)`` drops Im."""

    def convert(t: Tensor) -> Tensor:
        out = fn(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)
        out = out.real if out.is_complex() else out  # .to(complex128)
        return torch.view_as_complex(out.contiguous()) if t.is_complex() else out

    return convert
