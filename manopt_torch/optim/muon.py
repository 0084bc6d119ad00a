"""Riemannian Muon: steepest descent under the spectral norm."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manopt_torch import linalg, spectral
from manopt_torch.manifolds import Manifold, Stiefel
from manopt_torch.optim.base import RiemannianOptimizer, State, require
from manopt_torch.optim.groups import Group, Params
from manopt_torch.optim.matrices import as_matrices, inverse_root, orthonormal_manifold


class RiemannianMuon(RiemannianOptimizer):
    """Steps u = lr · argmin ⟨b, u⟩ over tangent u with ‖u‖₂ ≤ 1, on ``Stiefel``, ``Unitary`` and Views of them.

    With r the Riemannian gradient, for the Frobenius metric, at x::

        m ← μ m + (1 − μ) r,   b = μ m + (1 − μ) r  (nesterov)  or  m

    The dual problem is min ‖b + xΛ‖_* over Hermitian Λ, p×p, and its optimum has u = −(b + xΛ)D with
    D = ((b + xΛ)ᴴ(b + xΛ))^-½. For square x, Λ = 0, and u is minus the polar factor of b, the exact solution. For
    tall x, Λ is kept in the state, in units of ‖b‖_F, and improved by one step of iteratively reweighted least squares
    per step of the optimizer, which does not raise the dual cost for the same b::

        D from the last Λ,   ΛD + DΛ = D xᴴb − xᴴb D   (a Lyapunov equation),   u = −lr (b + xΛ)D / max(1, ‖(b + xΛ)D‖₂)

    so that u is tangent, and ‖u‖₂ ≤ lr, always, and optimal once Λ has converged (linearly, but
    slowly where n < 2p and the optimal b + xΛ is singular). Equivariant from both sides.

    Args:
        params: see :class:`RiemannianOptimizer`.
        lr: the largest singular value ‖u‖₂ of a step; a number or a 0-dim tensor. Steps do not shorten with the
            gradient: let it decay.
        momentum, nesterov, maximize: as in ``torch.optim.Muon``.
        eps: of tall x: D is ((…)ᴴ(…) + eps² I)^-½ of (b + xΛ)/‖b‖_F, with the floor of :mod:`manopt_torch.spectral`
            besides. For square x, where odd real ones have a null vector, u is 0 where b is, to rounding.
        error_if_nonfinite: see :class:`RiemannianOptimizer`.

    Raises:
        ValueError: for a negative ``lr`` or ``eps``, for momentum outside [0, 1), and for another manifold.

    Reference: J. Bernstein, "Modular manifolds", 2025, for the problem and its dual.
    """

    tangent_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    array_state: ClassVar[dict[str, str]] = {"dual": "pp"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        eps: float = 1e-7,
        *,
        maximize: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        require(lr=lr, eps=eps)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults, error_if_nonfinite=error_if_nonfinite)

    def check_manifold(self, M: Manifold) -> None:
        orthonormal_manifold(M)

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        mu, base = group["momentum"], orthonormal_manifold(M)
        s["momentum_buffer"] = m = s.get("momentum_buffer", torch.zeros_like(r)).lerp(r, 1 - mu)
        (y, b), back = as_matrices(M, x, r.lerp(m, mu) if group["nesterov"] else m)
        if isinstance(base, Stiefel) and base.metric == "canonical":
            b = b - y @ (y.mH @ b) / 2  # the same differential by the Frobenius metric
        for norm in (
            lambda t: t.abs().amax((-2, -1), keepdim=True),
            lambda t: torch.linalg.matrix_norm(t, keepdim=True),
        ):
            size = norm(b)  # first by the largest entry, whose square neither overflows nor underflows
            b = b / torch.where(size > 0, size, 1)
        skew = linalg.skew(y.mH @ b)
        eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
        a = b + y @ s.get("dual", torch.zeros_like(skew))
        if y.shape[-2] == y.shape[-1]:
            d = inverse_root(a.mH @ a)
        else:
            d = spectral.inv_sqrtm(a.mH @ a + group["eps"] ** 2 * eye)
            s["dual"] = linalg.herm(linalg.lyapunov(d, d @ skew - skew @ d))
            a = b + y @ s["dual"]
        u = M.project(x, back(a @ d))
        (seen,), _ = as_matrices(M, u)
        longest = torch.linalg.matrix_norm(seen, 2, keepdim=True).clamp(min=1)
        return back(seen * (-group["lr"] / longest))
