"""Manifolds: immutable values with batched geometry, one file each; :mod:`.base` is the protocol."""

from manopt_torch.manifolds.base import Manifold
from manopt_torch.manifolds.blocks import Blocks
from manopt_torch.manifolds.euclidean import Euclidean
from manopt_torch.manifolds.product import Product
from manopt_torch.manifolds.spd import SPD
from manopt_torch.manifolds.sphere import Sphere
from manopt_torch.manifolds.stiefel import Stiefel
from manopt_torch.manifolds.unitary import Unitary
from manopt_torch.manifolds.view import View, view_for

__all__ = ["SPD", "Blocks", "Euclidean", "Manifold", "Product", "Sphere", "Stiefel", "Unitary", "View", "view_for"]
