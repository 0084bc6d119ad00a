"""Newton's method with a cubic term: adaptive regularization with cubics."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import torch

from manopt_torch.manifolds.product import Points
from manopt_torch.solvers.curvature import (
    NOT_FINITE,
    CurvedState,
    NotFiniteError,
    SecondOrder,
    epsilon,
    lanczos,
    longest,
    tridiagonal,
    typical_step,
)
from manopt_torch.solvers.line_search import ROUNDING, STUCK
from manopt_torch.solvers.problem import Problem, combine

#: σ falls to a tenth above this part of the decrease that the model promised, and grows fourfold where no step is taken
GOOD, FALL, RISE = 0.9, 0.1, 4.0


@dataclasses.dataclass(frozen=True)
class AdaptiveRegularization(SecondOrder):
    """x ← R_x(u), u an approximate minimizer of f + ⟨g, u⟩ + ½⟨u, H u⟩ + σ/3 ‖u‖³; H is that of f∘R_x at 0.

    u is looked for in the span of g, H g, H² g, …, with an orthonormal basis by Lanczos' method, in which H is
    tridiagonal; there λ = σ‖u‖ solves the secular equation ‖(H + λI)⁻¹ g‖ = λ/σ. The span grows until the gradient of
    the model is at most θ σ‖u‖² or ‖g‖ min(κ, ‖u‖): near a minimum the method is of order 2. σ is adapted to how the
    cost fell; a step is taken if it fell by a tenth of what the quadratic model says, or more. As :class:`TrustRegion`
    it leaves saddles.

    Args:
        sigma: σ at the start, in units of the cost by length³; None: ‖g‖/t² with t = √dim/8, in the first step.
        kappa, theta: κ < 1 and θ > 0 of the inner stopping rule.
        hessian, probes: how H is had, and what is spent on looking for negative curvature, see :class:`SecondOrder`.

    Raises:
        ValueError: for settings outside these bounds.
        NotImplementedError: from ``minimize``, for a cost without second derivatives and ``hessian="exact"``.

    Reference: N. Agarwal, N. Boumal, B. Bullins, C. Cartis, "Adaptive regularization with cubics on manifolds", 2021,
    algorithm 1 and appendix B.
    """

    sigma: float | None = None
    kappa: float = 0.1
    theta: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.sigma is None or self.sigma > 0):
            raise ValueError(f"sigma must be positive, got {self.sigma!r}")
        if not 0 < self.kappa < 1 or not self.theta > 0:
            raise ValueError(f"expected 0 < kappa < 1 and theta > 0, got {self.kappa!r} and {self.theta!r}")

    def init(self, problem: Problem, x: Points) -> CurvedState:
        return self.arrive(problem, self.expand(problem, x), self.sigma or 0.0)

    @torch.no_grad()
    def step(self, problem: Problem, state: CurvedState) -> CurvedState:
        M, x, norm = problem.manifold, state.x, state.norm
        sigma, stuck = state.trust or norm / typical_step(M, x) ** 2, False
        more, found = lanczos(M, x, state.product, state.g), list[tuple[Points, float, float]]()
        rounding = ROUNDING * epsilon(x) * state.scale
        while not stuck and math.isfinite(sigma * norm):
            k = 0
            while True:
                k += 1
                try:
                    found += itertools.islice(more, max(0, k - len(found)))
                except NotFiniteError:
                    return dataclasses.replace(state, halted=NOT_FINITE)
                basis, diagonal, beside = zip(*found[:k], strict=True)
                y = cubic_minimizer(tridiagonal(diagonal, beside), norm, sigma)
                length = float(np.linalg.norm(y))
                goal = max(self.theta * sigma * length**2, norm * min(self.kappa, length), rounding)
                if k > len(found) or beside[-1] * abs(y[-1]) <= goal:
                    break
            if length > longest(M):
                sigma *= RISE
                continue
            u = combine(*zip(y.tolist(), basis, strict=True))
            hu = combine(
                *zip((tridiagonal(diagonal, beside) @ y).tolist(), basis, strict=True)
            )  # within the span, all that ⟨u, H u⟩ needs
            ratio, end, stuck = self.attempt(problem, state, u, hu)
            if end is not None:
                return dataclasses.replace(end, trust=sigma * FALL if ratio > GOOD else sigma)
            sigma *= RISE
        return dataclasses.replace(state, halted=STUCK)


def cubic_minimizer(t: np.ndarray, slope: float, sigma: float) -> np.ndarray:
    """The y that minimizes ``slope y₁ + ½ yᵀTy + σ/3 ‖y‖³``, T tridiagonal: (T + λI) y = −slope e₁ with λ = σ‖y‖.

    λ is the root of 1/‖y(λ)‖ − σ/λ beyond max(0, −λ_min(T)), by Newton's method, and by bisection where that leaves
    the interval in which the root is known to be.
    """
    values, vectors = np.linalg.eigh(t)
    first, least = slope * vectors[0], max(0.0, -float(values[0]))
    gaps = values + least
    low, high = 0.0, math.sqrt(sigma * slope)
    more = high  # λ − least, which keeps its digits where λ is near an eigenvalue
    for _ in range(100):
        shifted, root = gaps + more, least + more
        size = float(np.linalg.norm(first / shifted))
        excess = 1 / size - sigma / root
        low, high = (more, high) if excess < 0 else (low, more)
        step = -excess / (float(np.square(first / shifted / size) @ (1 / shifted)) / size + sigma / root**2)
        if abs(step) <= 1e-15 * more or high - low <= 1e-15 * high:
            break
        more = more + step if low < more + step < high else (low + high) / 2
    return np.asarray(vectors @ (-first / (gaps + more)))
