"""The landing algorithm: orthogonality without a retraction."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params
from manopt_torch.optim.matrices import as_matrices, orthonormal_manifold, relative

#: an ‖XᴴX − I‖_F below this many times √p units of roundoff is zero
ROUNDOFF = 8.0


class Landing(RiemannianOptimizer):
    """Steps off the manifold that are drawn back to it, on ``Stiefel``, ``Unitary`` and Views of them.

    With g the gradient, Δ = XᴴX − I, and μ the momentum::

        b ← μ b + g
        F = skew(b Xᴴ) X + λ X Δ
        X ← X − η F,   η = min(lr, 1/(2λ), (c + √(c² + a (ε − ‖Δ‖)))/a),   c = λ ‖Δ‖ (1 − ‖Δ‖),  a = ‖FᴴF‖

    in Frobenius norms. The two parts of F are orthogonal, so that Δ becomes Δ − 2ηλ(Δ + Δ²) + η² FᴴF: the third bound
    on η keeps ‖Δ‖ ≤ ε for ever, with momentum too, and where the gradient vanishes Δ falls by 1 − 2ηλ in every step. A
    step is matrix products only. For g alone and X on the manifold, −η F is the step of ``RiemannianSGD`` with lr = η
    on ``Unitary()``, and with lr = η/2 on ``Stiefel(metric="canonical")``, to first order.

    Between steps points are off the manifold by up to ε. ``manifold.nearest`` ends on it;
    ``constrain(…, on_load="project")`` loads what was saved meanwhile.

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: step per unit of the gradient; a number or a 0-dim tensor.
        momentum: μ, as in ``torch.optim.SGD``.
        attraction: λ > 0.
        safe: ε, the largest ‖XᴴX − I‖_F, in (0, 1).
        maximize, error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative ``lr`` or ``momentum``, attraction ≤ 0, ``safe`` outside (0, 1), and for another
            manifold.

    References: P. Ablin and G. Peyré, "Fast and accurate optimization on the orthogonal manifold without retraction",
    2022; P. Ablin, S. Vary, B. Gao and P.-A. Absil, "Infeasible deterministic, stochastic, and variance-reduction
    algorithms for optimization under orthogonality constraints", 2023.
    """

    array_state: ClassVar[dict[str, str]] = {"momentum_buffer": "np"}
    exempt: ClassVar[dict[str, str]] = {
        "O1": "points are off the manifold by up to safe between steps",
        "O11": "as O1; it does not drift either, but is held by a bound that is wider than rounding",
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        momentum: float = 0,
        attraction: float = 1.0,
        safe: float = 0.5,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, momentum=momentum)
        if not (attraction > 0 and 0 < safe < 1):
            raise ValueError(f"attraction must be positive and safe in (0, 1), got {attraction} and {safe}")
        self.residual_allowed = safe
        defaults = {"lr": lr, "momentum": momentum, "attraction": attraction, "safe": safe, "maximize": maximize}
        super().__init__(params, defaults, error_if_nonfinite=error_if_nonfinite)

    def check_manifold(self, M: Manifold) -> None:
        orthonormal_manifold(M)

    def gradient(self, M: Manifold, x: Tensor, g: Tensor) -> Tensor:
        return g

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        (y, b), back = as_matrices(M, x, r)
        if group["momentum"]:
            s["momentum_buffer"] = b = s["momentum_buffer"] * group["momentum"] + b if "momentum_buffer" in s else b
        gram = y.mH @ y
        delta = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        off = torch.linalg.matrix_norm(delta, keepdim=True)
        rounding = ROUNDOFF * gram.shape[-1] ** 0.5 * torch.finfo(off.dtype).eps
        pull = group["attraction"]
        field = relative(y, b) + pull * (y @ torch.where(off > rounding, delta, 0))
        size = field.abs().amax((-2, -1), keepdim=True)  # squares of large entries overflow: in units of the largest
        field = field / torch.where(size > 0, size, 1)
        a = torch.linalg.matrix_norm(field.mH @ field, keepdim=True).clamp(min=torch.finfo(off.dtype).tiny)
        c = pull * off * (1 - off) / size.clamp(min=torch.finfo(off.dtype).tiny)
        room = (group["safe"] - off).clamp(min=0)
        length = (c + (c.square() + a * room).sqrt()) / a
        return back(-torch.minimum(length, group["lr"] * size).minimum(0.5 / pull * size) * field)

    def move(self, M: Manifold, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        return (x + u, *vs)
