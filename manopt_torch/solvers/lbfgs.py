"""The limited-memory method of Broyden, Fletcher, Goldfarb and Shanno."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.base import Solver, State
from manopt_torch.solvers.line_search import STUCK, Curve, HagerZhang, LineSearch, check_line_search
from manopt_torch.solvers.problem import Problem

#: a pair is kept if the cosine of the angle between its members is at least this
CAUTION = 1e-8


@dataclasses.dataclass(frozen=True)
class LBFGSState(State):
    """``trial`` the first t of the next search.

    ``vectors`` d, g, s, y, s, y, …: the direction of the search, the gradient, the pairs, oldest first; each tensor a
    stack (2k + 2, *B, *S). ``gram`` holds the inner products of g, s, y, s, y, ….
    """

    trial: float
    vectors: Points
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
        check_line_search(self.line_search)
        if not (isinstance(self.history, int) and self.history >= 1):
            raise ValueError(f"history must be an integer of at least 1, got {self.history!r}")

    def init(self, problem: Problem, x: Points) -> LBFGSState:
        return self._anew(super().init(problem, x))

    def _anew(self, at: State) -> LBFGSState:
        """Without pairs: steepest descent."""
        vectors = tuple(torch.stack((-t, t)) for t in at.g)
        gram = torch.full((1, 1), at.norm**2, dtype=torch.float64)
        return LBFGSState(at.x, at.f, at.g, at.norm, 1 / max(at.norm, 1e-300), vectors, gram)

    @torch.no_grad()
    def step(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        M = problem.manifold
        curve = Curve(problem, state, state.vectors)
        end = self.line_search(curve, state.trial) if curve.start.slope < 0 else curve.start
        if end is curve.start and len(state.gram) == 1:
            return dataclasses.replace(state, halted=STUCK)
        if end is curve.start:
            return self.step(problem, self._anew(state))
        # the new g twice, in the place of d and for itself, the pairs without the oldest where there is no room, s, y
        first = 2 + max(0, len(state.gram) + 1 - 2 * self.history)
        parts = zip(end.carried, end.g, strict=True)
        vectors = tuple(
            torch.cat((torch.stack((g, g)), c[first:], torch.stack((end.step * c[0], g - c[1])))) for c, g in parts
        )
        n = len(vectors[0]) - 3  # members of gram, apart from the new pair
        rows = [0, n, n + 1] if all(F.isometric for F in M.factors) else list(range(n + 2))
        basis = tuple(v[1:] for v in vectors)
        gram = torch.zeros(n + 2, n + 2, dtype=torch.float64)
        gram[1:n, 1:n] = state.gram[first - 1 :, first - 1 :]
        gram[rows] = _products(M, end.x, tuple(v[rows] for v in basis), basis)
        gram[:, rows] = gram[rows].mH
        if not gram[n, n + 1] > CAUTION * (gram[n, n] * gram[n + 1, n + 1]).sqrt():
            vectors, basis, gram = tuple(v[:-2] for v in vectors), tuple(v[:-2] for v in basis), gram[:n, :n]
        c = torch.from_numpy(_two_loops(gram.numpy()))
        for v, b in zip(vectors, basis, strict=True):
            v[0] = torch.tensordot(c.to(b), b, 1)
        norm = gram[0, 0].item() ** 0.5
        return LBFGSState(end.x, end.f, end.g, norm, 1.0 if len(gram) > 1 else 1 / max(norm, 1e-300), vectors, gram)


def _products(M: Product, x: Points, us: Points, vs: Points) -> Tensor:
    """⟨uᵢ, vⱼ⟩_x of stacks of tangent vectors: (k, *B, *S), (l, *B, *S) -> (k, l)."""
    total = torch.zeros(len(us[0]), len(vs[0]), dtype=torch.float64)
    for F, w, point, u, v in zip(M.factors, M.weights, x, us, vs, strict=True):
        total += w * F.inner(point, u[:, None], v[None]).reshape(*total.shape, -1).sum(-1).cpu().double()
    return total


def _two_loops(gram: np.ndarray) -> np.ndarray:
    """Coefficients of −H g in the basis g, s, y, s, y, …, from the inner products of its members.

    W. Chen, Z. Wang, J. Zhou, "Large-scale L-BFGS using MapReduce", 2014, algorithm 3.
    """
    c, found = np.zeros(len(gram)), []
    c[0] = -1.0
    pairs = range(1, len(gram), 2)
    for i in reversed(pairs):
        found.append(c @ gram[i] / gram[i, i + 1])
        c[i + 1] -= found[-1]
    c *= gram[-2, -1] / gram[-1, -1] if pairs else 1.0
    for i in pairs:
        c[i] += found.pop() - c @ gram[i + 1] / gram[i, i + 1]
    return c
