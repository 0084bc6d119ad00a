"""The full-capacity unitary recurrent network."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manopt_torch.manifolds import Unitary
from manopt_torch.nn.complex import ComplexModule
from manopt_torch.nn.init import cayley_angle_, glorot_uniform_, haar_, henaff_, restricted_
from manopt_torch.nn.recurrence import elementwise_recurrence, unitary_recurrence
from manopt_torch.nn.recurrent import Activation, UnitaryCell, UnitaryLayers, check_sizes
from manopt_torch.parameter import ManifoldParameter

Init = Literal["haar", "identity", "restricted", "henaff", "cayley"]
INITIALIZE = {
    "haar": haar_, "identity": nn.init.eye_, "restricted": restricted_, "henaff": henaff_, "cayley": cayley_angle_
}  # fmt: skip


class UnitaryRNNCell(UnitaryCell):
    """One step of :class:`UnitaryRNN`, for streams: h ↦ σ(W h + V x), W ∈ U(N).

    ``h = None``, then ``h = cell(x, h)`` for each x, gives the states that the layer gives for the whole sequence.

    Parameters: ``weight_hh`` W (N, N) on ``Unitary()``; ``weight_ih`` V (N, M); ``modrelu.bias`` b (N,), real; ``h0``
    (N,), which ``hx=None`` stands for.

    Shapes: ``input`` (B, M) or (M,); ``hx`` and the result (B, N) or (N,).

    Args, initial values, errors: see :class:`UnitaryRNN`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        init: Init = "haar",
        hard: bool = False,
        activation: Activation | None = None,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, hard=hard, dtype=dtype, device=device, activation=activation)
        if init not in get_args(Init):
            raise ValueError(f"init must be one of {', '.join(map(repr, get_args(Init)))}, got {init!r}")
        self.init = init
        self.weight_hh = ManifoldParameter(torch.eye(hidden_size, dtype=dtype, device=device), Unitary())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        INITIALIZE[self.init](self.weight_hh)
        super().reset_parameters()

    def states(
        self, input: Tensor, h: Tensor, mask: Tensor | None = None, checkpoint_every: int | None = None
    ) -> Tensor:
        """All states (T, B, N): see :func:`manopt_torch.nn.recurrence.unitary_recurrence`."""
        if self.activation is not None:
            if checkpoint_every is not None:
                raise ValueError("checkpoint_every is for modReLU: without activation=, or without checkpoint_every=")
            return elementwise_recurrence(input, self.weight_ih, self.weight_hh, self.activation, h, mask)
        weights = self.weight_ih, self.weight_hh, self.modrelu.bias
        return unitary_recurrence(input, *weights, h, mask, hard=self.modrelu.hard, checkpoint_every=checkpoint_every)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, init={self.init!r}"


class UnitaryRNN(UnitaryLayers):
    """Recurrent layers with unitary recurrence (Wisdom et al., 2016), called like ``torch.nn.RNN``.

    ::

        h_t = σ(W h_{t-1} + V x_t),   W ∈ U(N),   σ = modReLU with bias b

    W preserves norms, so that gradients neither vanish nor explode through it. It ranges over the whole of U(N), of
    real dimension N². An optimizer that knows manifolds keeps it there: ``RiemannianAdam(param_groups(rnn))``. With a
    real ``dtype`` W is orthogonal, and all states are real.

    ``cells``, one :class:`UnitaryRNNCell` for each layer, hold the parameters: ``cells[0].weight_hh`` W (N, N) on
    ``Unitary()``; ``weight_ih`` V (N, M), or (N, N) above the first layer; ``modrelu.bias`` b (N,), real; ``h0`` (N,),
    the state that a sequence starts from when no ``hx`` is given.

    Shapes, with T steps, B sequences, M inputs, N units, L layers: ``input`` (T, B, M), or (B, T, M) with
    ``batch_first``, or (T, M), or a ``PackedSequence``; ``hx`` and ``h_n`` (L, B, N), or (L, N); ``output``, every
    state of the last layer, as ``input`` with N in place of M. ``mask``, bool, as ``input`` without its last dimension,
    is True where a sequence has a step; where it is False all states stay as they are. ``input`` is real or complex,
    the rest complex, if ``dtype`` is.

    Output: :class:`RealReadout` for y = Re(U h + c), ``nn.Linear(N, K, dtype=torch.complex64)`` for y = U h + c.

    Initial values: W by ``init``; V Glorot uniform, ±√(6 / (M + 2N)); b uniform on ±0.01; h0 uniform on ±√(3 / (2N)),
    so that E‖h0‖² = 1 (Wisdom et al., 2016, released code); N in place of 2N for a real dtype.

    Args:
        input_size: M.
        hidden_size: N.
        num_layers: L.
        batch_first: sequences along the first dimension of ``input`` and ``output``.
        init: what W starts from: ``"haar"``; ``"identity"``; ``"restricted"``, a random product of diagonals,
            reflections and Fourier transforms, from which the paper starts (complex only); ``"henaff"`` or
            ``"cayley"``, 2×2 rotations by uniform angles: see :mod:`manopt_torch.nn.init`.
        hard: the exact hard threshold as modReLU, see :class:`ModReLU`.
        activation: makes another σ of N units, an elementwise module of complex numbers, for each layer, such as
            ``lambda n: OnModulus(TruG(n, learn="unit"), n)``; learned with the rest, it takes a loop over the steps,
            and several times as long.
        checkpoint_every: keep for the backward pass only each state of so many, and compute the others again: less
            memory, more time. About √T is best for memory.
        dtype: complex or real floating point.
        device: of all parameters.

    Raises:
        ValueError: for sizes below 1, an unknown ``init``, a tensor of a wrong shape, an empty sequence.
        TypeError: for a tensor of a wrong dtype.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        *,
        init: Init = "haar",
        hard: bool = False,
        activation: Activation | None = None,
        checkpoint_every: int | None = None,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes("UnitaryRNN", num_layers=num_layers)
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        cells = [
            UnitaryRNNCell(size, hidden_size, init=init, hard=hard, activation=activation, dtype=dtype, device=device)
            for size in sizes
        ]
        super().__init__(cells, batch_first, checkpoint_every)


class RealReadout(ComplexModule):
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
        check_sizes("RealReadout", hidden_size=hidden_size, output_size=output_size)
        if not dtype.is_complex:
            raise ValueError(
                f"dtype of RealReadout must be complex, got {dtype}: of a real state nn.Linear is the readout"
            )
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

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.output_size}"
