"""A cost to second order around a point, through the retraction."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from manopt_torch.manifolds.product import Points
from manopt_torch.solvers.problem import Problem, combine

ONCE = (
    "the cost cannot be differentiated twice; give the solver differences of gradients for the Hessian, as in "
    'TrustRegion(hessian="difference")'
)


class Expansion:
    """f(R_x(u)) to second order in u: ``f``, the Riemannian gradient ``g``, and ``product``, u ↦ H[u].

    H is the sum of ∇²f, and of the second derivative of ⟨∇f(x), R_x(u)⟩ at u = 0, which is the manifold's
    ``weingarten``. The graph of the gradient is kept, so that a product is one pass backward through it, and the cost
    does not run again. With ``exact=False`` a product is a difference of two gradients of f∘R_x, for which it does.
    """

    def __init__(self, problem: Problem, x: Points, exact: bool = True) -> None:
        problem.nfev += 1
        self._problem, self.x, self._exact = problem, x, exact
        self._leaves = [t.detach().requires_grad_() for t in x]
        with torch.enable_grad():
            self._value = problem.evaluate(*self._leaves)
        self.f = self._value.item()

    @functools.cached_property
    def _slopes(self) -> Points:
        """∇f at the leaves."""
        self._problem.njev += 1
        return gradients(self._value, self._leaves, create_graph=self._exact)

    @functools.cached_property
    def g(self) -> Points:
        """The Riemannian gradient, a tuple of tangent vectors."""
        with torch.no_grad():
            return self._problem.manifold.rgrad(self.x, tuple(t.detach() for t in self._slopes))

    def product(self, u: Points) -> Points:
        """H[u], a tuple of tangent vectors: ⟨H[u], v⟩_x = D²(f∘R_x)(0)[u, v]."""
        self._problem.nhev += 1
        if not self._exact:
            return self._difference(u)
        live = [(g, v) for g, v in zip(self._slopes, u, strict=True) if g.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(u)
        if live:
            gs, vs = zip(*live, strict=True)
            try:
                found = torch.autograd.grad(gs, self._leaves, vs, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                raise NotImplementedError(ONCE) from error
        with torch.no_grad():
            M, g = self._problem.manifold, tuple(s.detach() for s in self._slopes)
            bent = M.weingarten(self.x, u, g)
            return M.rgrad(self.x, tuple(w if d is None else w + d for w, d in zip(bent, found, strict=True)))

    def _difference(self, u: Points) -> Points:
        """(grad(f∘R_x)(hu) − g)/h, with ‖hu‖ = √ε ‖x‖, or √ε for x = 0, in Euclidean norms."""
        M, g = self._problem.manifold, self.g
        size, length = (math.hypot(*(torch.linalg.vector_norm(t).item() for t in ts)) for ts in (self.x, u))
        h = max(torch.finfo(t.dtype).eps for t in self.x) ** 0.5 * (size or 1.0) / (length or 1.0)
        us = [(h * t).requires_grad_() for t in u]
        with torch.enable_grad():
            f = self._problem.evaluate(*M.retract(self.x, tuple(us)))
        slopes = gradients(f, us)
        with torch.no_grad():
            change = combine((1.0, M.rgrad(self.x, slopes)), (-1.0, g))
            return M.project(self.x, combine((1 / h, change)))  # rounding errors grow by 1/h, also the normal ones


def gradients(f: Tensor, leaves: list[Tensor], create_graph: bool = False) -> Points:
    """Gradients of f, zero where it does not depend on a leaf; with ``create_graph``, ones that have derivatives."""
    if not f.requires_grad:
        return tuple(torch.zeros_like(t) for t in leaves)
    # of a factor that requires a gradient every gradient is a function, unless it was computed out of autograd's sight
    one = torch.ones_like(f, requires_grad=create_graph)
    found = torch.autograd.grad(f, leaves, one, create_graph=create_graph, allow_unused=True)
    gs = tuple(torch.zeros_like(t) if d is None else d for t, d in zip(leaves, found, strict=True))
    if create_graph and (any(not g.requires_grad and g.any() for g in gs) or _ends_in_error(gs)):
        raise NotImplementedError(ONCE)
    return gs


def _ends_in_error(gs: Points) -> bool:
    """Whether a ``once_differentiable`` function took part: the node that it leaves behind is not on the way to x, so
    that autograd would pass it by in silence."""
    left = [g.grad_fn for g in gs if g.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if node.name().endswith("::Error"):
            return True
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        left += new
    return False
