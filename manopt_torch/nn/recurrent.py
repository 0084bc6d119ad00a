"""What recurrent layers with a unitary recurrence share: one step, sequences, layers, masks, packed input."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from manopt_torch.nn.activations import ModReLU
from manopt_torch.nn.complex import ComplexModule
from manopt_torch.nn.init import glorot_uniform_, uniform_
from manopt_torch.nn.recurrence import check_checkpoint_every

#: makes σ for a number of units
Activation = Callable[[int], nn.Module]


class UnitaryCell(ComplexModule, abc.ABC):
    """One step h ↦ σ(W h + V x), σ = modReLU with bias b; a subclass says what W is.

    Parameters: ``weight_ih`` V (N, M); ``modrelu.bias`` b (N,), real; ``h0`` (N,), the state to start from. A σ of its
    own is ``activation``, in the place of ``modrelu``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        hard: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        check_sizes(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        if dtype == torch.complex32 or not (dtype.is_complex or dtype.is_floating_point):
            raise ValueError(
                f"dtype of {type(self).__name__} must be complex64, complex128 or floating point, got {dtype}"
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(hidden_size, input_size, dtype=dtype, device=device))
        if activation is None:
            self.modrelu = ModReLU(hidden_size, hard, dtype=dtype.to_real(), device=device)
        elif hard:
            raise ValueError("hard is a form of modReLU, which activation replaces")
        self.activation = None if activation is None else activation(hidden_size)
        self.h0 = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))

    @abc.abstractmethod
    def states(
        self, input: Tensor, h: Tensor, mask: Tensor | None = None, checkpoint_every: int | None = None
    ) -> Tensor:
        """All states (T, B, N) from ``input`` (T, B, M) and the first one ``h`` (B, N); ``mask`` (T, B)."""

    def reset_parameters(self) -> None:
        """Draw V, b and h0 anew."""
        parts = 2 if self.weight_ih.is_complex() else 1
        glorot_uniform_(self.weight_ih, self.input_size, parts * self.hidden_size)
        uniform_(self.h0, math.sqrt(3 / (parts * self.hidden_size)))
        sigma = self.modrelu if self.activation is None else self.activation
        if callable(reset := getattr(sigma, "reset_parameters", None)):
            reset()

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state (B, N) or (N,), from ``input`` (B, M) or (M,) and ``hx`` of the result's shape, h0 if None."""
        check_input(type(self).__name__, input, self, (1, 2), f"(B, {self.input_size}) or ({self.input_size},)")
        shape = (*input.shape[:-1], self.hidden_size)
        h = self.h0.expand(shape) if hx is None else hx
        check_state(h, shape, self, input)
        x, h = (t if input.dim() == 2 else t.unsqueeze(0) for t in (cast(input, self), h))
        return self.states(x.unsqueeze(0), h)[0].reshape(shape)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


