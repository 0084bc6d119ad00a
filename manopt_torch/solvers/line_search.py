"""Line searches along the curve t → R_x(t d): Armijo, strong Wolfe, Hager-Zhang."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.base import State
from manopt_torch.solvers.problem import Problem

Pull = Callable[[], Points]

#: costs that differ by this many units of roundoff, relatively, are not told apart
ROUNDING = 16.0
#: what a solver says when a line search along the gradient finds nothing
STUCK = "no lower cost was found along the gradient: at working precision this is a minimum, or the gradient is wrong"


class Trial:
    """The point of a :class:`Curve` at t = ``step``: ``x`` = R_x(t d), ``f`` the cost there; derivatives when asked.

    ``carried`` are the vectors of the curve, carried to this point by ``move``, in one stack; the first is d.
    """

    def __init__(self, manifold: Product, step: float, x: Points, carried: Points, f: float, pull: Pull) -> None:
        self.step, self.x, self.carried, self.f = step, x, carried, f
        self._manifold, self._pull = manifold, pull

    @functools.cached_property
    def g(self) -> Points:
        """The Riemannian gradient at ``x``."""
        return self._pull()

    @functools.cached_property
    def slope(self) -> float:
        """⟨g, d⟩ at ``x``."""
        return self._manifold.inner(self.x, self.g, tuple(t[0] for t in self.carried)).item()


class Curve:
    """φ(t) = f(R_x(t d)), t ≥ 0, from the place of a :class:`State`; ``vectors`` is a stack (k, *B, *S) of d and of
    others that are carried along.

    The slope at t is ⟨grad f, d⟩ with the direction carried by ``move``: φ'(t) itself where that is the velocity of
    the curve, as on geodesics with parallel transport, and otherwise equal to it as t → 0. The Wolfe conditions stay
    those of H. Sato, "Riemannian conjugate gradient methods", 2022, section 3; a derivative through the retraction
    would cost more than the rest of a step.

    ``start`` is the trial at t = 0, ``best`` the lowest so far, ``limit`` the largest t at which every point moves by
    at most the ``step_limit`` of its manifold; ``rounding`` what costs near the start are uncertain by.
    """

    def __init__(self, problem: Problem, state: State, vectors: Points) -> None:
        M, self.problem = problem.manifold, problem
        self.start = self.best = Trial(M, 0.0, state.x, vectors, state.f, lambda: state.g)
        self.rounding = ROUNDING * max(torch.finfo(t.dtype).eps for t in vectors) * abs(state.f)
        parts = zip(M.factors, state.x, vectors, strict=True)
        norms = ((F.step_limit, F.norm(x, v[0])) for F, x, v in parts if F.step_limit < math.inf)
        self.limit = min((t / max(n.max().item(), 1e-300) for t, n in norms if n.numel()), default=math.inf)

    @torch.no_grad()
    def at(self, t: float) -> Trial:
        """Evaluate the cost at R_x(t d)."""
        M, start = self.problem.manifold, self.start
        y, carried = M.move(start.x, tuple(t * v[0] for v in start.carried), start.carried)
        trial = Trial(M, t, y, carried, *self.problem.tape(y))
        self.best = trial if -math.inf < trial.f < self.best.f else self.best
        return trial


def check_line_search(given: object) -> None:
    """Raise ``TypeError`` for what is no line search."""
    if not isinstance(given, LineSearch):
        raise TypeError(f"line_search must be one such as Armijo() or HagerZhang(), got {given!r}")


class LineSearch(abc.ABC):
    """Finds a step; a frozen dataclass of its constants, called with a curve and the first t to try.

    Every trial is judged good, too short or too long. Trials that are too short are followed by longer ones until one
    is too long; from then on the next lies between the longest that is too short and the shortest that is too long, at
    the minimum of the polynomial through their costs and slopes. A trial whose cost or slope is not finite is too long.
    """

    max_evaluations: int

    def __post_init__(self) -> None:
        bounds = {name: value for name, value in vars(self).items() if name != "max_evaluations"}
        if not all(a < b for a, b in itertools.pairwise([0.0, *bounds.values(), 1.0])) or self.max_evaluations < 1:
            raise ValueError(f"expected 0 < {' < '.join(bounds)} < 1 and max_evaluations >= 1, got {self!r}")

    @abc.abstractmethod
    def judge(self, curve: Curve, trial: Trial) -> int:
        """0 for a good trial, -1 for one that is too short, 1 for one that is too long."""

    def __call__(self, curve: Curve, t: float) -> Trial:
        """A good trial; failing that the lowest, which is ``curve.start`` if no lower cost was found."""
        before = short = curve.start
        long: Trial | None = None
        for _ in range(self.max_evaluations):
            t = min(t, curve.limit)
            trial = curve.at(t)
            verdict = self.judge(curve, trial) if math.isfinite(trial.f) else 1
            if verdict == 0:
                return trial
            if verdict < 0:
                before, short = short, trial
            else:
                long = trial
            if (long is None and t == curve.limit) or (
                long is not None and long.step - short.step <= 1e-15 * long.step
            ):
                break
            t = _beyond(before, short) if long is None else _between(short, long)
        return curve.best if math.isfinite(curve.best.slope) else curve.start


def _beyond(before: Trial, short: Trial) -> float:
    """Where the slope vanishes if it continues to change as between the two; 1.1 to 10 times as far as ``short``."""
    bend = (short.slope - before.slope) / (short.step - before.step)
    return short.step + min(max(-short.slope / bend, 0.1 * short.step), 9 * short.step) if bend > 0 else 10 * short.step


def _between(short: Trial, long: Trial) -> float:
    """The minimum of the parabola through slope and cost of ``short`` and the cost of ``long``, or where its slope is
    known through both slopes; a tenth of the interval away from both ends."""
    width = long.step - short.step
    if not math.isfinite(long.f):
        return short.step + 0.2 * width
    if "slope" in vars(long):
        bend = (long.slope - short.slope) / width
    else:
        bend = 2 * (long.f - short.f - short.slope * width) / width / width  # not width², which underflows
    part = -short.slope / (bend * width) if bend > 0 else 0.5
    return short.step + width * min(max(part, 0.1), 0.9)


@dataclasses.dataclass(frozen=True)
class Armijo(LineSearch):
    """Sufficient decrease, by backtracking: φ(t) ≤ φ(0) + c₁ t φ'(0).

    Args:
        decrease: c₁.
        max_evaluations: of the cost, in one search.

    Reference: L. Armijo, "Minimization of functions having Lipschitz continuous first partial derivatives", 1966.
    """

    decrease: float = 1e-4
    max_evaluations: int = 25

    def judge(self, curve: Curve, trial: Trial) -> int:
        enough = trial.f <= curve.start.f + self.decrease * trial.step * curve.start.slope
        return 0 if enough and trial.f < curve.start.f and math.isfinite(trial.slope) else 1


@dataclasses.dataclass(frozen=True)
class StrongWolfe(LineSearch):
    """Sufficient decrease and a slope near zero: φ(t) ≤ φ(0) + c₁ t φ'(0) and |φ'(t)| ≤ c₂ |φ'(0)|.

    Args:
        decrease, curvature: c₁ < c₂.
        max_evaluations: of the cost, in one search.

    Reference: J. Nocedal, S. Wright, "Numerical Optimization", 2006, eq. (3.7); the interval is that of J. Moré,
    D. Thuente, "Line search algorithms with guaranteed sufficient decrease", 1994.
    """

    decrease: float = 1e-4
    curvature: float = 0.4
    max_evaluations: int = 25

    def judge(self, curve: Curve, trial: Trial) -> int:
        f, slope = curve.start.f, curve.start.slope
        if not (trial.f <= f + self.decrease * trial.step * slope and trial.f < f and math.isfinite(trial.slope)):
            return 1
        return 0 if abs(trial.slope) <= -self.curvature * slope else int(math.copysign(1, trial.slope))


@dataclasses.dataclass(frozen=True)
class HagerZhang(LineSearch):
    """The approximate Wolfe conditions, which can be told by slopes where costs differ by rounding errors only.

    A good trial has φ'(t) ≥ c₂ φ'(0), and φ(t) ≤ φ(0) + c₁ t φ'(0) or, what the parabola makes of it,
    φ'(t) ≤ (2c₁ − 1) φ'(0) with φ(t) ≤ φ(0) + ε; ε is rounding error, 16 machine epsilons times |φ(0)|.

    Args:
        decrease, curvature: c₁ < c₂.
        max_evaluations: of the cost, in one search.

    Reference: W. Hager, H. Zhang, "A new conjugate gradient method with guaranteed descent and an efficient line
    search", 2005, eqs. (4.1) and (4.4).
    """

    decrease: float = 0.1
    curvature: float = 0.9
    max_evaluations: int = 25

    def judge(self, curve: Curve, trial: Trial) -> int:
        f, slope = curve.start.f, curve.start.slope
        if not (trial.f <= f + curve.rounding and math.isfinite(trial.slope)):
            return 1
        lower = trial.f < f and trial.f <= f + self.decrease * trial.step * slope
        if trial.slope >= self.curvature * slope and (lower or trial.slope <= (2 * self.decrease - 1) * slope):
            return 0
        return 1 if trial.slope >= 0 else -1
