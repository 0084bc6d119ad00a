"""Newton's method in a trust region."""

from __future__ import annotations

import dataclasses
import math

import torch

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.curvature import (
    NOT_FINITE,
    CurvedState,
    NotFiniteError,
    SecondOrder,
    dimension,
    epsilon,
    longest,
    typical_step,
)
from manopt_torch.solvers.line_search import ROUNDING, STUCK
from manopt_torch.solvers.problem import Problem, combine

#: below the first part of the decrease that the model promised the region shrinks, above the second it may grow
POOR, GOOD = 0.25, 0.75


@dataclasses.dataclass(frozen=True)
class TrustRegion(SecondOrder):
    """x ← R_x(u), u an approximate minimizer of f + ⟨g, u⟩ + ½⟨u, H u⟩ in ‖u‖_x ≤ Δ; H is that of f∘R_x at 0.

    u is found by conjugate gradients (Steihaug, Toint), which follow a direction of negative curvature to the edge of
    the region, and otherwise stop at ‖g + H u‖ ≤ ‖g‖ min(κ, ‖u‖^θ), or at 16 units of roundoff of the largest ‖g‖ so
    far: near a minimum the method is of order 1 + θ. (Absil, Baker, Gallivan have ‖g‖^θ; ‖u‖^θ is as small, and does
    not depend on the scale of the cost.) They stop too where curvature is negative by less than ‖g‖, to which H is not
    the Hessian at a critical point: on costs that do not change along some curves they would explore these.
    A step is taken if the cost falls by a tenth of what the model says, or more; until then Δ is quartered, in the same
    iteration, for which the products H d are kept. Both decreases are compared after 1000 units of roundoff of the cost
    were added, so that the last digits of the gradient can be gained. At a point whose gradient is within the tolerance
    it looks for negative curvature, and leaves if there is some.

    The cost must be differentiable twice where it is evaluated; torch's ``x.abs().square()`` is not at zero, where it
    answers 0 without an error: write ``(x.conj() * x).real``.

    Args:
        radius: Δ at the start, a length in the metric; None: √dim/8, dim the dimension of the manifold.
        max_radius: Δ never exceeds it, nor the ``step_limit`` of a retraction.
        kappa, theta: κ < 1 and θ ≥ 0 of the inner stopping rule.
        max_inner: products H d in one iteration; None: the dimension.
        hessian, probes: how H is had, and what is spent on looking for negative curvature, see :class:`SecondOrder`.

    Raises:
        ValueError: for settings outside these bounds.
        NotImplementedError: from ``minimize``, for a cost without second derivatives and ``hessian="exact"``.

    Reference: P.-A. Absil, C. Baker, K. Gallivan, "Trust-region methods on Riemannian manifolds", 2007, algorithms 1
    and 2; near rounding A. Conn, N. Gould, P. Toint, "Trust-region methods", 2000, section 17.4.2.
    """

    radius: float | None = None
    max_radius: float = math.inf
    kappa: float = 0.1
    theta: float = 1.0
    max_inner: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.radius is None or self.radius > 0) or not self.max_radius > 0:
            raise ValueError(f"radius and max_radius must be positive, got {self.radius!r} and {self.max_radius!r}")
        if not 0 < self.kappa < 1 or not self.theta >= 0:
            raise ValueError(f"expected 0 < kappa < 1 and theta >= 0, got {self.kappa!r} and {self.theta!r}")
        if not (self.max_inner is None or self.max_inner >= 1):
            raise ValueError(f"max_inner must be at least 1, got {self.max_inner!r}")

    def init(self, problem: Problem, x: Points) -> CurvedState:
        radius = typical_step(problem.manifold, x) if self.radius is None else self.radius
        return self.arrive(problem, self.expand(problem, x), radius)

    @torch.no_grad()
    def step(self, problem: Problem, state: CurvedState) -> CurvedState:
        M, products = problem.manifold, list[Points]()
        limit = min(self.max_radius, longest(M))
        radius, stuck = min(state.trust, limit), False
        while not stuck:
            try:
                u, hu, edge = self._inner(M, state, radius, products)
            except NotFiniteError:
                return dataclasses.replace(state, halted=NOT_FINITE)
            ratio, end, stuck = self.attempt(problem, state, u, hu)
            length = M.norm(state.x, u).item()
            if end is not None:
                grown = min(2 * radius, limit) if ratio > GOOD and edge else radius
                return dataclasses.replace(end, trust=length / 4 if ratio < POOR else grown)
            radius = min(radius, length) / 4
        return dataclasses.replace(state, halted=STUCK)

    def _inner(
        self, M: Product, state: CurvedState, radius: float, products: list[Points]
    ) -> tuple[Points, Points, bool]:
        """u, H u, and whether u is on the edge of the region; ``products`` are the H d known from larger regions."""
        x, r, norm = state.x, state.g, state.norm
        u = tuple(torch.zeros_like(t) for t in r)
        rounding, steepest = ROUNDING * epsilon(x), 0.0
        d, rr = combine((-1.0, r)), norm**2
        uu, ud, dd = 0.0, 0.0, rr
        for j in range(self.max_inner or dimension(M, x)):
            if j == len(products):
                products.append(state.product(d))
            bend = M.inner(x, d, products[j]).item()
            if not math.isfinite(bend):
                raise NotFiniteError
            steepest = max(steepest, abs(bend) / dd)
            if j and -norm * dd <= bend + rounding * steepest * dd <= 2 * rounding * steepest * dd:
                break  # zero or what H is uncertain by off critical points: no way down, and the rest of g is of no use
            a = rr / bend if bend > 0 else math.inf
            if not uu + 2 * a * ud + a**2 * dd < radius**2:
                a = (radius**2 - uu) / (ud + math.sqrt(ud**2 + dd * (radius**2 - uu)))
                return combine((1.0, u), (a, d)), combine((1.0, r), (a, products[j]), (-1.0, state.g)), True
            u, r, old = combine((1.0, u), (a, d)), combine((1.0, r), (a, products[j])), rr  # r = g + H u
            rr = M.inner(x, r, r).item()
            uu, ud = uu + 2 * a * ud + a**2 * dd, ud + a * dd
            goal = norm * min(self.kappa, math.sqrt(uu) ** self.theta)
            if math.sqrt(rr) <= max(goal, rounding * state.scale):
                break
            ud = rr / old * ud
            d, dd = combine((-1.0, r), (rr / old, d)), rr + (rr / old) ** 2 * dd
        return u, combine((1.0, r), (-1.0, state.g)), False
