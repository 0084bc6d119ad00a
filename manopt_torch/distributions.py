"""Probability distributions in the style of ``torch.distributions``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all
from torch.types import _size

from manopt_torch import special

__all__ = ["TruncatedNormal"]


class TruncatedNormal(Distribution):
    """The normal distribution N(loc, scale²) restricted to [low, high] and renormalised.

    ::

        p(h) = exp(−(h − loc)²/(2 scale²)) / (scale √(2π) P)    for low ≤ h ≤ high
        P = Φ((high − loc)/scale) − Φ((low − loc)/scale)

    Either end may be infinite. Everything is computed in float64 and rounded once (``manopt_torch.special``), and stays
    right where the interval is thousands of scales away from ``loc`` or much narrower than ``scale``; all of it is
    differentiable, any number of times, in all parameters, ``rsample`` too (by implicit reparametrization).

    >>> h = TruncatedNormal(torch.tensor([-40.0, 0.5]), 1.0, 0.0, float("inf"))
    >>> h.mean
    tensor([0.0250, 1.0092])

    Args:
        loc, scale: of the normal distribution, scale > 0.
        low, high: ends of the interval, low < high.
        validate_args: check the parameters, and that the values given to :meth:`log_prob` lie in the interval; as in
            all of ``torch.distributions`` this is on by default. Without it their log-density is −inf.

    Raises:
        ValueError: with ``validate_args``, for parameters outside these bounds.
    """

    arg_constraints = {  # noqa: RUF012  # as in the base class
        "loc": constraints.real,
        "scale": constraints.positive,
        "low": constraints.dependent(is_discrete=False, event_dim=0),
        "high": constraints.dependent(is_discrete=False, event_dim=0),
    }
    has_rsample = True

    def __init__(
        self,
        loc: Tensor | float,
        scale: Tensor | float,
        low: Tensor | float,
        high: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.scale, self.low, self.high = broadcast_all(loc, scale, low, high)
        super().__init__(self.loc.shape, validate_args=validate_args)
        if self._validate_args and not (self.low < self.high).all():
            raise ValueError(f"TruncatedNormal needs low < high, got low {self.low} and high {self.high}")

    @property
    def _parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.loc, self.scale, self.low, self.high

    def expand(self, batch_shape: _size, _instance: TruncatedNormal | None = None) -> Distribution:
        new = self._get_checked_instance(TruncatedNormal, _instance)
        new.loc, new.scale, new.low, new.high = (t.expand(batch_shape) for t in self._parameters)
        super(TruncatedNormal, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        """The interval [low, high]."""
        return constraints.interval(self.low, self.high)

    @property
    def log_partition(self) -> Tensor:
        """ln P, the logarithm of the probability of the interval under the untruncated distribution."""
        return special.moments(*self._parameters).log_partition

    @property
    def mean(self) -> Tensor:
        """E h."""
        return special.mean(*self._parameters)

    @property
    def mode(self) -> Tensor:
        """``loc``, or the end of the interval nearest to it."""
        return torch.minimum(torch.maximum(self.loc, self.low), self.high)

    @property
    def variance(self) -> Tensor:
        """E (h − E h)²."""
        return special.moments(*self._parameters).variance

    def entropy(self) -> Tensor:
        """−E ln p(h)."""
        return special.entropy(*self._parameters)

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:  # noqa: B008  # as in the base class
        """Exact samples, ``sample_shape + batch_shape``, differentiable in the parameters."""
        shape = self._extended_shape(torch.Size(sample_shape))
        loc, scale, low, high = (t.expand(shape) for t in self._parameters)
        return special.sample(loc, scale, low, high)

    def log_prob(self, value: Tensor) -> Tensor:
        """ln p(value)."""
        if self._validate_args:
            self._validate_sample(value)
        return special.log_density(value, *self._parameters)

    def cdf(self, value: Tensor) -> Tensor:
        """P(h ≤ value): 0 below the interval and 1 above it."""
        return special.cumulative(value, *self._parameters)

    def icdf(self, value: Tensor) -> Tensor:
        """The x with P(h ≤ x) = value: the ends of the interval at 0 and 1, NaN outside [0, 1]."""
        inside = special.quantile(value, *self._parameters)
        found = torch.where(value <= 0, self.low, torch.where(value >= 1, self.high, inside))
        return torch.where((value >= 0) & (value <= 1), found, torch.nan)
