"""Riemannian Adam."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params


class RiemannianAdam(RiemannianOptimizer):
    """Adam with one second moment per point; ``torch.optim.Adam`` on ``Euclidean()``, where a point is a number.

    With r the Riemannian gradient at x and t the number of steps::

        m ← β₁ m + (1 − β₁) r            a tangent vector
        v ← β₂ v + (1 − β₂) ‖r‖²_x       a number per point (``amsgrad``: its running maximum is used)
        u = −lr · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)
        x ← R_x(u),  m ← m carried to the new x

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: length ‖u‖_x of a step while gradients keep their direction; a number or a 0-dim tensor. torch's
            elementwise moment moves every *entry* by lr, this one the whole n×p point: for steps as long as torch's,
            take √(np) times its lr.
        betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.Adam``.
        decoupled_weight_decay: as in ``torch.optim.AdamW``.
        error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Sparse gradients, of tables whose rows are points: only the touched rows move, and have their moments and their
    weight decay advanced; t counts all steps. This is ``torch.optim.SparseAdam`` on ``Euclidean()``, but that ε is
    added after the bias correction.

    Raises:
        ValueError: for a negative ``lr``, ``eps`` or ``weight_decay``, and for betas outside [0, 1).

    Reference: G. Bécigneul and O. Ganea, "Riemannian adaptive optimization methods", 2019.
    """

    tangent_state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    number_state: ClassVar[tuple[str, ...]] = ("step", "exp_avg_sq", "max_exp_avg_sq")
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
            error_if_nonfinite=error_if_nonfinite,
        )

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        beta1, beta2 = group["betas"]
        square = M.inner(x, r, r)
        if "exp_avg" not in s:
            s["step"] = torch.zeros(len(x), dtype=square.dtype, device=x.device)
            s["exp_avg"], s["exp_avg_sq"] = torch.zeros_like(r), torch.zeros_like(square)
        s["step"] = s["step"] + 1
        s["exp_avg"] = s["exp_avg"].lerp(r, 1 - beta1)
        s["exp_avg_sq"] = second = s["exp_avg_sq"] * beta2 + square * (1 - beta2)
        if group["amsgrad"]:
            s["max_exp_avg_sq"] = second = torch.maximum(s.get("max_exp_avg_sq", second), second)
        step = s["step"].to(square.dtype).reshape(-1, *[1] * (square.ndim - 1))
        # 1 − βᵗ, without cancellation
        unbias1, unbias2 = (-torch.expm1(step * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
        length = (second / unbias2).sqrt() + group["eps"]
        return M.scale(-group["lr"] / (unbias1 * length), s["exp_avg"])
