"""The orthogonal group of real and the unitary group of complex square matrices."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch import linalg, orthonormal
from manopt_torch.manifolds.base import Manifold


@dataclasses.dataclass(frozen=True)
class Unitary(Manifold):
    """O(n) = {X : XᵀX = I} for real, U(n) = {X : XᴴX = I} for complex tensors (*B, n, n), with the Frobenius metric.

    * ``retraction``: ``"cayley"``, ``(I − W/2)⁻¹(I + W/2) X`` with ``W = U Xᴴ``, or ``"exp"``, the geodesic
      ``X expm(XᴴU)``. ``polish`` Newton-Schulz steps ``X ← X(3I − XᴴX)/2`` follow, lest rounding errors add up.
    * ``move`` multiplies the carried vectors by the same unitary matrix as the point, an isometry.
    * ``log(x, y)`` is ``X log(XᴴY)``, principal. No curve joins the two components det = ±1 of O(n): between them
      ``log`` and ``dist`` are NaN.

    An SGD step of length lr is the Cayley step ``(I + λ/2 A)⁻¹(I − λ/2 A) X``, ``A = G Xᴴ − X Gᴴ``, of the
    full-capacity unitary RNN (Wisdom et al. 2016) with λ = lr/2: the Frobenius metric is twice the canonical one.
    """

    retraction: Literal["cayley", "exp"] = "cayley"
    polish: int = 1

    constant_norm = True
    event_dim = 2
    event_shapes = ((1, 1), (2, 2), (3, 3), (6, 6))
    second_order = True
    isometric = True

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-1] != shape[-2]:
            raise ValueError(
                f"{self!r} needs square matrices, got shape {tuple(shape)}; Stiefel() is the one for other shapes"
            )

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        n = shape[-1]
        return math.prod(shape[:-2]) * (n * n if dtype.is_complex else n * (n - 1) // 2)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return x @ linalg.skew(x.mH @ v)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.move(x, u)[0]

    def residual(self, x: Tensor) -> Tensor:
        return orthonormal.residual(x)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        self.check_shape(shape)
        return orthonormal.haar(shape, dtype, device, generator)

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        if self.retraction == "cayley":
            return linalg.cayley(x, u, *vs, polish=self.polish)
        turn = linalg.expm_skew(linalg.skew(x.mH @ u))
        y = linalg.newton_schulz(x @ turn, self.polish)
        return (linalg.keep_zero_steps(x, u, y, 2), *(v @ turn for v in vs))

    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return orthonormal.weingarten(x, u, g)

    def nearest(self, z: Tensor) -> Tensor:
        return linalg.polar(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return orthonormal.exp(x, u, 0.5, self.polish)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return orthonormal.log(x, y, 0.5)
