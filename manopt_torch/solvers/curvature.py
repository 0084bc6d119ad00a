"""What second-order solvers share: a state with a Hessian, Lanczos in the tangent space, and how a saddle is left."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import torch

from manopt_torch.manifolds.product import Points, Product
from manopt_torch.solvers.base import Solver, State
from manopt_torch.solvers.expansion import Expansion
from manopt_torch.solvers.line_search import ROUNDING
from manopt_torch.solvers.problem import Problem, combine

Hessian = Literal["exact", "difference"]

#: the model must be met to this part for a step to be taken
ACCEPT = 0.1
#: units of roundoff of the cost that are added to both decreases that are compared: Manopt's ``rho_regularization``
REGULARIZATION = 1e3


class NotFiniteError(ArithmeticError):
    """A Hessian-vector product has NaN or inf in it."""


#: what a solver says then
NOT_FINITE = "the second derivative of the cost is not finite here: try hessian='difference', or a first-order solver"


@dataclasses.dataclass(frozen=True)
class CurvedState(State):
    """``product`` is u ↦ H[u] at x, ``scale`` the largest gradient norm so far, ``trust`` how far the model is trusted:
    the radius of a region, or the weight of what is added to the model."""

    product: Callable[[Points], Points]
    scale: float
    trust: float


@dataclasses.dataclass(frozen=True)
class SecondOrder(Solver):
    """A solver with the second derivative H of f∘R_x at 0.

    A gradient of zero does not content it: :meth:`escape` looks for negative curvature by ``probes`` steps of Lanczos'
    method from a random tangent vector, which finds every direction of descent in as many dimensions, and in more the
    pronounced ones.

    Args:
        hessian: ``"exact"`` differentiates the cost twice; ``"difference"`` takes differences of gradients of f∘R_x,
            for costs that can be differentiated once only.
        probes: steps of Lanczos' method where the gradient is small; 0: a saddle is not told from a minimum.
    """

    hessian: Hessian = dataclasses.field(default="exact", kw_only=True)
    probes: int = dataclasses.field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        if self.hessian not in get_args(Hessian):
            raise ValueError(f"hessian must be one of {get_args(Hessian)}, got {self.hessian!r}")
        if not self.probes >= 0:
            raise ValueError(f"probes must be at least 0, got {self.probes!r}")

    def expand(self, problem: Problem, x: Points) -> Expansion:
        """The cost at x, with derivatives to be asked for."""
        return Expansion(problem, x, exact=self.hessian == "exact")

    def arrive(self, problem: Problem, there: Expansion, trust: float, scale: float = 0.0) -> CurvedState:
        """The state at ``there``, whose gradient is computed."""
        norm = problem.manifold.norm(there.x, there.g).item()
        return CurvedState(there.x, there.f, there.g, norm, there.product, max(scale, norm), trust)

    def attempt(
        self, problem: Problem, state: CurvedState, u: Points, hu: Points
    ) -> tuple[float, CurvedState | None, bool]:
        """The step u, given H u: the decrease of the cost by that of f + ⟨g, u⟩ + ½⟨u, H u⟩; the state at its end, or
        None if it must not be taken; and whether shorter steps are not worth a trial, being lost in rounding."""
        M, unit = problem.manifold, epsilon(state.x) * abs(state.f)
        expected = -M.inner(state.x, u, combine((1.0, state.g), (0.5, hu))).item()
        there, slack = self.expand(problem, M.retract(state.x, u)), REGULARIZATION * unit
        ratio = (state.f - there.f + slack) / (expected + slack) if expected > 0 else -math.inf
        hopeless = not expected > ROUNDING * unit
        if not (ratio > ACCEPT and -math.inf < there.f <= state.f + ROUNDING * unit):
            return ratio, None, hopeless
        end = self.arrive(problem, there, state.trust, state.scale)
        if expected <= slack and not there.f < state.f and not end.norm < state.norm:
            return ratio, None, True
        return (ratio, end, False) if math.isfinite(end.norm) else (ratio, None, hopeless)

    def escape(self, problem: Problem, state: CurvedState) -> CurvedState:
        M, eps, t = problem.manifold, epsilon(state.x), typical_step(problem.manifold, state.x)
        try:
            d, curvature, size = _lowest(M, state, self.probes)
        except NotFiniteError:
            return state  # nothing is known of the curvature
        # off critical points curvature of the size of the gradient says nothing
        if not curvature < -(math.sqrt(eps) * size + state.norm):
            return state
        d = combine((-math.copysign(1.0, M.inner(state.x, state.g, d).item()), d))
        while -(t**2) * curvature > ROUNDING * eps * abs(state.f) and t > eps:
            there = self.expand(problem, M.retract(state.x, combine((t, d))))
            if there.f < state.f + t**2 * curvature / 8:
                left = self.arrive(problem, there, state.trust, state.scale)
                if math.isfinite(left.norm):
                    return left
            t /= 2
        return state


def epsilon(x: Points) -> float:
    """The coarsest unit of roundoff of the tensors."""
    return max(torch.finfo(t.dtype).eps for t in x)


def longest(M: Product) -> float:
    """The length up to which every tangent vector keeps every point within the ``step_limit`` of its manifold."""
    return min(F.step_limit * math.sqrt(w) for F, w in zip(M.factors, M.weights, strict=True))


def dimension(M: Product, x: Points) -> int:
    """Real dimension of the manifold around x."""
    return sum(F.dim(*t.shape, dtype=t.dtype) for F, t in zip(M.factors, x, strict=True))


def typical_step(M: Product, x: Points) -> float:
    """√dim/8, Manopt's: an eighth of the size of a product of ``dim`` lines of unit length."""
    return min(math.sqrt(max(1, dimension(M, x))) / 8, longest(M))


