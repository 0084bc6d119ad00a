"""torch.optim for parameters that live on manifolds."""

from manopt_torch._version import __version__
from manopt_torch.manifolds import SPD, Blocks, Euclidean, Manifold, Sphere, Stiefel, Unitary, View, view_for
from manopt_torch.parameter import (
    ManifoldParameter,
    assert_on_manifold,
    constrain,
    max_residual,
    named_manifolds,
    param_groups,
    release,
    report,
)
from manopt_torch.parametrize import parametrize, rebase

__all__ = [
    "SPD",
    "Blocks",
    "Euclidean",
    "Manifold",
    "ManifoldParameter",
    "Sphere",
    "Stiefel",
    "Unitary",
    "View",
    "__version__",
    "assert_on_manifold",
    "constrain",
    "max_residual",
    "named_manifolds",
    "param_groups",
    "parametrize",
    "rebase",
    "release",
    "report",
    "view_for",
]
