"""Matrices with orthonormal columns, ``XᴴX = I``: what :class:`Stiefel` and :class:`Unitary` share.

Shapes are (*B, n, p) with n ≥ p, real or complex. Geodesics are those of the metrics
``⟨u, v⟩_α = Re tr(uᴴ(I − (1 − α) X Xᴴ)v)``: α = 1 is the Euclidean, α = 1/2 the canonical metric.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manopt_torch import linalg

SEGMENTS = 4  # pieces of a geodesic along which log carries its gap back
ITERATIONS = 200  # of log; 20 do at distance 1, 150 at 2.5
FAR = 0.1  # from y to where log ends; half-precision y are 0.01 off the manifold, opposite ends of a diameter 2 apart


def residual(x: Tensor) -> Tensor:
    """``‖XᴴX − I‖_F``: (*B, n, p) -> (*B,)."""
    return torch.linalg.matrix_norm(x.mH @ x - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))


def haar(
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Uniform (Haar): Q of a Gaussian matrix whose R has a positive diagonal (Mezzadri 2007)."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    wide = torch.promote_types(dtype, torch.float32)
    q = linalg.orthonormalize(torch.randn(shape, dtype=wide, device=device, generator=generator))
    return q.to(dtype).contiguous()


def tangent(x: Tensor, v: Tensor) -> Tensor:
    """Orthogonal projection on the tangent space at x, ``V − X herm(XᴴV)``."""
    return linalg.gemm(x, linalg.herm(x.mH @ v), v, alpha=-1)


def _split(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A and N of ``U = XA + N``: the part within span X, and the one normal to it."""
    a = x.mH @ u
    return a, linalg.gemm(x, a, u, alpha=-1)


def weingarten(x: Tensor, u: Tensor, g: Tensor, turned: bool = False) -> Tensor:
    """The adjoint w of v ↦ D²R(0)[u, v] applied to g, on tangent vectors: (*B, n, p) each -> (*B, n, p).

    For u = XA + N, N normal to X, a curve R(tu) has the acceleration −X uᴴu, as Euclidean geodesics and polar factors,
    or if ``turned`` −X uᴴu + N A, as canonical geodesics and the Cayley step. Then ⟨w, v⟩ = ⟨g, D²R(0)[u, v]⟩ with
    ``w = −u herm(Xᴴg)``, and ``½(X (Nᴴg) + (I − X Xᴴ) g Aᴴ)`` more if turned; for square X that is zero.
    """
    s = x.mH @ g
    w = -u @ linalg.herm(s)
    if not turned or x.shape[-1] == x.shape[-2]:
        return w
    a, normal = _split(x, u)
    inner = normal.mH @ g - s @ a.mH
    return w + (x @ inner + g @ a.mH) / 2


