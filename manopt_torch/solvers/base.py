"""``minimize``: one loop for every full-batch solver, on any manifold."""

from __future__ import annotations

import abc
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.manifolds.product import Points, Product
from manopt_torch.parameter import fault_of
from manopt_torch.precision import widen
from manopt_torch.solvers.problem import Cost, Problem

#: gradient norms at which a solver has arrived, unless the caller says: what the cost's rounding lets it reach
GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclasses.dataclass(frozen=True)
class State:
    """Where a solver is; a solver that remembers more derives its own.

    ``x`` points, ``f`` the cost there, ``g`` its Riemannian gradient, all at the same place.
    ``halted`` says why the solver can go no further, and is empty while it can.
    """

    x: Points
    f: float
    g: Points
    norm: float
    halted: str = dataclasses.field(default="", kw_only=True)


class Solver(abc.ABC):
    """A full-batch method: a value with two functions. Derive it as a frozen dataclass of its settings."""

    def init(self, problem: Problem, x: Points) -> Any:
        """The :class:`State` at the start ``x``."""
        f, g = problem.gradient(x)
        return State(x, f, g, problem.manifold.norm(x, g).item())

    @abc.abstractmethod
    def step(self, problem: Problem, state: Any) -> Any:
        """One iteration: the next state, whose cost is not higher, or the same one with ``halted`` set."""

    def escape(self, problem: Problem, state: Any) -> Any:
        """Asked where the gradient is within the tolerance: a state of lower cost to go on from, or ``state`` itself.

        A method that knows the Hessian can leave a saddle here; the others believe the gradient.
        """
        return state


@dataclasses.dataclass(frozen=True)
class Result:
    """What :func:`minimize` found, in the words of ``scipy.optimize.OptimizeResult``.

    Attributes:
        x: the point, a tensor or, on a ``Product``, a tuple of them.
        fun: the cost there.
        grad_norm: norm of the Riemannian gradient there, in the metric of the manifold.
        nit, nfev, njev, nhev: iterations; evaluations of the cost, its gradient, Hessian-vector products.
        success: a tolerance was met.
        message: why it stopped.
    """

    x: Any = dataclasses.field(repr=False)
    fun: float
    grad_norm: float
    nit: int
    nfev: int
    njev: int
    nhev: int
    success: bool
    message: str


