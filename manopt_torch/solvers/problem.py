"""A cost on a manifold, with its derivatives, and a count of what was asked."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, jvp

from manopt_torch.manifolds.product import Points, Product

Cost = Callable[..., Tensor]


def combine(*terms: tuple[float | Tensor, Points]) -> Points:
    """Σ aᵢ uᵢ of tuples of tensors: ``combine((1.0, u), (-a, v))``."""
    scaled = [[a * t for t in u] for a, u in terms]
    return tuple(functools.reduce(operator.add, own) for own in zip(*scaled, strict=True))


def _derivative(f: Tensor, at: Sequence[Tensor]) -> Points:
    """Derivatives of f, zero where it does not depend on the argument."""
    found = torch.autograd.grad(f, at, allow_unused=True) if f.requires_grad else [None] * len(at)
    return tuple(torch.zeros_like(t) if d is None else d for t, d in zip(at, found, strict=True))


class Problem:
    """min f(x₁, …, x_k) over a :class:`Product`; counts evaluations as SciPy does.

    ``cost(x₁, …, x_k)`` returns a real tensor of one element. ``nfev``, ``njev`` and ``nhev`` count values, gradients
    and Hessian-vector products; a gradient comes with the value, and counts as one of each.
    """

    def __init__(self, cost: Cost, manifold: Product) -> None:
        self.manifold = manifold
        self.nfev = self.njev = self.nhev = 0
        self._cost = cost

    def _value(self, *x: Tensor) -> Tensor:
        f = self._cost(*x)
        if not isinstance(f, Tensor) or f.numel() != 1 or f.is_complex():
            got = f"a tensor of shape {tuple(f.shape)}, {f.dtype}" if isinstance(f, Tensor) else repr(f)
            raise TypeError(f"the cost must return one real number as a tensor, got {got}")
        return f.reshape(())

    @torch.no_grad()
    def value(self, x: Points) -> float:
        """f(x)."""
        self.nfev += 1
        return self._value(*x).item()

    def gradient(self, x: Points) -> tuple[float, Points]:
        """f(x), and the Riemannian gradient, a tuple of tangent vectors at x."""
        self.nfev, self.njev = self.nfev + 1, self.njev + 1
        leaves = [t.detach().requires_grad_() for t in x]
        with torch.enable_grad():
            f = self._value(*leaves)
            g = _derivative(f, leaves)
        with torch.no_grad():
            return f.item(), self.manifold.rgrad(x, g)

    def along(self, x: Points, d: Points, t: float) -> tuple[Points, float, Callable[[], tuple[Points, float]]]:
        """``(y, φ(t), derivatives)`` at the point y = R_x(t d) of the curve φ(t) = f(R_x(t d)).

        ``derivatives()``, for who looks at the cost first, returns the Riemannian gradient at y, and φ'(t), which is
        found through the retraction by reverse differentiation: forward mode takes ten times as long.
        """
        self.nfev += 1
        with torch.enable_grad():
            u = [(t * v).requires_grad_() for v in d]
            curve = self.manifold.retract(x, tuple(u))
            f = self._value(*curve)
        y = tuple(v.detach() for v in curve)

        def derivatives() -> tuple[Points, float]:
            self.njev += 1
            found = _derivative(f, [*curve, *u])
            with torch.no_grad():
                products = (
                    (a.conj() * v).real if v.is_complex() else a * v for a, v in zip(found[len(y) :], d, strict=True)
                )
                return self.manifold.rgrad(y, found[: len(y)]), sum(p.sum().item() for p in products)

        return y, f.item(), derivatives

    def hessian(self, x: Points, u: Points) -> Points:
        """H[u], H the second derivative of f∘R_x at 0, a tuple of tangent vectors at x.

        ⟨H[u], v⟩_x = D²(f∘R_x)(0)[u, v]. Of a retraction of second order this is the Riemannian Hessian;
        of any other it is that at critical points.
        """
        self.nhev += 1

        def slope(w: Points) -> Points:
            return grad(lambda w: self._value(*self.manifold.retract(x, w)))(w)

        with torch.no_grad():
            curvature = jvp(slope, (tuple(torch.zeros_like(t) for t in x),), (u,))[1]
            return self.manifold.rgrad(x, curvature)