def canonical(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``⟨u, v⟩_½ = ⟨A_u, A_v⟩/2 + ⟨N_u, N_v⟩``, which for u = v subtracts nothing: (*B, n, p) each -> (*B,), real."""
    a, normal = _split(x, u)
    b, other = (a, normal) if v is u else _split(x, v)
    return linalg.dot(a, b) / 2 + linalg.dot(normal, other)


def _generator(x: Tensor, u: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """(K, M, A) of the geodesic ``γ(t) = K expm(tM) [I; 0] expm((1 − 2α)tA)``, smooth in u also where N = 0.

    With A = XᴴU, N = U − XA and a number s: K = [X, N/s], M = [[2αA, −NᴴN/s], [sI, 0]]. For N = QR this is
    [X, Q] expm([[2αA, −Rᴴ], [R, 0]]) (Hüper, Markina, Silva Leite 2021) after a change of basis.
    """
    a = linalg.skew(x.mH @ u)
    normal = u - x @ a
    s = torch.linalg.matrix_norm(normal.detach(), keepdim=True).clamp(min=1)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(a)
    top = torch.cat([2 * alpha * a, normal.mH @ normal / -s], -1)
    bottom = torch.cat([s * eye, torch.zeros_like(a)], -1)
    return torch.cat([x, normal / s], -1), torch.cat([top, bottom], -2), a


def exp(x: Tensor, u: Tensor, alpha: float, polish: int = 1) -> Tensor:
    """Geodesic of the α-metric from x with velocity u, at time 1, followed by ``polish`` Newton-Schulz steps.

    For n > p these are of seventh order: M is not normal, and its exponential is the less accurate the longer it is. A
    velocity beyond ε^-½, of whose end no digit is right, is cut to that.
    """
    x, u = torch.broadcast_tensors(x, linalg.shorten(u))
    n, p = x.shape[-2:]
    if n == p:
        y = x @ linalg.expm_skew(linalg.skew(x.mH @ u))
    else:
        k, m, a = _generator(x, u, alpha)
        y = k @ linalg.expm(m)[..., :p]
        y = y if alpha == 0.5 else y @ linalg.expm_skew((1 - 2 * alpha) * a)
    return linalg.newton_schulz(y, polish, series=n > p)


def _carry_back(x: Tensor, u: Tensor, g: Tensor, alpha: float) -> Tensor:
    """``g`` from exp(x, u) to x: parallel transport, to first order in each of a few segments of the geodesic."""
    k, m, a = _generator(x, u, alpha)
    step, turn = linalg.expm(m / SEGMENTS), linalg.expm((1 - 2 * alpha) / SEGMENTS * a)
    columns = [torch.eye(m.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).expand_as(m[..., : x.shape[-1]])]
    for _ in range(SEGMENTS):
        columns.append(step @ columns[-1] @ turn)
    for before, here in zip(columns[-2::-1], columns[:0:-1], strict=True):
        z = k @ here
        if alpha != 1:  # the part of parallel transport that is not projection, A and N those at z
            b, normal = z.mH @ g, k @ (m @ here) - 2 * alpha * z @ a
            g = g - (1 - alpha) / SEGMENTS * (normal @ b + (g - z @ b) @ a)
        g = tangent(k @ before, g)
    return g


def _settled(gap: Tensor, tolerance: float) -> bool:
    """Whether no gap exceeds the tolerance, of all that ``vmap`` maps over; where tracing hides the values, False, and
    all iterations are made."""
    while torch._C._functorch.is_functorch_wrapped_tensor(gap):
        gap = torch._C._functorch.get_unwrapped(gap)
    try:
        return not bool((gap > tolerance).any())
    except RuntimeError:
        return False


def log(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Velocity u at x of a shortest geodesic of the α-metric with exp(x, u) = y; NaN where none was found.

    n = p: ``X log(XᴴY)``, principal; NaN where det(XᵀY) < 0, as no curve joins the two components of O(n).
    n > p: shooting, ``u ← u + τ P(y − exp(x, u))`` with τ the parallel transport back to x along the geodesic
    (Zimmermann & Hüper 2022). It converges linearly; tests found no failure for ‖u‖_x ≤ 2, for complex tensors and the
    canonical metric ≤ 1.5. Derivatives are those of the iteration, which makes at least three steps.
    """
    x, y = torch.broadcast_tensors(x, y)
    n, p = x.shape[-2:]
    if n == p:
        return x @ linalg.log_unitary(x.mH @ y)
    tolerance = 32 * math.sqrt(p) * torch.finfo(x.dtype).eps
    u = torch.zeros_like(x)
    for k in range(ITERATIONS):
        z = exp(x, u, alpha)
        gap = tangent(z, y - z)  # rounding errors of y are normal, and stay
        size = torch.linalg.matrix_norm(gap.detach(), keepdim=True)
        u = tangent(x, u + _carry_back(x.detach(), u.detach(), gap, alpha))
        if k >= 2 and _settled(size, tolerance):
            break
    found = (size <= 1000 * tolerance) & (torch.linalg.matrix_norm((y - z).detach(), keepdim=True) < FAR)
    return torch.where(found, u, math.nan)
