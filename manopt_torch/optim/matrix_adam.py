"""Riemannian Adam with a matrix as second moment."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params
from manopt_torch.optim.matrices import as_matrices, inverse_root, orthonormal_manifold


class RiemannianMatrixAdam(RiemannianOptimizer):
    """Adam whose second moment is a p×p matrix, on ``Stiefel``, ``Unitary`` and Views of them.

    With r the Riemannian gradient at x and t the number of steps::

        m ← β₁ m + (1 − β₁) r          a tangent vector
        C ← β₂ C + (1 − β₂) rᴴ r       Hermitian
        x ← R_x(−lr · P_x(m̂ (Ĉ + ε² I)^-½)),   m̂ = m/(1 − β₁ᵗ),  Ĉ = C/(1 − β₂ᵗ)

    and m is carried to the new x. Equivariant from both sides: X → QXV with unitary Q and V has C → VᴴCV. For p = 1
    it is :class:`RiemannianAdam`, but that ε is added under the root. Where Ĉ is zero, to rounding, so is m̂, and the
    root counts as zero.

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: each singular value of a step is about lr while gradients keep their direction; a number or a 0-dim tensor.
        betas, maximize: as in ``torch.optim.Adam``.
        eps: ε, in units of a singular value of r.
        weight_decay, error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative ``lr``, ``eps`` or ``weight_decay``, for betas outside [0, 1), and for another
            manifold.
    """

    tangent_state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    number_state: ClassVar[tuple[str, ...]] = ("step",)
    array_state: ClassVar[dict[str, str]] = {"exp_avg_gram": "pp"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, error_if_nonfinite=error_if_nonfinite)

    def check_manifold(self, M: Manifold) -> None:
        orthonormal_manifold(M)

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        (a,), _ = as_matrices(M, r)
        gram = a.mH @ a
        if "exp_avg" not in s:
            s["step"] = torch.zeros(len(x), dtype=gram.real.dtype, device=x.device)
            s["exp_avg"], s["exp_avg_gram"] = torch.zeros_like(r), torch.zeros_like(gram)
        s["step"] = s["step"] + 1
        beta1, beta2 = group["betas"]
        s["exp_avg"] = s["exp_avg"].lerp(r, 1 - beta1)
        s["exp_avg_gram"] = s["exp_avg_gram"].lerp(gram, 1 - beta2)
        step = s["step"].to(gram.real.dtype).reshape(-1, *[1] * (gram.ndim - 1))
        unbias1, unbias2 = (-torch.expm1(step * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
        (m,), back = as_matrices(M, s["exp_avg"])
        root = inverse_root(s["exp_avg_gram"] / unbias2, group["eps"])
        return -group["lr"] * M.project(x, back(m / unbias1 @ root))
