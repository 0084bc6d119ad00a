"""The limited-memory method of Broyden, Fletcher, Goldfarb and Shanno."""

from __future__ import annotations

import dataclasses

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.base import Solver, State
from manopt_torch.solvers.line_search import STUCK, Curve, HagerZhang, LineSearch
from manopt_torch.solvers.problem import Problem, combine

#: a pair is kept if the cosine of the angle between its members is at least this
CAUTION = 1e-8


@dataclasses.dataclass(frozen=True)
class LBFGSState(State):
    """``pairs`` (s, y, ⟨s, y⟩), oldest first, at ``x``; ``scale`` the inverse Hessian before them."""

    pairs: tuple[tuple[Points, Points, float], ...]
    scale: float


@dataclasses.dataclass(frozen=True)
class LBFGS(Solver):
    """Limited-memory quasi-Newton: x ← R_x(−t H g), H an inverse Hessian from the last steps.

    A pair is s, the step, and y, the difference of the gradients, both carried to the new point, where all pairs
    follow in the same ``move``. H is applied by the two-loop recursion in the metric of the manifold, from
    ⟨s, y⟩/⟨y, y⟩ of the last pair times the identity. A pair with too little curvature,
    ⟨s, y⟩ < 1e-8 ‖s‖ ‖y‖, is left out, so that H is positive definite and the direction one of descent.

    Args:
        history: number of pairs that are kept.
        line_search: any of :mod:`manopt_torch.solvers.line_search`; it tries t = 1 first.

    Raises:
        ValueError: for ``history`` < 1.

    Reference: W. Huang, K. Gallivan, P.-A. Absil, "A Broyden class of quasi-Newton methods for Riemannian
    optimization", 2015; the two loops: J. Nocedal, "Updating quasi-Newton matrices with limited storage", 1980.
    """

    history: int = 10
    line_search: LineSearch = HagerZhang()  # noqa: RUF009  # immutable

    def __post_init__(self) -> None:
        if not self.history >= 1:
            raise ValueError(f"history must be at least 1, got {self.history!r}")

    def init(self, problem: Problem, x: Points) -> LBFGSState:
        state = super().init(problem, x)
        return LBFGSState(state.x, state.f, state.g, state.norm, (), 1 / max(state.norm, 1e-300))

    def step(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        M = problem.manifold
        curve = Curve(problem, state, self._direction(M, state))
        end = self.line_search(curve, 1.0) if curve.start.slope < 0 else curve.start
        if end is curve.start:
            if not state.pairs:
                return dataclasses.replace(state, halted=STUCK)
            return self.step(problem, dataclasses.replace(state, pairs=(), scale=1 / state.norm))
        u = combine((end.step, curve.d))
        kept = state.pairs[-self.history + 1 :] if self.history > 1 else ()
        _, s, old, *carried = M.move(state.x, u, u, state.g, *(v for pair in kept for v in pair[:2]))
        pairs = [(a, b, p[2]) for a, b, p in zip(carried[::2], carried[1::2], kept, strict=True)]
        y = combine((1.0, end.g), (-1.0, old))
        sy, yy, scale = M.inner(end.x, s, y).item(), M.inner(end.x, y, y).item(), state.scale
        if sy > CAUTION * (yy * M.inner(end.x, s, s).item()) ** 0.5:
            pairs, scale = [*pairs, (s, y, sy)], sy / yy
        return LBFGSState(end.x, end.f, end.g, M.norm(end.x, end.g).item(), tuple(pairs), scale)

    def _direction(self, M: Product, state: LBFGSState) -> Points:
        """−H g by the two loops."""
        q, found = combine((-1.0, state.g)), []
        for s, y, sy in reversed(state.pairs):
            found.append(M.inner(state.x, s, q).item() / sy)
            q = combine((1.0, q), (-found[-1], y))
        q = combine((state.scale, q))
        for s, y, sy in state.pairs:
            a = found.pop() - M.inner(state.x, y, q).item() / sy
            q = combine((1.0, q), (a, s))
        return q
