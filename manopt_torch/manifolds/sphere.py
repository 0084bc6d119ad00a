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
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


def _sin_and_versine(q: Tensor) -> tuple[Tensor, Tensor]:
    """``sin θ/θ`` and ``(1 − cos θ)/θ²`` as smooth functions of q = θ²; power series for q < 1/4."""
    small = q < 0.25
    t = torch.where(small, q, 0)
    s, k = torch.zeros_like(t), torch.zeros_like(t)
    for j in range(6, -1, -1):
        s = 1 / math.factorial(2 * j + 1) - t * s
        k = 1 / math.factorial(2 * j + 2) - t * k
    q = torch.where(small, 1, q)
    angle = q.sqrt()
    return torch.where(small, s, angle.sin() / angle), torch.where(small, k, 2 * (angle / 2).sin() ** 2 / q)


@dataclasses.dataclass(frozen=True)
class Sphere(Manifold):
    """Unit vectors ``{x : ‖x‖ = 1}`` with the ambient metric: S^{n−1} for real, S^{2n−1} for complex tensors.

    Shape (*B, n). With θ = ‖u‖, both retractions run along the great circle of ``u``:

    * ``"exp"``: ``cos θ x + (sin θ/θ) u``, the geodesic itself; ``"projection"``: ``(x + u)/‖x + u‖``, which turns by
      arctan θ. The result is normalised, so that nothing drifts.
    * ``move`` is parallel transport along that great circle, an isometry.
    * ``dist(x, y) = 2 atan2(‖x − y‖, ‖x + y‖)``, exact for small angles and near π.
    * ``log(x, y)`` of antipodes has length π and an arbitrary but fixed direction (real n = 1 has none: NaN).
    * ``nearest(z) = z/‖z‖``; every point is nearest to z = 0, and the first basis vector is returned.
    """

    retraction: Literal["exp", "projection"] = "exp"

    constant_norm = True

    @property
    def event_dim(self) -> int:
        return 1

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((2,), (3,), (10,))

    @property
    def second_order(self) -> bool:
        return True

    @property
    def isometric(self) -> bool:
        return True

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
        """Uniform on the sphere: a Gaussian vector, normalised."""
        self.check_shape(shape)
        return self.nearest(torch.randn(shape, dtype=dtype, device=device, generator=generator))

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        return self._turn(x, u, vs, self.retraction)

    def _turn(self, x: Tensor, u: Tensor, vs: tuple[Tensor, ...], retraction: str) -> tuple[Tensor, ...]:
        """Turn x by φ in the plane of x and u: s = sin φ/θ, k = (1 − cos φ)/θ²."""
        q = _dot(u, u)
        if retraction == "exp":
            s, k = _sin_and_versine(q)
        else:
            s = (1 + q).rsqrt()
            k = s * s / (1 + s)
        y = (1 - q * k) * x + s * u
        y = linalg.keep_zero_steps(x, u, y / _length(y), 1)
        return (y, *(v - _dot(u, v) * (k * u + s * x) for v in vs))

    def nearest(self, z: Tensor) -> Tensor:
        scale = z.detach().abs().amax(-1, keepdim=True)
        z = torch.where(scale == 0, torch.eye(1, z.shape[-1], dtype=z.dtype, device=z.device)[0], z / scale)
        return z / _length(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self._turn(x, u, (), "exp")[0]

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        chord, antichord = _dot(y - x, y - x), _dot(y + x, y + x)
        u = self.project(x, torch.where(chord <= antichord, y - x, y + x))  # the difference that loses no digits
        m = chord / 4  # sin²(θ/2)
        small = m < 0.02
        t, series = torch.where(small, m, 0), torch.ones_like(m)
        for j in range(9, 0, -1):  # θ/sin θ = Σ (2m)ʲ j!/(2j+1)!!
            series = 1 + series * t * (2 * j / (2 * j + 1))
        towards = 1j * x if x.is_complex() else torch.nn.functional.one_hot(x.abs().argmin(-1), x.shape[-1]).to(x.dtype)
        far = torch.where(small | (_dot(u, u) == 0), self.project(x, towards), u)
        far = far * (self.dist(x, y)[..., None] / torch.where(small, 1, _length(far)))
        return torch.where(small, u * series, far)

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * torch.atan2(_length(y - x), _length(y + x))[..., 0]
