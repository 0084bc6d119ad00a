"""Riemannian stochastic gradient descent."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params


class RiemannianSGD(RiemannianOptimizer):
    """Stochastic gradient descent with momentum on a manifold; ``torch.optim.SGD`` on ``Euclidean()``.

    With r the Riemannian gradient at x, μ the momentum and τ the dampening::

        b ← μ b + (1 − τ) r        (b = r at the first step)
        u = −lr · b                (Nesterov: −lr · (r + μ b))
        x ← R_x(u),  b ← b carried to the new x

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: length of the step per unit of the gradient; a number or a 0-dim tensor. With λ that of the Cayley step
            (I + λ/2 A)⁻¹(I − λ/2 A)X, A = GXᴴ − XGᴴ, lr is λ on ``Stiefel(metric="canonical")`` and 2λ on
            ``Unitary()`` and on square matrices of ``Stiefel()``; on its tall ones the two steps are not parallel.
        momentum, dampening, weight_decay, nesterov, maximize: as in ``torch.optim.SGD``.
        error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Sparse gradients, of tables whose rows are points: only the touched rows move, and have their momentum and their
    weight decay advanced; the momentum of a row begins at zero. Without both this is the dense step.

    Raises:
        ValueError: for a negative ``lr``, ``momentum`` or ``weight_decay``, and for Nesterov without momentum.

    Reference: S. Bonnabel, "Stochastic gradient descent on Riemannian manifolds", 2013.
    """

    tangent_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"Nesterov momentum requires momentum > 0 and dampening = 0, got {momentum} and {dampening}"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
            },
            error_if_nonfinite=error_if_nonfinite,
        )

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        if group["momentum"]:
            b = s["momentum_buffer"] * group["momentum"] + r * (1 - group["dampening"]) if "momentum_buffer" in s else r
            s["momentum_buffer"] = b
            r = r + group["momentum"] * b if group["nesterov"] else b
        return -group["lr"] * r
