"""Newton's method in a trust region."""

from __future__ import annotations

import dataclasses
import math

import torch

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.curvature import CurvedState, SecondOrder, dimension, epsilon, longest, typical_step
from manopt_torch.solvers.line_search import ROUNDING, STUCK
from manopt_torch.solvers.problem import Problem, combine

#: units of roundoff of the cost that are added to both decreases that are compared: Manopt's ``rho_regularization``
REGULARIZATION = 1e3
#: to what part the model must be met for a step; below the second the region shrinks, above the third it may grow
ACCEPT, POOR, GOOD = 0.1, 0.25, 0.75
#: quarterings of the region in one iteration after which there is nothing left to try
QUARTERINGS = 50


@dataclasses.dataclass(frozen=True)
class TrustRegion(SecondOrder):
    """x ← R_x(u), u an approximate minimizer of f + ⟨g, u⟩ + ½⟨u, H u⟩ in ‖u‖_x ≤ Δ; H is that of f∘R_x at 0.

    u is found by conjugate gradients (Steihaug, Toint), which follow a direction of negative curvature to the edge of
    the region, and otherwise stop at ‖g + H u‖ ≤ ‖g‖ min(κ, (‖g‖/G)^θ), with G the largest ‖g‖ so far, or at 16 units
    of roundoff of G: near a minimum the method is of order 1 + θ. A step is taken if the cost falls by a tenth of what
    the model says, or more; until then Δ is quartered, in the same iteration, for which the products H d are kept. Both
    decreases are compared after 1000 units of roundoff of the cost were added, so that the last digits of the gradient
    can be gained. At a point whose gradient is within the tolerance it looks for negative curvature, and leaves if
    there is some.

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
        M, eps, products = problem.manifold, epsilon(state.x), list[Points]()
        limit = min(self.max_radius, longest(M))
        radius = min(state.trust, limit)
        slack = REGULARIZATION * eps * abs(state.f)
        for _ in range(QUARTERINGS):
            u, hu, edge = self._inner(M, state, radius, products)
            expected = -M.inner(state.x, u, combine((1.0, state.g), (0.5, hu))).item()
            there = self.expand(problem, M.retract(state.x, u))
            ratio = (state.f - there.f + slack) / (expected + slack) if expected > 0 else -math.inf
            if ratio > ACCEPT and -math.inf < there.f <= state.f + ROUNDING * eps * abs(state.f):
                if ratio < POOR:
                    radius = M.norm(state.x, u).item() / 4
                elif ratio > GOOD and edge:
                    radius = min(2 * radius, limit)
                end = self.arrive(problem, there, radius, state.scale)
                if expected <= slack and not there.f < state.f and not end.norm < state.norm:
                    break
                if math.isfinite(end.norm):
                    return end
            radius = min(radius, M.norm(state.x, u).item()) / 4
            if not expected > ROUNDING * eps * abs(state.f):
                break
        return dataclasses.replace(state, halted=STUCK)

    def _inner(
        self, M: Product, state: CurvedState, radius: float, products: list[Points]
    ) -> tuple[Points, Points, bool]:
        """u, H u, and whether u is on the edge of the region; ``products`` are the H d known from larger regions."""
        x, r, norm = state.x, state.g, state.norm
        u = hu = tuple(torch.zeros_like(t) for t in r)
        rounding, steepest = ROUNDING * epsilon(x), 0.0
        goal = min(self.kappa * norm, max(norm * (norm / state.scale) ** self.theta, rounding * state.scale))
        d, rr = combine((-1.0, r)), norm**2
        uu, ud, dd = 0.0, 0.0, rr
        for j in range(self.max_inner or dimension(M, x)):
            if j == len(products):
                products.append(state.product(d))
            bend = M.inner(x, d, products[j]).item()
            steepest = max(steepest, abs(bend) / dd)
            if j and abs(bend) <= rounding * steepest * dd:
                break  # a null direction of H, in which what is left of the gradient is rounding error
            a = rr / bend if bend > 0 else math.inf
            if not uu + 2 * a * ud + a**2 * dd < radius**2:
                a = (radius**2 - uu) / (ud + math.sqrt(ud**2 + dd * (radius**2 - uu)))
                return combine((1.0, u), (a, d)), combine((1.0, hu), (a, products[j])), True
            u, hu = combine((1.0, u), (a, d)), combine((1.0, hu), (a, products[j]))
            r, old = combine((1.0, r), (a, products[j])), rr
            rr = M.inner(x, r, r).item()
            if math.sqrt(rr) <= goal:
                break
            uu, ud = uu + 2 * a * ud + a**2 * dd, rr / old * (ud + a * dd)
            d, dd = combine((-1.0, r), (rr / old, d)), rr + (rr / old) ** 2 * dd
        return u, hu, False
