"""Several matrices in one tensor, below one another: groups of a convolution, gates of a cell, heads of attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manopt_torch.manifolds.base import Manifold
from manopt_torch.manifolds.euclidean import Euclidean

FREE = Euclidean()


def _points(name: str) -> Callable[..., Any]:
    """Method ``name`` of the base on each block, and of flat space on the free rows."""

    def method(self: Blocks, *tensors: Tensor) -> Any:
        bound, free = zip(*map(self._split, tensors), strict=True)
        on, off = getattr(self.base, name)(*bound), getattr(FREE, name)(*free)
        if not isinstance(on, tuple):
            return self._join(on, off)
        return tuple(self._join(b, f) for b, f in zip(on, off, strict=True))

    return method


def _root_of_squares(name: str) -> Callable[..., Tensor]:
    """Method ``name``, a number per point: √(Σ of squares over blocks and free entries)."""

    def method(self: Blocks, *tensors: Tensor) -> Tensor:
        bound, free = zip(*map(self._split, tensors), strict=True)
        on, off = getattr(self.base, name)(*bound), getattr(FREE, name)(*free).flatten(-2)
        return torch.linalg.vector_norm(torch.cat([on, off], -1), dim=-1)

    return method


@dataclasses.dataclass(frozen=True)
class Blocks(Manifold):
    """Matrices (*B, of·n, p) read as ``of`` blocks (n, p), the first ``blocks`` of which are points of ``base``.

    The product of ``blocks`` copies of ``base`` and of flat space for the rest, as one tensor: with E = [E₁; …; E_of],
    ``⟨u, v⟩_x = Σᵢ ⟨uᵢ, vᵢ⟩_xᵢ + ⟨u_free, v_free⟩``. Without ``of``, all are points of ``base``. These are

    * a convolution with g groups, ``View(Blocks(M, g), "flatten", ndim=4)``: every group has a matrix of its own;
    * recurrent weights of a GRU, ``Blocks(M, 3)``, and of an LSTM, ``Blocks(M, 4)``: a matrix for each gate;
    * ``in_proj_weight`` of attention with h heads, ``Blocks(M, 2·h, of=3·h)``: queries and keys of each head, and the
      values free;

    and :func:`manopt_torch.constrain` writes them. To an optimizer it is one point: an adaptive one has one second
    moment for all of it.

    ``random`` draws free rows as normal numbers of variance 1/p.

    Raises ``ValueError`` for a base whose points are no matrices, and unless ``1 <= blocks <= of``.
    """

    base: Manifold
    blocks: int
    of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base.event_dim != 2 or not 1 <= self.blocks <= self._of:
            raise ValueError(f"expected a base of matrices and 1 <= blocks <= of, got {self!r}")

    event_dim = 2
    constant_norm = property(lambda self: self.base.constant_norm and self.blocks == self._of)
    second_order = property(lambda self: self.base.second_order)
    isometric = property(lambda self: self.base.isometric)
    step_limit = property(lambda self: self.base.step_limit)

    @property
    def _of(self) -> int:
        return self.blocks if self.of is None else self.of

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((self._of * n, p) for n, p in self.base.event_shapes[1:3])

    def _split(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(*B, of·n, p) -> the blocks on ``base`` (*B, blocks, n, p), the rows below them."""
        n = t.shape[-2] // self._of
        bound, free = t.split([self.blocks * n, t.shape[-2] - self.blocks * n], -2)
        return bound.unflatten(-2, (self.blocks, n)), free

    def _join(self, bound: Tensor, free: Tensor) -> Tensor:
        return torch.cat([bound.flatten(-3, -2), free], -2)

    def _shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *batch, rows, p = shape
        n = rows // self._of
        return (*batch, self.blocks, n, p), (*batch, rows - self.blocks * n, p)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-2] % self._of:
            raise ValueError(f"{self!r} needs rows in a multiple of {self._of}, got shape {tuple(shape)}")
        self.base.check_shape(self._shapes(shape)[0])

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        bound, free = self._shapes(shape)
        return self.base.dim(*bound, dtype=dtype) + FREE.dim(*free, dtype=dtype)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        self.check_shape(shape)
        on, off = (
            M.random(*s, dtype=dtype, device=device, generator=generator)
            for M, s in zip((self.base, FREE), self._shapes(shape), strict=True)
        )
        return self._join(on, off / math.sqrt(shape[-1]))

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        (x, x_free), (u, u_free), (v, v_free) = map(self._split, (x, u, v))
        return self.base.inner(x, u, v).sum(-1) + FREE.inner(x_free, u_free, v_free).sum((-2, -1))

    project, rgrad, retract, move, weingarten = map(_points, ("project", "rgrad", "retract", "move", "weingarten"))
    nearest, exp, log = map(_points, ("nearest", "exp", "log"))
    residual, dist = map(_root_of_squares, ("residual", "dist"))

    def with_free_rows_of(self, x: Tensor, other: Tensor) -> Tensor:
        """The blocks of ``x`` on ``base``, above the free rows of ``other``: (*B, of·n, p) each."""
        return self._join(self._split(x)[0], self._split(other)[1])
