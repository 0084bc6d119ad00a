"""Nonlinear conjugate gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.base import Solver, State
from manopt_torch.solvers.line_search import STUCK, Curve, HagerZhang, LineSearch, Trial, check_line_search
from manopt_torch.solvers.problem import Problem, combine, stack

Rule = Literal["fletcher-reeves", "polak-ribiere", "hestenes-stiefel", "dai-yuan", "liu-storey", "hager-zhang"]


@dataclasses.dataclass(frozen=True)
class ConjugateState(State):
    """``d`` the direction of the next search, ``square`` ‖d‖², ``trial`` its first t, ``age`` the steps since a
    restart."""

    d: Points
    square: float
    trial: float
    age: int


@dataclasses.dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Nonlinear conjugate gradients: x ← R_x(t d), d ← −g + β d', primes for what is carried to the new point.

    With g the new gradient, g' the old and y = g − g'::

        fletcher-reeves    ‖g‖²/‖g'‖²            hestenes-stiefel   max(0, ⟨g, y⟩/⟨d', y⟩)
        polak-ribiere      max(0, ⟨g, y⟩/‖g'‖²)  liu-storey         max(0, ⟨g, y⟩/−⟨g', d'⟩)
        dai-yuan           ‖g‖²/⟨d', y⟩          hager-zhang        ⟨g, y − 2 (‖y‖²/⟨d', y⟩) d'⟩/⟨d', y⟩

    It starts anew from d = −g when d is no direction of descent, when successive gradients are far from orthogonal
    (Powell's test |⟨g, g'⟩| ≥ powell ‖g‖²), and after as many steps as x has real entries.

    Args:
        rule: β. That of Hager and Zhang is bounded from below by −1/(‖d'‖ min(0.01, ‖g'‖)).
        powell: of Powell's test; inf for none.
        line_search: any of :mod:`manopt_torch.solvers.line_search`.

    Raises:
        ValueError: for a rule that is none of these, and for ``powell`` ≤ 0.

    Reference: H. Sato, "Riemannian conjugate gradient methods: general framework and specific algorithms with
    convergence analyses", 2022.
    """

    rule: Rule = "hestenes-stiefel"
    powell: float = 0.2
    line_search: LineSearch = HagerZhang(curvature=0.5)  # noqa: RUF009  # immutable

    def __post_init__(self) -> None:
        check_line_search(self.line_search)
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {get_args(Rule)}, got {self.rule!r}")
        if not self.powell > 0:
            raise ValueError(f"powell must be positive, got {self.powell!r}")

    def init(self, problem: Problem, x: Points) -> ConjugateState:
        return self._anew(super().init(problem, x))

    def _anew(self, state: State) -> ConjugateState:
        """Steepest descent from the place of ``state``."""
        d, trial = combine((-1.0, state.g)), 1 / max(state.norm, 1e-300)
        return ConjugateState(state.x, state.f, state.g, state.norm, d, state.norm**2, trial, 0)

    def step(self, problem: Problem, state: ConjugateState) -> ConjugateState:
        M = problem.manifold
        curve = Curve(problem, state, stack(state.d, state.g))
        end = self.line_search(curve, state.trial)
        if end is curve.start:
            if state.age == 0:
                return dataclasses.replace(state, halted=STUCK)
            return self.step(problem, self._anew(state))
        d, old = zip(*(t.unbind() for t in end.carried), strict=True)
        gg, overlap = M.inner(end.x, end.g, end.g).item(), M.inner(end.x, end.g, old).item()
        beta, age = self._beta(M, end, state, curve.start.slope, old, gg, gg - overlap), state.age + 1
        # of new = −g + β d the slope and the square, from products that are known
        slope = beta * end.slope - gg
        square = gg - 2 * beta * end.slope + beta**2 * M.inner(end.x, d, d).item()
        if (
            not slope < -1e-10 * math.sqrt(gg * max(square, 0.0))
            or abs(overlap) >= self.powell * gg
            or age >= sum(t.numel() * (2 if t.is_complex() else 1) for t in end.x)
        ):
            beta, slope, square, age = 0.0, -gg, gg, 0
        new = combine((-1.0, end.g), (beta, d)) if beta else combine((-1.0, end.g))
        # of two guesses the shorter: an equal decrease to first order, and an equal curvature per unit of length
        trial = end.step * curve.start.slope / slope if slope else end.step
        bend = (end.slope - curve.start.slope) / end.step * square
        if bend > 0:
            trial = min(trial, -slope * state.square / bend)
        return ConjugateState(end.x, end.f, end.g, math.sqrt(gg), new, square, trial, age)

    def _beta(
        self, M: Product, end: Trial, state: ConjugateState, slope: float, old: Points, gg: float, gy: float
    ) -> float:
        """β of the rule; ``slope`` is ⟨g', d'⟩, ``old`` g' carried to the end of the step, ``gy`` is ⟨g, y⟩."""
        bend = end.slope - slope  # ⟨d', y⟩
        if self.rule == "fletcher-reeves":
            return gg / state.norm**2
        if self.rule == "polak-ribiere":
            return max(0.0, gy / state.norm**2)
        if self.rule == "liu-storey":
            return max(0.0, gy / -slope)
        if not bend > 0:
            return 0.0
        if self.rule == "dai-yuan":
            return gg / bend
        if self.rule == "hestenes-stiefel":
            return max(0.0, gy / bend)
        bound, y = -1 / (math.sqrt(state.square) * min(0.01, state.norm)), combine((1.0, end.g), (-1.0, old))
        return max(bound, (gy - 2 * M.inner(end.x, y, y).item() * end.slope / bend) / bend)