def lanczos(
    M: Product, x: Points, product: Callable[[Points], Points], q: Points
) -> Iterator[tuple[Points, float, float]]:
    """(qⱼ, αⱼ, βⱼ), j = 1, 2, …: orthonormal tangent vectors from q/‖q‖, in which H is tridiagonal with diagonal α and
    βⱼ = ⟨qⱼ₊₁, H qⱼ⟩. It ends where β vanishes to rounding."""
    basis: list[Points] = []
    beta, size = M.norm(x, q).item(), 0.0
    while beta > 64 * epsilon(x) * size:
        basis.append(combine((1 / beta, q)))
        q = product(basis[-1])
        size = max(size, M.norm(x, q).item())
        alpha = M.inner(x, basis[-1], q).item()
        if not math.isfinite(alpha):
            raise NotFiniteError
        for _ in range(2):  # twice is enough: Kahan
            q = combine((1.0, q), *((-a, old) for a, old in zip(overlaps(M, x, basis, q), basis, strict=True)))
        beta = M.norm(x, q).item()
        yield basis[-1], alpha, beta


def overlaps(M: Product, x: Points, basis: Sequence[Points], q: Points) -> list[float]:
    """⟨qⱼ, q⟩ with every vector of a basis."""
    parts = zip(M.factors, M.weights, x, zip(*basis, strict=True), q, strict=True)
    numbers = (w * F.inner(t, torch.stack(own), v).reshape(len(basis), -1).sum(1) for F, w, t, own, v in parts)
    total: list[float] = sum(numbers, torch.zeros(())).tolist()
    return total


def tridiagonal(diagonal: Sequence[float], beside: Sequence[float]) -> np.ndarray:
    """H in the basis of :func:`lanczos`, whose α and β are given; the last β leads out of it."""
    return np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)


def _lowest(M: Product, state: CurvedState, steps: int) -> tuple[Points, float, float]:
    """A unit tangent vector, ⟨d, H d⟩ there, the least after so many steps, and an estimate of ‖H‖."""
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(t.shape, dtype=t.dtype, generator=generator, device="cpu").to(t.device) for t in state.x)
    start = M.project(state.x, tuple(noise))
    found = list(itertools.islice(lanczos(M, state.x, state.product, start), steps))
    if not found:
        return start, 0.0, 0.0
    basis, diagonal, beside = zip(*found, strict=True)
    values, vectors = np.linalg.eigh(tridiagonal(diagonal, beside))
    d = combine(*zip(vectors[:, 0].tolist(), basis, strict=True))
    return d, float(values[0]), float(abs(values).max())
