"""Matrices with orthonormal columns."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch import linalg, orthonormal
from manopt_torch.manifolds.base import Manifold

ALPHA = {"euclidean": 1.0, "canonical": 0.5}  # Re tr(Uᴴ(I − (1 − α)XXᴴ)V)
SECOND_ORDER = {"euclidean": ("polar", "newton_schulz", "exp"), "canonical": ("cayley", "exp")}


@dataclasses.dataclass(frozen=True)
class Stiefel(Manifold):
    """St(n, p) = {X : XᴴX = I}, matrices (*B, n, p) with n ≥ p and orthonormal columns, real or complex.

    ``metric``, with the gradient of the ambient g = G:

    * ``"euclidean"``: ``Re tr(UᴴV)``, gradient ``G − X herm(XᴴG)``.
    * ``"canonical"``: ``Re tr(Uᴴ(I − XXᴴ/2)V)``, gradient ``G − X GᴴX`` (Edelman, Arias, Smith 1998).

    ``retraction``:

    * ``"cayley"``: ``(I − W/2)⁻¹(I + W/2) X`` with ``W = P U Xᴴ − X Uᴴ P``, ``P = I − XXᴴ/2`` (Wen & Yin 2013); then
      ``polish`` Newton-Schulz steps ``X ← X(3I − XᴴX)/2``, so that rounding errors do not add up. Second order for the
      canonical metric. ``move`` carries vectors by the same unitary matrix, an isometry of both metrics.
    * ``"qr"``: Q of ``X + U = QR``, diag(R) > 0.   ``"polar"``: the point nearest to ``X + U``; second order for the
      Euclidean metric.
    * ``"newton_schulz"``: the polar factor by 4 + ``polish`` Newton-Schulz steps from ``X + U``, matrix products only,
      up to ``step_limit``: with k steps and σ the largest singular value of U, ‖XᴴX − I‖₂ is 4/3 (3σ²/4)^(2ᵏ).
    * ``"exp"``: the geodesic of the metric, ``polish``ed.

    All but ``"cayley"`` carry vectors by projection. ``log`` and ``dist`` are found by iteration, see
    :func:`manopt_torch.orthonormal.log`; they are NaN where it does not converge.

    An SGD step of length lr for the canonical metric is the Cayley step ``(I + λ/2 A)⁻¹(I − λ/2 A) X``,
    ``A = G Xᴴ − X Gᴴ`` with λ = lr. For the Euclidean metric the part of the step within span X is half as long: the
    same with λ = lr/2 for square X.
    """

    metric: Literal["euclidean", "canonical"] = "euclidean"
    retraction: Literal["cayley", "qr", "polar", "exp", "newton_schulz"] = "cayley"
    polish: int = 1

    constant_norm = True
    event_dim = 2
    event_shapes = ((3, 3), (5, 3), (4, 1), (1, 1), (9, 2))

    @property
    def second_order(self) -> bool:
        return self.retraction in SECOND_ORDER[self.metric]

    @property
    def isometric(self) -> bool:
        return self.retraction == "cayley"

    @property
    def step_limit(self) -> float:
        # the least ‖U‖_X with a ‖U‖₂ for which ‖XᴴX − I‖₂ is 1e-14
        limit = math.sqrt(4 / 3 * (0.75e-14) ** (0.5 ** (4 + self.polish)) * ALPHA[self.metric])
        return limit if self.retraction == "newton_schulz" else math.inf

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-2] < shape[-1]:
            raise ValueError(
                f"{self!r} needs (n, p) with n >= p, got shape {tuple(shape)}; write view_for({self!r}, "
                f"{tuple(shape)}) for a wide matrix, whose rows are then orthonormal"
            )

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        n, p = shape[-2:]
        return math.prod(shape[:-2]) * (2 * n * p - p * p if dtype.is_complex else n * p - p * (p + 1) // 2)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return orthonormal.tangent(x, v)

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

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return orthonormal.tangent(x, g) if self.metric == "euclidean" else g - x @ (g.mH @ x)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        if self.metric == "euclidean":
            return super().inner(x, u, v)
        return orthonormal.canonical(x, u, v)

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        if self.retraction == "cayley":
            return linalg.cayley(x, u, *vs, polish=self.polish)
        if self.retraction == "exp":
            y = self.exp(x, u)
        elif self.retraction == "qr":
            y = linalg.orthonormalize(x + u)
        elif self.retraction == "polar":
            y = linalg.polar(x + u)
        else:
            y = linalg.newton_schulz(x + u, 4 + self.polish)
        y = linalg.keep_zero_steps(x, u, y, 2)
        return (y, *(orthonormal.tangent(y, v) for v in vs))

    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        turned = self.retraction == "cayley" or (self.retraction == "exp" and self.metric == "canonical")
        return super().weingarten(x, u, g) if self.retraction == "qr" else orthonormal.weingarten(x, u, g, turned)

    def nearest(self, z: Tensor) -> Tensor:
        self.check_shape(z.shape)
        return linalg.polar(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return orthonormal.exp(x, u, ALPHA[self.metric], self.polish)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return orthonormal.log(x, y, ALPHA[self.metric])
