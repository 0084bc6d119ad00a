"""The orthogonal group of real and the unitary group of complex square matrices."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch import linalg
from manopt_torch.manifolds.base import Manifold


@dataclasses.dataclass(frozen=True)
class Unitary(Manifold):
    """O(n) = {X : XᵀX = I} for real and U(n) = {X : XᴴX = I} for complex tensors, with the Frobenius metric.

    Shape (*B, n, n). ``retraction`` is ``"exp"``, ``X expm(XᴴU)``, which is the geodesic, or ``"cayley"``,
    ``(I − W/2)⁻¹(I + W/2) X`` with ``W = U Xᴴ``; both are followed by ``polish`` Newton-Schulz steps
    ``X ← X(3I − XᴴX)/2``, so that rounding errors do not add up. ``move`` multiplies carried vectors by a unitary
    matrix, an isometry.

    A step of an SGD of learning rate lr is ``(I + λ/2 A)⁻¹(I − λ/2 A) X``, A = G Xᴴ − X Gᴴ, with λ = lr/2: the
    Frobenius metric is twice the canonical one (Wisdom et al. 2016, full-capacity unitary RNN).

    ``log`` is ``X log(XᴴY)``, principal. O(n) has two components, det = ±1, that no curve joins: ``log`` and
    ``dist`` of points in different ones are NaN.
    """

    retraction: Literal["cayley", "exp"] = "cayley"
    polish: int = 1

    constant_norm = True

    @property
    def event_dim(self) -> int:
        return 2

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((1, 1), (2, 2), (3, 3), (6, 6))

    @property
    def second_order(self) -> bool:
        return True

    @property
    def isometric(self) -> bool:
        return True

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-1] != shape[-2]:
            raise ValueError(
                f"{self!r} needs square matrices, got shape {tuple(shape)}; write Stiefel() for rectangular ones"
            )

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        n = shape[-1]
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return math.prod(shape[:-2]) * (n * n if dtype.is_complex else n * (n - 1) // 2)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return x @ linalg.skew(x.mH @ v)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.move(x, u)[0]

    def residual(self, x: Tensor) -> Tensor:
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

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        if self.retraction == "cayley":
            return linalg.cayley(x, u, *vs, polish=self.polish)
        e = linalg.expm_skew(linalg.skew(x.mH @ u))
        y = linalg.newton_schulz(x @ e, self.polish)
        return (linalg.keep_zero_steps(x, u, y, 2), *(v @ e for v in vs))

    def nearest(self, z: Tensor) -> Tensor:
        return linalg.polar(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return x @ linalg.expm_skew(linalg.skew(x.mH @ u))

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        q = x.mH @ y
        u = x @ linalg.log_unitary(q)
        if q.is_complex():
            return u
        return torch.where((torch.linalg.det(q.detach()) < 0)[..., None, None], math.nan, u)
