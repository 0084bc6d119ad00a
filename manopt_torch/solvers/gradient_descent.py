"""Steepest descent."""

from __future__ import annotations

import dataclasses

from manopt_torch.manifolds.product import Points
from manopt_torch.solvers.base import Solver, State
from manopt_torch.solvers.line_search import STUCK, Armijo, Curve, LineSearch, check_line_search
from manopt_torch.solvers.problem import Problem


@dataclasses.dataclass(frozen=True)
class DescentState(State):
    """``trial``: the first t of the next search."""

    trial: float


@dataclasses.dataclass(frozen=True)
class GradientDescent(Solver):
    """Steepest descent with a line search: x ← R_x(−t grad f).

    The first t that a search tries is that of Barzilai and Borwein: with φ(t) = f(R_x(−t grad f)) of the step before,
    of length t, −t φ'(0)/(φ'(t) − φ'(0)), which is where the parabola through both slopes has its minimum.

    Args:
        line_search: any of :mod:`manopt_torch.solvers.line_search`.

    Raises:
        TypeError: for another line search.

    Reference: J. Barzilai, J. Borwein, "Two-point step size gradient methods", 1988, eq. (5); on manifolds B. Iannazzo,
    M. Porcelli, "The Riemannian Barzilai-Borwein method with nonmonotone line search", 2018.
    """

    line_search: LineSearch = Armijo()  # noqa: RUF009  # immutable

    def __post_init__(self) -> None:
        check_line_search(self.line_search)

    def init(self, problem: Problem, x: Points) -> DescentState:
        state = super().init(problem, x)
        return DescentState(state.x, state.f, state.g, state.norm, 1 / max(state.norm, 1e-300))

    def step(self, problem: Problem, state: DescentState) -> DescentState:
        curve = Curve(problem, state, tuple(-t[None] for t in state.g))
        end = self.line_search(curve, state.trial)
        if end is curve.start:
            return dataclasses.replace(state, halted=STUCK)
        bend = (end.slope - curve.start.slope) / end.step
        trial = -curve.start.slope / bend if bend > 0 else 10 * end.step
        return DescentState(end.x, end.f, end.g, problem.manifold.norm(end.x, end.g).item(), trial)
