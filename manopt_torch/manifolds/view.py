"""The same manifold seen in another layout: wide matrices and convolution kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch.manifolds.base import Manifold


@dataclasses.dataclass(frozen=True)
class View(Manifold):
    """``base`` on tensors that are laid out differently from its points.

    * ``View(Stiefel(), "transpose")``: (*B, p, n) whose transpose is a point of ``base``; a wide weight with
      orthonormal rows.
    * ``View(Stiefel(), "flatten", ndim=4)``: a kernel (out, in/groups, kh, kw) read as the matrix
      (out, in/groups·kh·kw); in general the last of the ``ndim`` event dimensions are flattened into one.

    One goes into the other: ``View(View(Stiefel(), "transpose"), "flatten", ndim=4)`` is the kernel whose matrix has
    orthonormal rows; :func:`view_for` writes these. A layout is an isometry of the ambient space, so that every
    function is the one of ``base``.
    """

    base: Manifold
    op: Literal["transpose", "flatten"]
    ndim: int | None = None

    def __post_init__(self) -> None:
        if self.op == "transpose" and (self.base.event_dim != 2 or self.ndim is not None):
            raise ValueError(f'"transpose" needs a manifold of matrices and no ndim, got {self!r}')
        if self.op == "flatten" and (self.ndim is None or not 0 < self.base.event_dim <= self.ndim):
            raise ValueError(
                f'"flatten" needs ndim >= the event_dim of the manifold, which must not be 0; got {self!r}'
            )

    @property
    def event_dim(self) -> int:
        return self.base.event_dim if self.ndim is None else self.ndim

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        if self.ndim is None:
            return tuple((p, n) for n, p in self.base.event_shapes)
        shapes = []
        for *kept, last in self.base.event_shapes:
            factor = next((k for k in range(2, last) if last % k == 0), 1)
            tail = (last // factor, factor, *(1,) * self.ndim)
            shapes.append((*kept, *tail)[: self.ndim])
        return tuple(s for s in shapes if math.prod(s))

    @property
    def constant_norm(self) -> bool:  # type: ignore[override]
        return self.base.constant_norm

    @property
    def second_order(self) -> bool:
        return self.base.second_order

    @property
    def isometric(self) -> bool:
        return self.base.isometric

    @property
    def step_limit(self) -> float:
        return self.base.step_limit

    def _base_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(*B, *S) in the layout of ``base``."""
        if self.ndim is None:
            return (*shape[:-2], shape[-1], shape[-2])
        kept = len(shape) - self.ndim + self.base.event_dim - 1
        return (*shape[:kept], math.prod(shape[kept:]))

    def _to(self, *tensors: Tensor) -> list[Tensor]:
        if self.ndim is None:
            return [t.mT for t in tensors]
        return [t.flatten(t.dim() - self.ndim + self.base.event_dim - 1) for t in tensors]

    def _from(self, shape: tuple[int, ...], t: Tensor) -> Tensor:
        """``t`` back in the layout of tensors of this ``shape``."""
        if self.ndim is None:
            return t.mT
        return t.unflatten(-1, shape[len(shape) - self.ndim + self.base.event_dim - 1 :])

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        self.base.check_shape(self._base_shape(shape))

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        return self.base.dim(*self._base_shape(shape), dtype=dtype)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return self._from(x.shape, self.base.project(*self._to(x, v)))

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self._from(x.shape, self.base.retract(*self._to(x, u)))

    def residual(self, x: Tensor) -> Tensor:
        return self.base.residual(*self._to(x))

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        self.check_shape(shape)
        x = self.base.random(*self._base_shape(shape), dtype=dtype, device=device, generator=generator)
        return self._from(shape, x).contiguous()

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self._from(x.shape, self.base.rgrad(*self._to(x, g)))

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return self.base.inner(*self._to(x, u, v))

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        return self.base.norm(*self._to(x, u))

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._from(x.shape, t) for t in self.base.move(*self._to(x, u, *vs)))

    def nearest(self, z: Tensor) -> Tensor:
        return self._from(z.shape, self.base.nearest(*self._to(z)))

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self._from(x.shape, self.base.exp(*self._to(x, u)))

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return self._from(x.shape, self.base.log(*self._to(x, y)))

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return self.base.dist(*self._to(x, y))


def view_for(manifold: Manifold, shape: tuple[int, ...], *, batch_dims: int = 0) -> Manifold:
    """``manifold``, or the :class:`View` of it, that fits one tensor of this ``shape``.

    ``shape`` is that of one point, behind ``batch_dims`` leading batch dimensions. A manifold of matrices takes more
    than two dimensions as a convolution kernel (out, in/groups, *kernel_size), flattened to
    (out, in/groups·∏kernel_size): a stack of matrices needs ``batch_dims=1``. A matrix that fits only transposed is seen transposed. Manifolds of numbers and
    of vectors take any shape as it is.

    Raises ``ValueError`` if nothing fits.
    """
    shape, ndim = tuple(shape), len(shape) - batch_dims
    flatten = manifold.event_dim == 2 and ndim > 2
    matrix = (*shape[: batch_dims + 1], math.prod(shape[batch_dims + 1 :])) if flatten else shape
    try:
        manifold.check_shape(matrix)
    except ValueError as error:
        if manifold.event_dim != 2 or ndim < 2:
            raise
        seen: Manifold = View(manifold, "transpose")
        try:
            seen.check_shape(matrix)
        except ValueError:
            raise ValueError(f"no view of {manifold!r} fits shape {shape}: {error}") from error
    else:
        seen = manifold
    return View(seen, "flatten", ndim=ndim) if flatten else seen
