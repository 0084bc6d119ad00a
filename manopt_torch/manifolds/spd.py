"""Positive definite matrices: symmetric for real tensors, Hermitian for complex ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from manopt_torch import definite, linalg, spectral
from manopt_torch.manifolds.base import Manifold


@dataclasses.dataclass(frozen=True)
class SPD(Manifold):
    """{X : X = Xᴴ, all eigenvalues > 0}, matrices (*B, n, n), real or complex (HPD); an open convex cone.

    Tangent vectors are the Hermitian matrices. ``metric``:

    * ``"affine_invariant"``: ``⟨U, V⟩_X = Re tr(X⁻¹U X⁻¹V)``, gradient ``X herm(G) X`` of the ambient g = G (Pennec,
      Fillard, Ayache 2006; Bhatia, Positive Definite Matrices, 2007, chapter 6). ``X → M X Mᴴ`` is an isometry for
      every invertible M, and so is X → X⁻¹. The manifold is complete: the boundary is infinitely far away.

    ``retraction``, with ``S = L⁻¹U L⁻ᴴ`` for any L with ``X = L Lᴴ`` (here the Cholesky factor):

    * ``"exp"``: ``L exp(S) Lᴴ``, the geodesic ``X^½ exp(X^-½UX^-½) X^½``.
    * ``"second_order"``: ``X + U + UX⁻¹U/2 = ½(X + (X + U)X⁻¹(X + U))``, hence positive definite for every U (Jeuris,
      Vandebril, Vandereycken 2012, eq. 3.9). ``retract`` needs no eigenvalues.
    * ``"cayley"``: ``L cay(S) Lᴴ = X^½ cay(X^-½UX^-½) X^½``, ``cay(S) = (I − S/2)⁻¹(I + S/2)``, which leaves the cone
      when an eigenvalue of S passes ±2. A step with ``‖U‖_X = ‖S‖`` beyond ``step_limit`` = 1 is shortened to it; the
      factors of change then stay in [1/3, 3]. Shorter steps are not touched. ``retract`` needs no eigenvalues.

    All three agree with the geodesic to second order. ``move`` carries V to ``E V Eᴴ`` with ``E = L C^½ L⁻¹`` for
    the point ``L C Lᴴ``: that is parallel transport along the geodesic from X to it, an isometry.

    ``nearest`` is nearest in the Frobenius norm among the matrices with eigenvalues of at least ``8 n ε ‖Z‖``, ε the
    machine epsilon: the cone itself is open, and has no nearest point to a matrix outside. Its derivative is that of
    the projection. A point whose Cholesky factorisation fails by rounding is treated as if it had that margin added;
    one that is farther outside gives NaN.

    ``residual`` is ``‖skew X‖/‖X‖``, and ∞ unless X has a Cholesky factor. A condition number near 1/ε is out of
    reach, and errors of a result, relative in the metric, are of the order of ε times the condition number: rounding
    the entries of X does as much.
    """

    metric: Literal["affine_invariant"] = "affine_invariant"
    retraction: Literal["exp", "second_order", "cayley"] = "exp"

    event_dim = 2
    event_shapes = ((1, 1), (3, 3), (4, 4))
    second_order = True
    isometric = True

    @property
    def step_limit(self) -> float:
        return definite.CAYLEY_LIMIT if self.retraction == "cayley" else math.inf

    def check_shape(self, shape: tuple[int, ...]) -> None:
        super().check_shape(shape)
        if shape[-2] != shape[-1]:
            raise ValueError(
                f"{self!r} needs square matrices (*B, n, n), got shape {tuple(shape)}; for a factor with fewer columns "
                f"than rows keep an unconstrained F of that shape and write F @ F.mH"
            )

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        n = shape[-1]
        return math.prod(shape[:-2]) * (n * n if dtype.is_complex else n * (n + 1) // 2)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return linalg.herm(v).expand(torch.broadcast_shapes(x.shape, v.shape))

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return self.move(x, u)[0]

    def residual(self, x: Tensor) -> Tensor:
        return definite.residual(x)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``exp(herm(A)/√(2n))`` with Gaussian A: the exponential, at I, of an isotropic Gaussian tangent vector.

        The distribution is invariant under ``X → Q X Qᴴ`` for unitary Q and under ``X → X⁻¹``; eigenvalues lie in
        about [1/e, e] (Wigner's semicircle).
        """
        self.check_shape(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        a = torch.randn(shape, dtype=wide, device=device, generator=generator)
        return spectral.expm(a / math.sqrt(2 * shape[-1])).to(dtype)

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return linalg.herm(x @ g @ x)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return definite.inner(x, u, v)

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        return definite.step(x, u, *vs, retraction=self.retraction)

    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return definite.weingarten(x, u, g)

    def nearest(self, z: Tensor) -> Tensor:
        self.check_shape(z.shape)
        return definite.nearest(z)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return definite.step(x, u, retraction="exp")[0]

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        factor, s = definite.log(x, y)
        return linalg.herm(factor @ s @ factor.mH)

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return definite.length(definite.log(x, y)[1])
