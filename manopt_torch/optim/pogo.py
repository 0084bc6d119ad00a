"""POGO: a step along the relative gradient, and one Newton-Schulz step back."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch import linalg
from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params
from manopt_torch.optim.matrices import as_matrices, orthonormal_manifold, relative


class POGO(RiemannianOptimizer):
    """Ambient steps, made tangent and orthogonal by matrix products only, on ``Stiefel``, ``Unitary``, Views of them.

    With g the gradient at X::

        b = what SGD with ``momentum`` makes of g, or with ``betas`` Adam with one second moment ‖g‖²_F per matrix
        Y = X − lr · skew(b Xᴴ) X
        X ← Y + ½ Y (I − YᴴY)

    One such step leaves ‖XᴴX − I‖ ≈ ¾ ‖lr · skew(b Xᴴ)X‖⁴, which the next one squares: steps must be short, and are not
    bounded here. ``riemannian(opt, frame="ambient")`` on ``Stiefel(metric="canonical", retraction="newton_schulz")``
    does the same with any base optimizer, at half the lr, and iterates until it is orthogonal. The last step's residual
    stays in the parameter: another POGO takes one of up to 0.1, other optimizers ask for
    ``p.copy_(manifold.nearest(p))`` under ``torch.no_grad()`` first.

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: of the step; a number or a 0-dim tensor.
        momentum: of SGD, as in torch.
        betas: of Adam, as in torch; None for SGD.
        eps: of Adam, in units of ‖g‖_F.
        maximize, error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative ``lr``, ``momentum`` or ``eps``, for betas outside [0, 1) or together with momentum,
            and for another manifold.

    Reference: A. Javaloy and A. Vergari, 2026, whose package pogo-torch makes the same iterates.
    """

    number_state: ClassVar[tuple[str, ...]] = ("step", "exp_avg_sq")
    array_state: ClassVar[dict[str, str]] = {"momentum_buffer": "np", "ambient_exp_avg": "np"}
    exempt: ClassVar[dict[str, str]] = {
        "O1": "one Newton-Schulz step leaves a residual of the fourth order of the step",
        "O11": "as O1; it does not drift either, but depends on the length of the last step",
    }
    residual_allowed = 0.1

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        momentum: float = 0,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-8,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, momentum=momentum, eps=eps)
        if betas is not None and (momentum or not all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas must be in [0, 1), and go without momentum: got {betas} and {momentum}")
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults, error_if_nonfinite=error_if_nonfinite)

    def check_manifold(self, M: Manifold) -> None:
        orthonormal_manifold(M)

    def gradient(self, M: Manifold, x: Tensor, g: Tensor) -> Tensor:
        return g

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        (y, b), back = as_matrices(M, x, r)
        if group["betas"]:
            b = self._adam(b, s, group)
        elif group["momentum"]:
            s["momentum_buffer"] = b = s["momentum_buffer"] * group["momentum"] + b if "momentum_buffer" in s else b
        return back(-group["lr"] * relative(y, b))

    def _adam(self, g: Tensor, s: State, group: Group) -> Tensor:
        """m̂/(√v̂ + ε), with v a number per matrix."""
        square = torch.linalg.matrix_norm(g).square()
        if "ambient_exp_avg" not in s:
            s["step"] = torch.zeros(len(g), dtype=square.dtype, device=g.device)
            s["ambient_exp_avg"], s["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(square)
        beta1, beta2 = group["betas"]
        s["step"] = s["step"] + 1
        s["ambient_exp_avg"] = s["ambient_exp_avg"].lerp(g, 1 - beta1)
        s["exp_avg_sq"] = s["exp_avg_sq"] * beta2 + square * (1 - beta2)  # not lerp, which makes NaN of inf
        step = s["step"].reshape(-1, *[1] * (square.ndim - 1))
        unbias1, unbias2 = (-torch.expm1(step * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
        length = unbias1 * ((s["exp_avg_sq"] / unbias2).sqrt() + group["eps"])
        return s["ambient_exp_avg"] / length[..., None, None]

    def move(self, M: Manifold, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        (y, v), back = as_matrices(M, x, u)
        return (back(linalg.keep_zero_steps(y, v, linalg.newton_schulz(y + v), 2)), *vs)
