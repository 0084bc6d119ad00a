"""Points that are matrices, whatever the layout in which they are stored, and what their optimizers share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manopt_torch import linalg
from manopt_torch.manifolds import Manifold, Stiefel, Unitary, View

#: an eigenvalue of a p×p matrix below this many times p units of roundoff of the largest one is zero
NULL = 16.0


def matrix_manifold(M: Manifold) -> Manifold:
    """The manifold of matrices that ``M`` is, or is a View of. Raises ``ValueError`` for points of another kind."""
    base = M
    while isinstance(base, View):
        base = base.base
    if base.event_dim != 2:
        raise ValueError(f"{M!r} has no matrices as points, and this optimizer needs them; RiemannianAdam takes all")
    return base


def orthonormal_manifold(M: Manifold) -> Manifold:
    """As :func:`matrix_manifold`, and raises ``ValueError`` for others than ``Stiefel`` and ``Unitary``."""
    base = matrix_manifold(M)
    if not isinstance(base, Stiefel | Unitary):
        raise ValueError(f"this optimizer is for Stiefel, Unitary and Views of them, got {M!r}: take RiemannianAdam")
    return base


def as_matrices(M: Manifold, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    """``tensors`` (*B, *S) as the matrices (*B, n, p) that the View ``M`` is of, and the way back."""
    if not isinstance(M, View):
        return tensors, lambda t: t
    shape = tensors[0].shape
    seen, back = as_matrices(M.base, *map(M._seen, tensors))
    return seen, lambda t: M._back(shape, back(t))


def inverse_root(a: Tensor, eps: float = 0.0) -> Tensor:
    """(a + eps² I)^-½ of Hermitian, positive semidefinite (…, p, p), and 0 where a is zero to rounding."""
    finite = a.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    w, v = torch.linalg.eigh(torch.where(finite, a, 0))  # LAPACK refuses NaN and inf; the root of inf is 0
    tiny = torch.finfo(w.dtype).tiny
    floor = NULL * a.shape[-1] * torch.finfo(w.dtype).eps * w[..., -1:]
    root = torch.where(w > floor, (w.clamp(min=tiny) + eps**2).rsqrt(), 0)
    return (v * root.unsqueeze(-2)) @ v.mH


def relative(x: Tensor, b: Tensor) -> Tensor:
    """skew(b xᴴ) x of (…, n, p), in O(np²): tangent at x if xᴴx = I, and orthogonal to x(xᴴx − I)."""
    return linalg.gemm(x, b.mH @ x, b @ (x.mH @ x), alpha=-0.5, beta=0.5)