@torch.inference_mode(False)
def minimize(
    cost: Cost,
    manifold: Manifold | Product,
    x0: Tensor | Sequence[Tensor],
    solver: Solver,
    *,
    tolerance_grad: float | None = None,
    tolerance_change: float = 0.0,
    max_iter: int = 1000,
    max_seconds: float = math.inf,
    callback: Callable[[Result], None] | None = None,
    verbose: bool = False,
) -> Result:
    """Minimize ``cost`` over ``manifold`` from ``x0``.

    ::

        result = minimize(lambda x: -(x.mH @ A @ x).trace(), Stiefel(), x0, TrustRegion())

    Args:
        cost: any function of torch's operations that returns one real number: of a point ``(*B, *S)``, or on a
            ``Product`` of k factors a function of k arguments. A batch is one point of the power manifold, with one
            cost.
        manifold: where to look.
        x0: the start, a point; a tuple of points on a ``Product``. Its dtype and device are those of the result.
        solver: the method with its settings, as ``TrustRegion()``.
        tolerance_grad: norm of the Riemannian gradient at which to stop; None: 1e-6 in double precision, 1e-3 if any
            tensor of x0 is coarser.
        tolerance_change: |change of the cost| / max(1, |cost|) of an iteration at which to stop; 0: never.
        max_iter, max_seconds: give up after so many iterations, or so much wall time.
        callback: called after each iteration with the :class:`Result` so far, whose ``x`` is the solver's own and not
            to be written to; raising ``StopIteration`` stops.
        verbose: print cost and gradient norm as the iterations go, at 1, 2, … 9, 10, 20, …

    Returns:
        :class:`Result`. Its cost is not above the start's, but for rounding errors. A start where the gradient is zero
        is returned as it is, also if it is a saddle, which a first-order method cannot know; one near a saddle leaves.
        A second-order method looks for negative curvature before it stops for the gradient, and leaves where it is.

    Raises:
        ValueError: for a start that is not on the manifold, and for a cost that is not finite there.
        TypeError: for arguments of another kind, and for a cost that is not one real number.
    """
    if not isinstance(manifold, (Manifold, Product)):
        raise TypeError(f"manifold must be one such as Stiefel(), got {manifold!r}")
    single = not isinstance(manifold, Product)
    space = manifold if isinstance(manifold, Product) else Product(manifold)
    x = _start(space, (x0,) if single else x0)
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be one such as TrustRegion(), got {solver!r}")
    problem = Problem(cost, space)
    tolerance = max(GRADIENT.get(widen(t).dtype.to_real(), 1e-3) for t in x)
    if tolerance_grad is not None:
        tolerance = tolerance_grad
    began = time.perf_counter()

    def result(state: State, nit: int, success: bool, message: str) -> Result:
        point = state.x[0] if single else state.x
        counts = problem.nfev, problem.njev, problem.nhev
        return Result(point, state.f, state.norm, nit, *counts, success, message)

    state = solver.init(problem, x)
    if not math.isfinite(state.f) or not math.isfinite(state.norm):
        raise ValueError(
            f"the cost at x0 is {state.f}, its gradient has norm {state.norm}: start where both are finite"
        )
    change, nit = math.inf, 0
    while True:
        if verbose and nit % 10 ** max(0, len(str(nit)) - 1) == 0:
            print(f"iteration {nit}: cost {state.f:.10g}, gradient norm {state.norm:.3g}")
        success, message = True, ""
        arrived = state.norm <= tolerance
        slow = tolerance_change > 0 and change <= tolerance_change * max(1.0, abs(state.f))
        left = solver.escape(problem, state) if arrived or slow else state
        if arrived and left is state:
            message = f"the gradient has norm {state.norm:.3g}, at most tolerance_grad = {tolerance:g}"
            if not problem.differentiable:
                message += "; autograd sees no dependence of the cost on x"
        elif slow and left is state:
            message = f"the cost fell by {change:.3g}, relatively at most tolerance_change = {tolerance_change:g}"
        elif state.halted:
            success, message = False, f"{state.halted} (gradient norm {state.norm:.3g})"
        elif nit >= max_iter:
            success, message = False, f"max_iter = {max_iter} iterations (gradient norm {state.norm:.3g})"
        elif time.perf_counter() - began >= max_seconds:
            success, message = False, f"max_seconds = {max_seconds:g} passed (gradient norm {state.norm:.3g})"
        if message:
            break
        previous, state = state, solver.step(problem, state) if left is state else left
        nit, change = nit + 1, math.inf if state.halted else previous.f - state.f
        if callback is not None:
            try:
                callback(result(state, nit, False, "still running"))
            except StopIteration:
                success, message = False, "the callback stopped it"
                break
    if verbose:
        print(f"stopped after {nit} iterations: {message}")
    return result(state, nit, success, message)


def _start(space: Product, x0: Any) -> Points:
    """A copy of the start, checked."""
    if not isinstance(x0, (tuple, list)) or not all(isinstance(t, Tensor) for t in x0):
        got = [type(t).__name__ for t in x0] if isinstance(x0, (tuple, list)) else type(x0).__name__
        raise TypeError(f"x0 must be a tensor, or on a Product a tuple of tensors, got {got}")
    if not all(t.is_floating_point() or t.is_complex() for t in x0):
        raise TypeError(f"x0 must be floating point or complex, got {', '.join(str(t.dtype) for t in x0)}")
    if len(x0) != len(space.factors):
        raise ValueError(f"x0 has {len(x0)} members, and {space!r} has {len(space.factors)} factors")
    for t, M in zip(x0, space.factors, strict=True):
        M.check_shape(tuple(t.shape))
        if fault := fault_of(t.detach(), M):
            raise ValueError(f"x0 is not on the manifold: {fault}")
    return tuple(t.detach().clone() for t in x0)
