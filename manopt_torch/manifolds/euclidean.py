"""Flat space: every number is a point of its own."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from manopt_torch.manifolds.base import Manifold


@dataclasses.dataclass(frozen=True)
class Euclidean(Manifold):
    """Real or complex numbers with the ambient metric; ``event_dim = 0``, so that a tensor is a batch of points.

    ``R_x(u) = exp_x(u) = x + u``, ``log_x(y) = y − x``, ``dist(x, y) = |y − x|``; vectors are carried unchanged. Here
    an optimizer is the one of ``torch.optim``.
    """

    event_dim = 0
    event_shapes = ((),)
    second_order = True
    isometric = True

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return math.prod(shape) * (2 if dtype.is_complex else 1)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return torch.broadcast_tensors(x, v)[1]

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def residual(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x.real)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Standard normal numbers (complex: E|z|² = 1), for want of a uniform distribution."""
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        y = x + u
        return (y, *(torch.broadcast_tensors(y, v)[1] for v in vs))

    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return torch.zeros_like(u)

    def nearest(self, z: Tensor) -> Tensor:
        return z

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return (y - x).abs()
