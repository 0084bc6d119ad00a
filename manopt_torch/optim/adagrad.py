"""Riemannian Adagrad."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params


class RiemannianAdagrad(RiemannianOptimizer):
    """Adagrad with one sum of squares per point; ``torch.optim.Adagrad`` on ``Euclidean()``, where a point is a number.

    With r the Riemannian gradient at x, and t the number of steps before this one::

        v ← v + ‖r‖²_x                       a number per point
        x ← R_x(−lr/(1 + lr_decay t) · r / (√v + ε))

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: length ‖u‖_x of the first step, by default; the t-th is about 1/√t times as long while gradients keep their
            size. torch's elementwise sum moves every *entry* by lr, this one the whole n×p point. A number or a 0-dim
            tensor.
        initial_accumulator_value: the first v, in units of ‖r‖²_x; of a point, not of each entry as in torch.
        lr_decay, weight_decay, eps, maximize: as in ``torch.optim.Adagrad``.
        error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative setting.

    Reference: J. Duchi, E. Hazan and Y. Singer, "Adaptive subgradient methods", 2011; a number per point as in G.
    Bécigneul and O. Ganea, "Riemannian adaptive optimization methods", 2019.
    """

    number_state: ClassVar[tuple[str, ...]] = ("step", "sum")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
        require(initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
                "maximize": maximize,
            },
            error_if_nonfinite=error_if_nonfinite,
        )

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        square = M.inner(x, r, r)
        if "sum" not in s:
            s["step"] = torch.zeros(len(x), dtype=square.dtype, device=x.device)
            s["sum"] = torch.full_like(square, group["initial_accumulator_value"])
        before = s["step"].to(square.dtype).reshape(-1, *[1] * (square.ndim - 1))
        s["step"] = s["step"] + 1
        s["sum"] = s["sum"] + square
        rate = group["lr"] / (1 + before * group["lr_decay"])
        return M.scale(-rate / (s["sum"].sqrt() + group["eps"]), r)
