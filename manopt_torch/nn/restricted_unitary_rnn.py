"""Unitary recurrent networks whose W is a product of structured factors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manopt_torch.nn.recurrent import UnitaryCell, UnitaryLayers, check_sizes
from manopt_torch.nn.structured_recurrence import structured_recurrence
from manopt_torch.nn.unitary_maps import RestrictedUnitary, UnitaryMap


class RestrictedUnitaryRNNCell(UnitaryCell):
    """One step h ↦ σ(W h + V x) of :class:`RestrictedUnitaryRNN`, called like ``torch.nn.RNNCell``.

    ``cell(input, hx)`` with ``input`` (B, M) or (M,), and ``hx`` (B, N) or (N,), the learned h0 if it is not given,
    returns the next state in the shape of ``hx``.

    Parameters: those of ``unitary``, the map W; ``weight_ih`` V (N, M); ``modrelu.bias`` b (N,), real; ``h0`` (N,).

    Args:
        input_size: M.
        hidden_size: N.
        unitary: makes W, as ``unitary(N, dtype=dtype, device=device)``: a class of structured maps, or a
            ``functools.partial`` of one that needs more, ``partial(HouseholderUnitary, num_factors=4)``.
        hard: the exact hard threshold as modReLU, see :class:`ModReLU`.
        dtype: of W, V and h0; a real dtype makes the network orthogonal, with a ``unitary`` that can be real.
        device: of all parameters.

    Raises:
        ValueError: for sizes below 1, a dtype that ``unitary`` refuses, a map of another size, a wrong shape.
        TypeError: for a ``unitary`` that makes no :class:`UnitaryMap`, a tensor of a wrong dtype.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        unitary: Callable[..., UnitaryMap] = RestrictedUnitary,
        hard: bool = False,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, hard=hard, dtype=dtype, device=device)
        if isinstance(unitary, UnitaryMap):
            raise TypeError(
                f"unitary must make a map, got one: pass the class, or functools.partial({type(unitary).__name__}, …)"
            )
        made = unitary(hidden_size, dtype=dtype, device=device)
        if not isinstance(made, UnitaryMap):
            raise TypeError(f"unitary must make a UnitaryMap, as RestrictedUnitary does, got {type(made).__name__}")
        if made.size != hidden_size or made.batch_shape:
            raise ValueError(f"unitary must make a map of size {hidden_size} without a batch, got {made!r}")
        self.unitary = made
        super().reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, those of W too."""
        self.unitary.reset_parameters()
        super().reset_parameters()

    def states(
        self, input: Tensor, h: Tensor, mask: Tensor | None = None, checkpoint_every: int | None = None
    ) -> Tensor:
        return structured_recurrence(
            input, self.weight_ih, self.unitary, self.modrelu.bias, h, mask, hard=self.modrelu.hard
        )


class RestrictedUnitaryRNN(UnitaryLayers):
    """Recurrent layers with a structured unitary W (Arjovsky, Shah and Bengio, 2016), called like ``torch.nn.RNN``.

    ::

        h_t = σ(W h_{t-1} + V x_t),   W = D3 R2 F⁻¹ D2 P R1 F D1,   σ = modReLU with bias b

    W has 7N real parameters instead of the N² of U(N), is applied in O(N log N) and never formed; from N = 6 on it
    cannot be every unitary matrix, see :class:`RestrictedUnitary`. Its parameters are free numbers, which any optimizer
    may move: W is unitary whatever they are. Other products of factors come in by ``unitary``.

    Parameters: in ``cells[k]``, a :class:`RestrictedUnitaryRNNCell`, those of layer k; its W is
    ``cells[k].unitary.matrix()``.

    Shapes, with T steps, B sequences, M inputs, N units, L layers: ``input`` (T, B, M), or (B, T, M) with
    ``batch_first``, or (T, M), or a ``PackedSequence``; ``hx`` and ``h_n`` (L, B, N), or (L, N); ``output``, every
    state of the last layer, as ``input`` with N in place of M. ``mask``, as ``input`` without its last dimension, is
    True where a sequence has a step; where it is False all states stay as they are. ``input`` is real or of the
    weights' dtype.

    Initial values: W as its class has it; V Glorot uniform, ±√(6 / (M + 2N)); b uniform on ±0.01; h0 uniform on
    ±√(3 / (2N)), so that E‖h0‖² = 1 (N in place of 2N if real; Wisdom et al., 2016, released code).

    Args:
        input_size: M.
        hidden_size: N.
        num_layers: L.
        batch_first: sequences along the first dimension of ``input`` and ``output``.
        unitary, hard, dtype, device: of all cells, see :class:`RestrictedUnitaryRNNCell`.

    Raises:
        ValueError: for sizes below 1, a dtype that ``unitary`` refuses, a tensor of a wrong shape, an empty sequence.
        TypeError: for a ``unitary`` that makes no :class:`UnitaryMap`, a tensor of a wrong dtype.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        *,
        unitary: Callable[..., UnitaryMap] = RestrictedUnitary,
        hard: bool = False,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes("RestrictedUnitaryRNN", input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        sizes = [input_size] + [hidden_size] * (num_layers - 1)
        cells = [
            RestrictedUnitaryRNNCell(M, hidden_size, unitary=unitary, hard=hard, dtype=dtype, device=device)
            for M in sizes
        ]
        super().__init__(cells, batch_first)
