"""Manifolds: immutable values with batched geometry. One file each; :mod:`~manopt_torch.manifolds.base` is the protocol."""

from manopt_torch.manifolds.base import Manifold

__all__ = ["Manifold"]
