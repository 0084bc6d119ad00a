"""A cost on a manifold, with its derivatives, and a count of what was asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manopt_torch.manifolds.product import Points, Product

Cost = Callable[..., Tensor]


def combine(*terms: tuple[float, Points]) -> Points:
    """Σ aᵢ uᵢ of tuples of tensors: ``combine((1.0, u), (-a, v))``."""
    (a, first), *others = terms
    total = list(first) if a == 1 and others else [a * t for t in first]
    for b, u in others:
        total = [torch.add(s, t, alpha=b) for s, t in zip(total, u, strict=True)]
    return tuple(total)


def stack(*us: Points) -> Points:
    """Tangent tuples as one, each member a stack (k, *B, *S)."""
    return tuple(torch.stack(own) for own in zip(*us, strict=True))


class Problem:
    """min f(x₁, …, x_k) over a :class:`Product`; counts evaluations as SciPy does.

    ``cost(x₁, …, x_k)`` returns a real tensor of one element. ``nfev``, ``njev`` and ``nhev`` count values, gradients
    and Hessian-vector products; a gradient comes with the value, and counts as one of each.
    """

    def __init__(self, cost: Cost, manifold: Product) -> None:
        self.manifold = manifold
        self.nfev = self.njev = self.nhev = 0
        #: whether autograd has seen a cost that depends on x
        self.differentiable = False
        self._cost = cost

    def evaluate(self, *x: Tensor) -> Tensor:
        """f(x) as a tensor, not counted."""
        f = self._cost(*x)
        if not isinstance(f, Tensor) or f.numel() != 1 or not f.is_floating_point():
            got = f"a tensor of shape {tuple(f.shape)}, {f.dtype}" if isinstance(f, Tensor) else repr(f)
            raise TypeError(f"the cost must return one real number as a floating point tensor, got {got}")
        self.differentiable |= f.requires_grad
        return f.reshape(())

    @torch.no_grad()
    def value(self, x: Points) -> float:
        """f(x)."""
        self.nfev += 1
        return self.evaluate(*x).item()

    def tape(self, x: Points) -> tuple[float, Callable[[], Points]]:
        """f(x), and a function that returns the Riemannian gradient, for who looks at the cost first."""
        self.nfev += 1
        leaves = [t.detach().requires_grad_() for t in x]
        with torch.enable_grad():
            f = self.evaluate(*leaves)

        def pull() -> Points:
            self.njev += 1
            found = torch.autograd.grad(f, leaves, allow_unused=True) if f.requires_grad else [None] * len(leaves)
            g = tuple(torch.zeros_like(t) if d is None else d for t, d in zip(x, found, strict=True))
            with torch.no_grad():
                return self.manifold.rgrad(x, g)

        return f.item(), pull

    def gradient(self, x: Points) -> tuple[float, Points]:
        """f(x), and the Riemannian gradient, a tuple of tangent vectors at x."""
        f, pull = self.tape(x)
        return f, pull()
