"""The limited-memory method of Broyden, Fletcher, Goldfarb and Shanno."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.base import Solver, State
from manopt_torch.solvers.line_search import STUCK, Curve, HagerZhang, LineSearch
from manopt_torch.solvers.problem import Problem, combine

#: a pair is kept if the cosine of the angle between its members is at least this
CAUTION = 1e-8


@dataclasses.dataclass(frozen=True)
class LBFGSState(State):
    """``d`` the direction of the next search, ``trial`` its first t.

    ``memory`` the pairs s, y, s, y, …, oldest first, at ``x``, each tensor (2k, *B, *S); ``gram`` their inner products.
    """

    d: Points
    trial: float
    memory: Points
    gram: Tensor


@dataclasses.dataclass(frozen=True)
class LBFGS(Solver):
    """Limited-memory quasi-Newton: x ← R_x(−t H g), H an inverse Hessian from the last steps.

    A pair is s, the step, and y, the difference of the gradients, both carried to the new point; all pairs follow in
    the same ``move`` as the point. H is applied by the two-loop recursion in the metric of the manifold, from
    ⟨s, y⟩/⟨y, y⟩ of the last pair times the identity; it is done in coefficients, from the inner products of the pairs,
    which stay what they are where ``move`` is an isometry. A pair with too little curvature,
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
        return self._anew(super().init(problem, x))

    def _anew(self, at: State) -> LBFGSState:
        """Without pairs: steepest descent."""
        nothing = tuple(t[None][:0] for t in at.x)
        d = combine((-1.0, at.g))
        return LBFGSState(at.x, at.f, at.g, at.norm, d, 1 / max(at.norm, 1e-300), nothing, torch.zeros(0, 0))

    @torch.no_grad()
    def step(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        M, n = problem.manifold, len(state.gram)
        curve = Curve(problem, state, state.d, state.g, *([state.memory] if n else []))
        end = self.line_search(curve, state.trial) if curve.start.slope < 0 else curve.start
        if end is curve.start:
            return self.step(problem, self._anew(state)) if n else dataclasses.replace(state, halted=STUCK)
        old, *carried = end.carried
        s, y = combine((end.step, end.d)), combine((1.0, end.g), (-1.0, old))
        newest = tuple(torch.stack(own) for own in zip(s, y, end.g, strict=True))
        basis = tuple(torch.cat(own) for own in zip(*carried, newest, strict=True))
        gram = torch.zeros(n + 3, n + 3, dtype=torch.float64)
        gram[:n, :n] = state.gram
        new = n if all(F.isometric for F in M.factors) else 0  # inner products from here on are to be computed
        gram[new:] = _products(M, end.x, tuple(t[new:] for t in basis), basis)
        gram[:, new:] = gram[new:].mH.clone()
        kept = list(range(n + 3))
        if not gram[n, n + 1] > CAUTION * (gram[n, n] * gram[n + 1, n + 1]) ** 0.5:
            del kept[n : n + 2]
        kept = kept[-2 * self.history - 1 :]
        if len(kept) < n + 3:
            basis, gram = tuple(t[kept] for t in basis), gram[kept][:, kept]
        d = tuple(torch.tensordot(torch.from_numpy(_two_loops(gram.numpy())).to(t), t, 1) for t in basis)
        norm = gram[-1, -1].item() ** 0.5
        trial = 1.0 if len(gram) > 1 else 1 / max(norm, 1e-300)
        return LBFGSState(end.x, end.f, end.g, norm, d, trial, tuple(t[:-1] for t in basis), gram[:-1, :-1])


def _products(M: Product, x: Points, us: Points, vs: Points) -> Tensor:
    """⟨uᵢ, vⱼ⟩_x of stacks of tangent vectors: (k, *B, *S), (l, *B, *S) -> (k, l)."""
    total = torch.zeros(len(us[0]), len(vs[0]), dtype=torch.float64)
    for F, w, point, u, v in zip(M.factors, M.weights, x, us, vs, strict=True):
        total += w * F.inner(point, u[:, None], v[None]).reshape(*total.shape, -1).sum(-1).cpu().double()
    return total


def _two_loops(gram: np.ndarray) -> np.ndarray:
    """Coefficients of −H g in the basis s, y, s, y, …, g, from the inner products of its members.

    W. Chen, Z. Wang, J. Zhou, "Large-scale L-BFGS using MapReduce", 2014, algorithm 3.
    """
    c, found = np.zeros(len(gram)), []
    c[-1] = -1.0
    pairs = range(0, len(gram) - 1, 2)
    for i in reversed(pairs):
        found.append(c @ gram[i] / gram[i, i + 1])
        c[i + 1] -= found[-1]
    c *= gram[-3, -2] / gram[-2, -2] if pairs else 1.0
    for i in pairs:
        c[i] += found.pop() - c @ gram[i + 1] / gram[i, i + 1]
    return c
