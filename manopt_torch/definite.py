"""Positive definite matrices under the affine-invariant metric: the kernels of :class:`SPD`.

Points ``X`` are (*B, n, n), real symmetric or complex Hermitian with positive eigenvalues; tangent vectors are
Hermitian. With any L such that ``X = L Lᴴ`` (here the Cholesky factor), ``S = L⁻¹U L⁻ᴴ`` is the tangent vector U
*whitened*: moved to I by an isometry of the metric ``Re tr(X⁻¹U X⁻¹V)``. Bhatia (2007), "Positive definite matrices",
chapter 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manopt_torch import linalg, spectral

#: length of a whitened step beyond which the Cayley step shortens it; the pole is at 2
CAYLEY_LIMIT = 1.0
#: in units of n ε ‖Z‖: what puts a matrix safely inside the cone. Cholesky needs λ_min of about n ε λ_max (Higham 2002,
#: "Accuracy and stability of numerical algorithms", theorem 10.7); the rest is for the rounding of what came before.
CONE_MARGIN = 8.0


def length(a: Tensor) -> Tensor:
    """Frobenius norm, with derivative zero at zero: (*B, n, n) -> (*B,), real."""
    square = linalg.dot(a, a)
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


def _largest(z: Tensor) -> Tensor:
    """The largest ``|z_ij|``, by which the squares of the rest neither overflow nor underflow; 1 for Z = 0."""
    size = z.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(size == 0, 1, size)


def margin(z: Tensor) -> Tensor:
    """``CONE_MARGIN n ε ‖Z‖ I``, not differentiated; ‖Z‖ = 1 is taken for Z = 0: (*B, n, n) -> (*B, n, n)."""
    size = torch.linalg.matrix_norm(z.detach(), keepdim=True)
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return CONE_MARGIN * z.shape[-1] * torch.finfo(z.dtype).eps * torch.where(size == 0, 1, size) * eye


def cholesky(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower triangular L with ``X = L Lᴴ``, and L⁻¹: (*B, n, n) -> twice (*B, n, n).

    Where X has no factor, that of ``X + margin(X)``; NaN where that has none either.
    """
    x = linalg.herm(x)
    failed = torch.linalg.cholesky_ex(x.detach())[1] != 0
    factor, info = torch.linalg.cholesky_ex(x + torch.where(failed[..., None, None], margin(x), 0))
    factor = torch.where((info == 0)[..., None, None], factor, torch.nan)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return factor, torch.linalg.solve_triangular(factor, eye, upper=False)


def residual(x: Tensor) -> Tensor:
    """``‖skew X‖/‖X‖``, and ∞ unless X has a Cholesky factor: (*B, n, n) -> (*B,)."""
    x = x / _largest(x)
    ratio = torch.linalg.matrix_norm(linalg.skew(x)) / torch.linalg.matrix_norm(x)
    definite = torch.linalg.cholesky_ex(linalg.herm(x))[1] == 0
    return torch.where(definite & ratio.isfinite(), ratio, torch.inf)


def nearest(z: Tensor) -> Tensor:
    """The nearest Hermitian matrix with eigenvalues of at least ``margin(Z)``: (*B, n, n) -> (*B, n, n).

    Eigenvalues of the Hermitian part are clamped (Higham 1988, "Computing a nearest symmetric positive semidefinite
    matrix", theorem 2.1).
    """
    scale = _largest(z)
    z = z / scale
    floor = margin(linalg.herm(z))
    return scale * (floor + spectral.relum(z - floor))


def inner(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``Re tr(X⁻¹U X⁻¹V)`` as the Frobenius product of the whitened U and V: (*B, n, n) each -> (*B,), real."""
    inverse = cholesky(x)[1]
    a = inverse @ u @ inverse.mH
    b = a if v is u else inverse @ v @ inverse.mH
    return linalg.dot(a, b)


def weingarten(x: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """The w with ⟨w, v⟩ = ⟨g, ½(u X⁻¹v + v X⁻¹u)⟩ for Hermitian v, the second derivative of geodesics (half their
    acceleration uX⁻¹u in mixed arguments): (*B, n, n) each -> (*B, n, n)."""
    inverse = cholesky(x)[1]
    return linalg.herm(inverse.mH @ (inverse @ u) @ linalg.herm(g))


def step(x: Tensor, u: Tensor, *vs: Tensor, retraction: str) -> tuple[Tensor, ...]:
    """``(y, *vs')``: y = ``L C Lᴴ``, and vectors carried by the isometry V → ``E V Eᴴ``, E = ``L C^½ L⁻¹``.

    * ``"exp"``: C = ``exp(S)``, y = ``X^½ exp(X^-½ U X^-½) X^½``.
    * ``"second_order"``: C = ``I + S + S²/2``, y = ``X + U + ½ U X⁻¹ U``.
    * ``"cayley"``: C = ``(I − S/2)⁻¹(I + S/2)``, y = ``X + U + ½ U (X − U/2)⁻¹ U``, after shortening a U that is longer
      than ``CAYLEY_LIMIT`` to that.

    E is parallel transport along the geodesic from X to y. Points whose ``u`` is exactly zero come back as they were.
    (*B, n, n) each; at most one ``eigh``, of S or C.
    """
    factor, inverse = cholesky(x)
    t = u @ inverse.mH
    if retraction == "second_order":
        y = x + (u + t @ t.mH / 2)
    elif retraction == "cayley":
        s = inverse @ t
        shorter = 1 / (length(s)[..., None, None] / CAYLEY_LIMIT).clamp(min=1)
        u, s, t = shorter * u, shorter * s, shorter * t
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        y = x + (u + t @ torch.linalg.inv_ex(2 * eye - s)[0] @ t.mH)
    else:
        s = inverse @ t
        growth = factor @ spectral.expm1m(s / 2)
        root = factor + growth  # L C^½
        near = (torch.linalg.matrix_norm(s.detach()) < 1)[..., None, None]
        y = torch.where(near, x + growth @ (factor + root).mH, root @ root.mH)  # x + … keeps the digits of x
    y = linalg.keep_zero_steps(x, u, linalg.herm(y), 2)
    if not vs:
        return (y,)
    e = (root if retraction == "exp" else factor @ spectral.sqrtm(inverse @ y @ inverse.mH)) @ inverse
    return (y, *(linalg.herm(e @ v @ e.mH) for v in vs))


def log(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """L and ``S = log(L⁻¹Y L⁻ᴴ)``: the geodesic from X arrives at Y with U = ``L S Lᴴ``, and ‖S‖ is the distance.

    S is ``log WWᴴ`` with W = L⁻¹K, Y = KKᴴ, which takes twice the condition number that ``log(L⁻¹Y L⁻ᴴ)`` would; where
    ``L⁻¹(Y − X)L⁻ᴴ`` is small it is computed from that, so that a short one keeps its digits.
    """
    factor, inverse = cholesky(x)
    change = inverse @ (y - x) @ inverse.mH
    near = (torch.linalg.matrix_norm(change.detach()) < 0.5)[..., None, None]
    far = spectral.log_gram(inverse @ cholesky(y)[0])
    return factor, torch.where(near, spectral.log1pm(torch.where(near, change, 0)), far)
