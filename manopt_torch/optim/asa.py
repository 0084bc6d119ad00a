"""Riemannian adaptive stochastic gradient with row and column accumulators."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params
from manopt_torch.optim.matrices import as_matrices, matrix_manifold


class RiemannianASA(RiemannianOptimizer):
    """Adaptive weights for the rows and for the columns of matrices (*B, n, p), or of a View of them.

    With r the Riemannian gradient at x, and L = diag(l̂), R = diag(ĉ)::

        l ← β l + (1 − β) diag(r rᴴ)/p,  l̂ ← max(l̂, l)      n numbers
        c ← β c + (1 − β) diag(rᴴ r)/n,  ĉ ← max(ĉ, c)      p numbers
        x ← R_x(−lr · P_x((L + ε)^-¼ r (R + ε)^-¼))

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: an entry moves by about lr while gradients keep their size, by 1/√(1 − β) times that at the first step; a
            number or a 0-dim tensor.
        beta: β, the decay of the means of squares.
        eps: ε, in units of a squared entry of r.
        weight_decay, maximize, error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative ``lr``, ``eps`` or ``weight_decay``, for beta outside [0, 1), and for a manifold
            whose points are no matrices.

    Reference: H. Kasai, P. Jawanpuria and B. Mishra, "Riemannian adaptive stochastic gradient algorithms on matrix
    manifolds", 2019, algorithm 1.
    """

    array_state: ClassVar[dict[str, str]] = {"row": "n", "max_row": "n", "column": "p", "max_column": "p"}
    exempt: ClassVar[dict[str, str]] = {"O6": "weights of rows and columns: a rotation mixes rows, or columns"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {beta}")
        defaults = {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, error_if_nonfinite=error_if_nonfinite)

    def check_manifold(self, M: Manifold) -> None:
        matrix_manifold(M)

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        (a,), back = as_matrices(M, r)
        square = a.abs().square()
        weights = []
        for name, mean in (("row", square.mean(-1)), ("column", square.mean(-2))):
            beta = group["beta"]  # not lerp, which makes NaN of inf
            s[name] = s.get(name, torch.zeros_like(mean)) * beta + mean * (1 - beta)
            s["max_" + name] = torch.maximum(s.get("max_" + name, s[name]), s[name])
            weights.append((s["max_" + name] + group["eps"]) ** -0.25)
        scaled = weights[0][..., :, None] * a * weights[1][..., None, :]
        return -group["lr"] * M.project(x, back(scaled))