class UnitaryLayers(nn.Module):
    """A stack of cells over a sequence, called like ``torch.nn.RNN``; the states of one layer are the next one's input.

    Shapes, with T steps, B sequences, M inputs, N units, L layers: ``input`` (T, B, M), or (B, T, M) with
    ``batch_first``, or (T, M), or a ``PackedSequence``; ``hx`` and ``h_n`` (L, B, N), or (L, N); ``output``, every
    state of the last layer, as ``input`` with N in place of M. ``mask``, as ``input`` without its last dimension, is
    True where a sequence has a step; where it is False all states stay as they are.
    """

    def __init__(self, cells: Sequence[UnitaryCell], batch_first: bool, checkpoint_every: int | None = None) -> None:
        super().__init__()
        check_checkpoint_every(checkpoint_every)
        self.cells: Any = nn.ModuleList(cells)
        self.batch_first = batch_first
        self.checkpoint_every = checkpoint_every

    @property
    def input_size(self) -> int:
        return self.cells[0].input_size

    @property
    def hidden_size(self) -> int:
        return self.cells[0].hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.cells)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for cell in self.cells:
            cell.reset_parameters()

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """``(output, h_n)``: every state of the last layer, and the last state of every layer."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, mask)
        cell, name, M = self.cells[0], type(self).__name__, self.input_size
        check_input(
            name, input, cell, (2, 3), f"(B, T, {M}) or (T, {M})" if self.batch_first else f"(T, B, {M}) or (T, {M})"
        )
        if mask is not None and (mask.shape != input.shape[:-1] or mask.dtype != torch.bool):
            raise ValueError(
                f"mask must be a bool tensor of shape {tuple(input.shape[:-1])} for input of shape "
                f"{tuple(input.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        batched, swapped = input.dim() == 3, input.dim() == 3 and self.batch_first
        if input.shape[1 if swapped else 0] == 0:
            raise ValueError(f"input has no time step: shape {tuple(input.shape)}")
        x = cast(input, cell)
        x = (x.transpose(0, 1) if swapped else x) if batched else x.unsqueeze(1)
        if mask is not None:
            mask = (mask.transpose(0, 1) if swapped else mask) if batched else mask.unsqueeze(1)
        shape = (self.num_layers, *x.shape[1:-1], self.hidden_size)
        if hx is not None:
            check_state(hx, shape if batched else (shape[0], shape[2]), cell, input)
        x, last = self._run(x, None if hx is None else hx.reshape(shape), mask)
        if not batched:
            return x.squeeze(1), last.squeeze(1)
        return x.transpose(0, 1) if swapped else x, last

    def _run(self, x: Tensor, hx: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        last = []
        for number, cell in enumerate(self.cells):
            h = cell.h0.expand(x.shape[1], -1) if hx is None else hx[number]
            x = cell.states(x, h, mask, self.checkpoint_every)
            last.append(x[-1])
        return x, torch.stack(last)

    def _packed(self, input: PackedSequence, hx: Tensor | None, mask: Tensor | None) -> tuple[PackedSequence, Tensor]:
        """Sequences sorted by length, longest first, padded; the padding is masked."""
        if mask is not None:
            raise ValueError("a PackedSequence says by itself which steps there are: give it without a mask")
        data, sizes, order, back = input
        check_input(type(self).__name__, data, self.cells[0], (2,), f"(steps, {self.input_size}) in a PackedSequence")
        B = int(sizes[0])
        steps = (torch.arange(B) < sizes.unsqueeze(-1)).to(data.device)
        x = cast(data, self.cells[0])
        x = x.new_zeros(len(sizes), B, self.input_size).masked_scatter(steps.unsqueeze(-1), x)
        if hx is not None:
            check_state(hx, (self.num_layers, B, self.hidden_size), self.cells[0], data)
            hx = hx if order is None else hx[:, order]
        output, last = self._run(x, hx, steps)
        return PackedSequence(output[steps], sizes, order, back), last if back is None else last[:, back]

    def extra_repr(self) -> str:
        return f"batch_first={self.batch_first}" + (
            f", checkpoint_every={self.checkpoint_every}" if self.checkpoint_every else ""
        )


def check_sizes(name: str, **sizes: int) -> None:
    """Raise ``ValueError`` for a size below 1."""
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{size} of {name} must be at least 1, got {value}")


def check_input(name: str, input: Tensor, cell: UnitaryCell, dims: tuple[int, ...], wanted: str) -> None:
    """Raise if ``input`` does not fit ``cell``: ``TypeError`` for its type or dtype, ``ValueError`` for its shape."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input of {name} must be a tensor, got {type(input).__name__}")
    if input.dim() not in dims or input.shape[-1] != cell.input_size:
        raise ValueError(f"input of {name} must have shape {wanted}, got {tuple(input.shape)}")
    dtype, real = cell.weight_ih.dtype, cell.weight_ih.real.dtype
    if input.dtype in (dtype, real):
        return
    if not (input.is_floating_point() and torch.is_autocast_enabled(input.device.type)):
        raise TypeError(
            f"input of {name} must be {' or '.join(sorted({str(real), str(dtype)}))}, as the weights are {dtype}, got "
            f"{input.dtype}: convert the input, or the layer with .double() or .float()"
        )


def check_state(hx: Tensor, shape: tuple[int, ...], cell: UnitaryCell, input: Tensor) -> None:
    """Raise if ``hx`` is no state: ``TypeError`` for its type or dtype, ``ValueError`` for its shape."""
    if not isinstance(hx, Tensor):
        raise TypeError(f"hx must be one tensor of shape {shape}, got {type(hx).__name__}")
    if tuple(hx.shape) != shape:
        raise ValueError(f"hx must have shape {shape} for input of shape {tuple(input.shape)}, got {tuple(hx.shape)}")
    if hx.dtype != cell.weight_ih.dtype:
        raise TypeError(f"hx must be {cell.weight_ih.dtype}, as the weights are, got {hx.dtype}")


def cast(input: Tensor, cell: UnitaryCell) -> Tensor:
    """``input`` in the precision of the weights, from which autocast may have moved it."""
    return input.to(cell.weight_ih.dtype if input.is_complex() else cell.weight_ih.real.dtype)
