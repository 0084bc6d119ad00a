"""Riemannian RMSprop."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params


class RiemannianRMSprop(RiemannianOptimizer):
    """RMSprop with one mean square per point; ``torch.optim.RMSprop`` on ``Euclidean()``, where a point is a number.

    With r the Riemannian gradient at x and μ the momentum::

        v ← α v + (1 − α) ‖r‖²_x             a number per point
        b ← μ b + r / (√v + ε)               a tangent vector
        x ← R_x(−lr · b),  b ← b carried to the new x

    ``centered`` is not there: the mean gradient that it subtracts is one of other points' tangent spaces.

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: length ‖u‖_x of a step while gradients keep their size, without momentum; a number or a 0-dim tensor. The
            first step is 1/√(1 − α) times as long, ten times by default, as in torch. torch's elementwise mean square
            moves every *entry* by lr, this one the whole n×p point: for steps as long as torch's, take √(np) times
            its lr.
        alpha, eps, weight_decay, momentum, maximize: as in ``torch.optim.RMSprop``.
        error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative ``lr``, ``eps``, ``weight_decay`` or ``momentum``, for alpha outside [0, 1), and when
            the state of a ``centered`` optimizer is loaded.

    Reference: T. Tieleman and G. Hinton, "Neural networks for machine learning", lecture 6.5, 2012; a number per point
    as in G. Bécigneul and O. Ganea, "Riemannian adaptive optimization methods", 2019.
    """

    tangent_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    number_state: ClassVar[tuple[str, ...]] = ("step", "square_avg")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {alpha}")
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "maximize": maximize,
            },
            error_if_nonfinite=error_if_nonfinite,
        )

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        square = M.inner(x, r, r)
        if "square_avg" not in s:
            s["step"] = torch.zeros(len(x), dtype=square.dtype, device=x.device)  # for torch, should it load this state
            s["square_avg"] = torch.zeros_like(square)
        s["step"] = s["step"] + 1
        s["square_avg"] = mean = s["square_avg"] * group["alpha"] + square * (1 - group["alpha"])
        b = M.scale(1 / (mean.sqrt() + group["eps"]), r)
        if group["momentum"]:
            b = s["momentum_buffer"] * group["momentum"] + b if "momentum_buffer" in s else b
            s["momentum_buffer"] = b
        return -group["lr"] * b

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`RiemannianOptimizer.load_state_dict`; that of a ``centered`` RMSprop is refused."""
        if any(group.get("centered") for group in state_dict["param_groups"]):
            raise ValueError("this state was saved with centered=True, which has no counterpart on a manifold")
        super().load_state_dict(state_dict)
