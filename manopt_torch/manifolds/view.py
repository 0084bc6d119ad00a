"""The same manifold in another layout: wide matrices and convolution kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from manopt_torch.manifolds.base import Manifold
from manopt_torch.manifolds.blocks import Blocks


def _points(name: str) -> Callable[..., Any]:
    """Method ``name`` of the base, whose results have the layout of its arguments."""

    def method(self: View, x: Tensor, *others: Tensor) -> Any:
        out = getattr(self.base, name)(self._seen(x), *map(self._seen, others))
        back = tuple(self._back(x.shape, y) for y in (out if isinstance(out, tuple) else (out,)))
        return back if isinstance(out, tuple) else back[0]

    return method


def _numbers(name: str) -> Callable[..., Tensor]:
    """Method ``name`` of the base, whose result is a number per point."""
    return lambda self, *tensors: getattr(self.base, name)(*map(self._seen, tensors))


@dataclasses.dataclass(frozen=True)
class View(Manifold):
    """``base`` on tensors that are laid out differently from its points.

    * ``View(Stiefel(), "transpose")``: (*B, p, n), whose transposes are points of ``base``: wide weights with
      orthonormal rows.
    * ``View(Stiefel(), "flatten", ndim=4)``: kernels (*B, out, in/groups, kh, kw) read as matrices
      (*B, out, in/groups·kh·kw); in general the last of the ``ndim`` event dimensions are flattened into one.

    One goes into the other: ``View(View(Stiefel(), "transpose"), "flatten", ndim=4)`` is a kernel whose matrix has
    orthonormal rows; :func:`view_for` writes these. A change of layout is an isometry of the ambient space, so that
    every function is the one of ``base``.
    """

    base: Manifold
    op: Literal["transpose", "flatten"]
    ndim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.op == "flatten") != (self.ndim is not None):
            raise ValueError(
                f'"flatten" needs ndim, the number of event dimensions, and "transpose" none; got {self!r}'
            )
        if self.base.event_dim not in ((2,) if self.ndim is None else range(1, self.ndim + 1)):
            raise ValueError(f"{self.base!r} has points of {self.base.event_dim} dimensions, which do not fit {self!r}")

    constant_norm = property(lambda self: self.base.constant_norm)
    second_order = property(lambda self: self.base.second_order)
    isometric = property(lambda self: self.base.isometric)
    step_limit = property(lambda self: self.base.step_limit)

    @property
    def event_dim(self) -> int:
        return self.base.event_dim if self.ndim is None else self.ndim

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        if self.ndim is None:
            return tuple((p, n) for n, p in self.base.event_shapes)
        return tuple((*s[:-1], *(1,) * (self.ndim - len(s)), s[-1]) for s in self.base.event_shapes)

    def _kept(self, shape: tuple[int, ...]) -> int:
        """Number of leading dimensions that flattening leaves alone."""
        return len(shape) - self.event_dim + self.base.event_dim - 1

    def _seen(self, t: Tensor) -> Tensor:
        return t.mT if self.ndim is None else t.flatten(self._kept(t.shape))

    def _back(self, shape: tuple[int, ...], t: Tensor) -> Tensor:
        return t.mT if self.ndim is None else t.unflatten(-1, shape[self._kept(shape) :])

    def _base_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        super().check_shape(shape)
        return tuple(self._seen(torch.empty(shape, device="meta")).shape)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        self.base.check_shape(self._base_shape(shape))

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        return self.base.dim(*self._base_shape(shape), dtype=dtype)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        x = self.base.random(*self._base_shape(shape), dtype=dtype, device=device, generator=generator)
        return self._back(shape, x).contiguous()

    def nearest(self, z: Tensor) -> Tensor:
        return self._back(z.shape, self.base.nearest(self._seen(z))).contiguous()

    project, rgrad, retract, move, weingarten = map(_points, ("project", "rgrad", "retract", "move", "weingarten"))
    exp, log = map(_points, ("exp", "log"))
    residual, inner, norm, dist = map(_numbers, ("residual", "inner", "norm", "dist"))


def view_for(
    manifold: Manifold, shape: tuple[int, ...], *, batch_dims: int = 0, blocks: int = 1, of: int = 1
) -> Manifold:
    """``manifold``, or the :class:`View` of it, that fits tensors of this ``shape``.

    ``shape`` is that of one point, behind ``batch_dims`` leading batch dimensions. A manifold of matrices reads more
    than two dimensions as a convolution kernel (out, in/groups, *kernel_size), flattened to
    (out, in/groups·∏kernel_size): a stack of matrices needs ``batch_dims=1``. A matrix that fits only transposed is
    seen transposed. Manifolds of numbers and of vectors take any shape as it is. Where the rows of a matrix are ``of``
    matrices, the first ``blocks`` of which are meant, the view is of :class:`Blocks`.

    Raises ``ValueError`` if nothing fits.
    """
    shape, ndim = tuple(shape), len(shape) - batch_dims
    flatten = manifold.event_dim == 2 and ndim > 2
    seen = (*shape[: batch_dims + 1], math.prod(shape[batch_dims + 1 :])) if flatten else shape
    candidates = [manifold, View(manifold, "transpose")] if manifold.event_dim == 2 else [manifold]
    if manifold.event_dim == 2 and of > 1:
        candidates = [Blocks(candidate, blocks, None if blocks == of else of) for candidate in candidates]
    refusals = []
    for candidate in candidates:
        try:
            candidate.check_shape(seen)
        except ValueError as refusal:
            refusals.append(str(refusal))
        else:
            return View(candidate, "flatten", ndim=ndim) if flatten else candidate
    raise ValueError(f"no view of {manifold!r} fits shape {shape}: {'; '.join(refusals)}")
