"""torch.optim for parameters that live on manifolds."""

from manopt_torch._version import __version__

__all__ = ["__version__"]
