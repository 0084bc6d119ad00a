"""Unit vectors."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch import linalg
from manopt_torch.manifolds.base import Manifold


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """``⟨a, b⟩`` over the last dimension, which is kept: (*B, n), (*B, n) -> (*B, 1), real."""
    return ((a.conj() * b).real if a.is_complex() else a * b).sum(-1, keepdim=True)


def _length(a: Tensor) -> Tensor:
    """``‖a‖`` over the last dimension, which is kept, with derivative zero at zero: (*B, n) -> (*B, 1), real."""
    square = _dot(a, a)
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), square)


def _sinc(q: Tensor) -> Tensor:
    """``sin θ/θ`` as a smooth function of q = θ² ≥ 0; its power series up to q = 0.02."""
    small = q < 0.02
    t, angle = torch.where(small, q, 0), torch.where(small, 1, q).sqrt()
    series = t / -math.factorial(11)
    for j in range(4, 0, -1):
        series = (series + (-1) ** j / math.factorial(2 * j + 1)) * t
    return torch.where(small, series + 1, angle.sin() / angle)


@dataclasses.dataclass(frozen=True)
class Sphere(Manifold):
    """Unit vectors ``{x : ‖x‖ = 1}``, shape (*B, n), ambient metric: S^{n−1} for real, S^{2n−1} for complex tensors.

    * ``retraction``, with θ = ‖u‖: ``"exp"``, the geodesic ``cos θ x + (sin θ/θ) u``, or ``"projection"``,
      ``(x + u)/‖x + u‖``. Both turn x in the plane of x and u, by θ and by arctan θ; the result is normalised, so that
      rounding errors do not add up. ``move`` is parallel transport along that great circle, an isometry.
    * ``dist(x, y) = 2 atan2(‖x − y‖, ‖x + y‖)``, precise at any angle, 0 and π included.
    * ``log`` of antipodes has length π and an arbitrary, fixed direction (real n = 1 has no direction: NaN).
    * ``nearest(z) = z/‖z‖``; every point is nearest to z = 0, and the first basis vector is returned.
    """

    retraction: Literal["exp", "projection"] = "exp"

    constant_norm = True
    event_dim = 1
    event_shapes = ((2,), (3,), (10,))
    second_order = True
    isometric = True

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return math.prod(shape[:-1]) * (shape[-1] * (2 if dtype.is_complex else 1) - 1)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - x * _dot(x, v)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.move(x, u)[0]

    def residual(self, x: Tensor) -> Tensor:
        return (_length(x) - 1).abs()[..., 0]

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Uniform: a Gaussian vector, normalised."""
        self.check_shape(shape)
        return self.nearest(torch.randn(shape, dtype=dtype, device=device, generator=generator))

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        q = _dot(u, u).clamp(max=torch.finfo(u.dtype).max)  # θ² of a step so long that it overflows
        if self.retraction == "exp":  # s = sin φ/θ and k = (1 − cos φ)/θ², φ the angle of the turn
            s, half = _sinc(torch.stack((q, q / 4)))
            k = half * half / 2
        else:
            s = (1 + q).rsqrt()
            k = s * s / (1 + s)
        y = torch.addcmul((1 - q * k) * x, s, u)
        y = linalg.keep_zero_steps(x, u, y / _length(y), 1)
        return (y, *(v - _dot(u, v) * (k * u + s * x) for v in vs))

    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return -_dot(x, g) * u

    def nearest(self, z: Tensor) -> Tensor:
        scale = z.detach().abs().amax(-1, keepdim=True)
        first = torch.eye(1, z.shape[-1], dtype=z.dtype, device=z.device)[0]
        z = torch.where(scale == 0, first, z / torch.where(scale == 0, 1, scale))
        return z / _length(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return Sphere("exp").retract(x, u)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        near = _dot(y - x, y - x) <= _dot(y + x, y + x)
        u = self.project(x, torch.where(near, y - x, y + x))  # the difference of the two that loses no digits
        across = (
            1j * x if x.is_complex() else (torch.arange(x.shape[-1], device=x.device) == x.abs().argmin(-1, True)) * 1
        )
        u = torch.where(near | (u != 0).any(-1, keepdim=True), u, self.project(x, across))
        angle = self.dist(x, y)[..., None]
        length = torch.where(near, _sinc(angle**2), _length(u) / torch.where(near, 1, angle))
        return u / length

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * torch.atan2(_length(y - x), _length(y + x))[..., 0]
