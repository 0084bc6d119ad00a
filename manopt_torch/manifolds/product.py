"""Tuples of points, one on each of several manifolds."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from manopt_torch.manifolds.base import Manifold

Points = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Product:
    """M₁ × … × M_k, whose points and tangent vectors are tuples of k tensors; what :func:`minimize` works on.

    ::

        ⟨u, v⟩_x = Σᵢ wᵢ ⟨uᵢ, vᵢ⟩_xᵢ,    R_x(u) = (R_x₁(u₁), …)

    The methods are those of :class:`Manifold`, on tuples. A factor may hold a batch of points ``(*B, *S)``, which is
    one point of the power manifold: ``inner``, ``norm``, ``dist`` and ``residual`` are single numbers.
    Optimizers have no use for it: give each factor to them as a parameter of its own.

    Args:
        factors: manifolds.
        weights: numbers wᵢ > 0 of the metric, 1 if absent.

    Raises:
        TypeError: for a factor that is not a ``Manifold``.
        ValueError: for no factors, and for weights that are not positive, or not one for each factor.
    """

    factors: tuple[Manifold, ...]
    weights: tuple[float, ...]

    def __init__(self, *factors: Manifold, weights: Sequence[float] | None = None) -> None:
        for M in factors:
            if not isinstance(M, Manifold):
                raise TypeError(f"factors of a Product are manifolds such as Stiefel(), got {M!r}")
        given = (1.0,) * len(factors) if weights is None else tuple(map(float, weights))
        if not factors or len(given) != len(factors) or not all(w > 0 for w in given):
            raise ValueError(f"a Product has at least one factor, and a weight > 0 for each: got {factors} and {given}")
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "weights", given)

    def __repr__(self) -> str:
        weights = f", weights={self.weights}" if any(w != 1 for w in self.weights) else ""
        return f"Product({', '.join(map(repr, self.factors))}{weights})"

    def _each(self, method: str, *tuples: Points) -> Points:
        """``method`` of every factor, on the members of each tuple that are its own."""
        return tuple(getattr(M, method)(*own) for M, *own in zip(self.factors, *tuples, strict=True))

    def project(self, x: Points, v: Points) -> Points:
        """Orthogonal projection on the tangent space, factor by factor."""
        return self._each("project", x, v)

    def retract(self, x: Points, u: Points) -> Points:
        """R_x(u), factor by factor."""
        return self._each("retract", x, u)

    def exp(self, x: Points, u: Points) -> Points:
        """End of the geodesic with velocity ``u``, factor by factor."""
        return self._each("exp", x, u)

    def log(self, x: Points, y: Points) -> Points:
        """The shortest tangent u with exp(x, u) = y, factor by factor."""
        return self._each("log", x, y)

    def nearest(self, z: Points) -> Points:
        """The nearest point, factor by factor."""
        return self._each("nearest", z)

    def rgrad(self, x: Points, g: Points) -> Points:
        """Riemannian gradient of the weighted metric: rgrad(gᵢ) / wᵢ."""
        return tuple(r if w == 1 else r / w for r, w in zip(self._each("rgrad", x, g), self.weights, strict=True))

    def inner(self, x: Points, u: Points, v: Points) -> Tensor:
        """⟨u, v⟩_x, one real number."""
        return self._total(self._each("inner", x, u, v))

    def norm(self, x: Points, u: Points) -> Tensor:
        """‖u‖_x, one number."""
        return self.inner(x, u, u).clamp(min=0).sqrt()

    def dist(self, x: Points, y: Points) -> Tensor:
        """Geodesic distance √(Σᵢ wᵢ dᵢ²), one number."""
        return self._total(tuple(d.square() for d in self._each("dist", x, y))).sqrt()

    def residual(self, x: Points) -> Tensor:
        """The largest distance from a manifold of all points."""
        return torch.stack([r.max() for r in self._each("residual", x)]).max()

    def move(self, x: Points, u: Points, *vs: Points) -> tuple[Points, ...]:
        """``(y, *vs')``: y = R_x(u), and each tangent tuple carried to it."""
        moved = [M.move(*own) for M, *own in zip(self.factors, x, u, *vs, strict=True)]
        return tuple(zip(*moved, strict=True))

    def weingarten(self, x: Points, u: Points, g: Points) -> Points:
        """What the bending of ``retract`` adds to a Hessian, as ambient vectors, factor by factor."""
        return self._each("weingarten", x, u, g)

    def random(
        self,
        *shapes: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Points:
        """A random point of each factor, of the shape given for it."""
        return tuple(
            M.random(*shape, dtype=dtype, device=device, generator=generator)
            for M, shape in zip(self.factors, shapes, strict=True)
        )

    def dim(self, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
        """Real dimension, the sum of those of the factors."""
        return sum(M.dim(*shape, dtype=dtype) for M, shape in zip(self.factors, shapes, strict=True))

    def _total(self, numbers: Points) -> Tensor:
        sums = (t.sum() if t.dim() else t for t in numbers)
        return functools.reduce(operator.add, (t if w == 1 else w * t for t, w in zip(sums, self.weights, strict=True)))
