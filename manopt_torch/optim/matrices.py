"""Points that are matrices, whatever the layout in which they are stored."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from manopt_torch.manifolds import Manifold, View


def matrix_manifold(M: Manifold) -> Manifold:
    """The manifold of matrices that ``M`` is, or is a View of. Raises ``ValueError`` for points of another kind."""
    base = M
    while isinstance(base, View):
        base = base.base
    if base.event_dim != 2:
        raise ValueError(f"{M!r} has no matrices as points, and this optimizer needs them; RiemannianAdam takes all")
    return base


def as_matrices(M: Manifold, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    """``tensors`` (*B, *S) as the matrices (*B, n, p) that the View ``M`` is of, and the way back."""
    if not isinstance(M, View):
        return tensors, lambda t: t
    shape = tensors[0].shape
    seen, back = as_matrices(M.base, *map(M._seen, tensors))
    return seen, lambda t: M._back(shape, back(t))
