"""Matrices with orthonormal columns."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch import linalg
from manopt_torch.manifolds.base import Manifold


@dataclasses.dataclass(frozen=True)
class Stiefel(Manifold):
    """St(n, p) = {X : XᴴX = I}, n ≥ p, real or complex. Shape (*B, n, p)."""

    metric: Literal["euclidean", "canonical"] = "euclidean"
    retraction: Literal["cayley", "qr", "polar", "exp", "newton_schulz"] = "cayley"
    polish: int = 1

    constant_norm = True

    @property
    def event_dim(self) -> int:
        return 2

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((3, 3), (5, 3), (4, 1), (1, 1), (9, 2))

    @property
    def second_order(self) -> bool:
        if self.metric == "canonical":
            return self.retraction in ("cayley", "exp")
        return self.retraction in ("polar", "newton_schulz", "exp")

    @property
    def isometric(self) -> bool:
        return self.retraction == "cayley"

    @property
    def step_limit(self) -> float:
        if self.retraction != "newton_schulz":
            return math.inf
        limit = math.sqrt(4 / 3 * (0.75e-14) ** (0.5**self._steps))
        return limit if self.metric == "euclidean" else limit / math.sqrt(2)

    @property
    def _steps(self) -> int:
        return 4 + self.polish

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-2] < shape[-1]:
            raise ValueError(
                f"{self!r} needs n >= p, got shape {tuple(shape)}; write view_for({self!r}, {tuple(shape)}) for wide "
                "matrices, whose rows are then orthonormal"
            )

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        n, p = shape[-2:]
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return math.prod(shape[:-2]) * (2 * n * p - p * p if dtype.is_complex else n * p - p * (p + 1) // 2)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - x @ linalg.herm(x.mH @ v)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.move(x, u)[0]

    def residual(self, x: Tensor) -> Tensor:
        self.check_shape(x.shape)
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return torch.linalg.matrix_norm(x.mH @ x - eye)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Haar-distributed: Q of a Gaussian matrix, R with positive diagonal (Mezzadri 2007)."""
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        gaussian = torch.randn(shape, dtype=wide, device=device, generator=generator)
        return linalg.qr_positive(gaussian)[0].to(dtype)

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self.project(x, g) if self.metric == "euclidean" else g - x @ (g.mH @ x)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        if self.metric == "euclidean":
            return super().inner(x, u, v)
        a, b = x.mH @ u, x.mH @ v
        return super().inner(x, u, v) - super().inner(a, a, b) / 2

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        if self.retraction == "cayley":
            return linalg.cayley(x, u, *vs, polish=self.polish)
        if self.retraction == "exp":
            y = self.exp(x, u)
        elif self.retraction == "qr":
            y = linalg.qr_positive(x + u)[0]
        elif self.retraction == "polar":
            y = linalg.polar(x + u)
        else:
            y = linalg.newton_schulz(x + u, self._steps)
        y = linalg.keep_zero_steps(x, u, y, 2)
        return (y, *(self.project(y, v) for v in vs))

    def nearest(self, z: Tensor) -> Tensor:
        self.check_shape(z.shape)
        return linalg.polar(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        x, u = torch.broadcast_tensors(x, u)
        p = x.shape[-1]
        a = linalg.skew(x.mH @ u)
        normal = u - x @ a
        scale = torch.linalg.matrix_norm(normal.detach(), keepdim=True).clamp(min=1)
        eye = torch.eye(p, dtype=x.dtype, device=x.device).expand_as(a)
        turn = 2 * a if self.metric == "euclidean" else a
        generator = torch.cat(
            [
                torch.cat([turn, normal.mH @ normal / -scale], -1),
                torch.cat([scale * eye, torch.zeros_like(a)], -1),
            ],
            -2,
        )
        y = torch.cat([x, normal / scale], -1) @ torch.linalg.matrix_exp(generator)[..., :p]
        if self.metric == "euclidean":
            y = y @ linalg.expm_skew(-a)
        return linalg.newton_schulz(y, self.polish)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[-1] == x.shape[-2]:
            q = x.mH @ y
            u = x @ linalg.log_unitary(q)
            if q.is_complex():
                return u
            return torch.where((torch.linalg.det(q.detach()) < 0)[..., None, None], math.nan, u)
        u = self.project(x, y - x)
        for _ in range(200):
            gap = self.project(x, y - self.exp(x, u))
            u = u + gap
            if gap.detach().abs().max() < 1e-15:
                break
        return u
