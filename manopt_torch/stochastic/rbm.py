"""The restricted Boltzmann machine of truncated Gaussian units."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal

from manopt_torch.distributions import TruncatedNormal
from manopt_torch.nn.trug import TruG
from manopt_torch.stochastic.gibbs import Energy, LogPartition, mean_bias

#: √n times the standard deviation of the first W: 0.01 for the 784 pixels of MNIST (Hinton, 2010, section 8)
WEIGHT_SCALE = 0.3
#: 1/σ² of all experiments of the paper
PRECISION = 5.0


class TruGRBM(nn.Module):
    """Restricted Boltzmann machine with truncated Gaussian hidden units (Su, Liao and Carin, 2017, section 3.1).

    ::

        p(x, h) = exp(−E(x, h))/Z,    E(x, h) = ½ hᵀ diag(d) h − xᵀ W h − bᵀ x − cᵀ h,    ξ₁ ≤ h_j ≤ ξ₂
        h_j | x ~ N(α_j/d_j, 1/d_j) on [ξ₁, ξ₂],  α = Wᵀ x + c;    P(x_i = 1 | h) = sigmoid((W h + b)_i)
        ln p(x) = bᵀ x + Σ_j ln I_j(α_j) − ln Z,    I_j(α) = ∫ exp(α h − d_j h²/2) dh over [ξ₁, ξ₂]

    With Gaussian x the energy has ½ xᵀ diag(a) x besides, and x_i | h ~ N((W h + b)_i/a_i, 1/a_i). The truncation
    points make the nonlinearity of E[h | x]: [0, ∞) is a soft ReLU, [0, 1] a sigmoid, [−1, 1] a tanh. They are learned
    as in :class:`manopt_torch.nn.TruG`, which is the submodule ``units`` (its ``sigma2`` has no part here: 1/d has).
    ``units="binary"`` makes the ordinary machine of binary h instead, which has neither d nor ξ.

    Everything but samples is differentiable, and gradients arise by ``backward()``, for any optimizer: of all
    parameters, with E[h | x], E[h² | x] and the densities of h at ξ₁ and ξ₂ in closed form in both phases::

        ∂ ln p(x)/∂W = x E[h|x]ᵀ − E xhᵀ    ∂/∂b = x − E x    ∂/∂c = E[h|x] − E h    ∂/∂d = −½ (E[h²|x] − E h²)
        ∂/∂ξ₁ = −(p(h=ξ₁|x) − p(h=ξ₁))     ∂/∂ξ₂ = p(h=ξ₂|x) − p(h=ξ₂)

    >>> rbm = TruGRBM(784, 500, upper=1.0)
    >>> optimizer = torch.optim.Adam(rbm.parameters(), lr=1e-3)
    >>> loss, _ = rbm.contrastive_divergence(torch.rand(100, 784).round())
    >>> loss.backward()
    >>> optimizer.step()

    Parameters: ``W`` (num_visible, num_hidden), ``b`` (num_visible,), ``c`` (num_hidden,), those of ``units``, and the
    logarithm of d, ``log_precision`` (num_hidden,), a buffer unless ``learn_precision``. :attr:`d`, :attr:`xi1`,
    :attr:`xi2` and :attr:`energy` are what they stand for.

    Args:
        num_visible, num_hidden: n and m.
        lower, upper: ξ₁ and ξ₂, numbers or tensors (num_hidden,); if learned, what they are at first.
        precision: d, a number or tensor (num_hidden,); if learned, what it is at first.
        visible: what x is, "binary" or "gaussian".
        visible_precision: a, a number or tensor (num_visible,), fixed; of Gaussian x only.
        learn: one pair of truncation points for each "unit", one pair "shared" by all, or None: fixed.
        learn_precision: learn d.
        units: what h is, "trug" or "binary".
        dtype, device: of all parameters.

    Shape: x is ``(..., num_visible)``, h ``(..., num_hidden)``.

    Raises:
        ValueError: for sizes below 1, a precision that is not positive, truncation points that
            :class:`~manopt_torch.nn.TruG` refuses; in use for x or h with another last dimension.
    """

    log_precision: Tensor
    visible_precision: Tensor

    def __init__(
        self,
        num_visible: int,
        num_hidden: int,
        *,
        lower: Tensor | float = 0.0,
        upper: Tensor | float = math.inf,
        precision: Tensor | float = PRECISION,
        visible: Literal["binary", "gaussian"] = "binary",
        visible_precision: Tensor | float = 1.0,
        learn: Literal["unit", "shared"] | None = "unit",
        learn_precision: bool = False,
        units: Literal["trug", "binary"] = "trug",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_visible < 1 or num_hidden < 1:
            raise ValueError(f"num_visible and num_hidden must be at least 1, got {num_visible} and {num_hidden}")
        if visible not in ("binary", "gaussian"):
            raise ValueError(f'visible must be "binary" or "gaussian", got {visible!r}')
        if units not in ("trug", "binary"):
            raise ValueError(f'units must be "trug" or "binary", got {units!r}')
        self.num_visible, self.num_hidden, self.visible_kind, self.unit_kind = num_visible, num_hidden, visible, units

        def positive(name: str, value: Tensor | float, size: int) -> Tensor:
            given = torch.as_tensor(value, dtype=torch.float64).detach()
            if given.shape not in ((), (size,)):
                raise ValueError(f"{name} must be a number or of shape ({size},), got shape {tuple(given.shape)}")
            if not ((given > 0) & (given < math.inf)).all():
                raise ValueError(
                    f"{name} must be positive, got {value}: up to an infinite end the density has no integral otherwise"
                )
            return given.expand(size).to(dtype=dtype or torch.get_default_dtype(), device=device, copy=True)

        self.W = nn.Parameter(torch.empty(num_visible, num_hidden, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.empty(num_visible, dtype=dtype, device=device))
        self.c = nn.Parameter(torch.empty(num_hidden, dtype=dtype, device=device))
        learned = units == "trug"
        self.units = TruG(
            num_hidden, lower=lower, upper=upper, learn=learn if learned else None, dtype=dtype, device=device
        )
        log_precision = positive("precision", precision, num_hidden).log()
        if learn_precision and learned:
            self.log_precision = nn.Parameter(log_precision)
        else:
            self.register_buffer("log_precision", log_precision)
        self._start = log_precision.clone()
        self.register_buffer("visible_precision", positive("visible_precision", visible_precision, num_visible))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W ~ N(0, 0.09/num_visible), b = c = 0, ξ and d where they began."""
        self.W.normal_(0, WEIGHT_SCALE / math.sqrt(self.num_visible), generator=generator)
        self.b.zero_()
        self.c.zero_()
        self.log_precision.copy_(self._start)
        self.units.reset_parameters()

    @property
    def d(self) -> Tensor:
        """The precision d of the hidden units before truncation, ``(num_hidden,)``."""
        return self.log_precision.exp()

    @property
    def xi1(self) -> Tensor:
        """ξ₁, ``(num_hidden,)`` or ``()``."""
        return self.units.xi1

    @property
    def xi2(self) -> Tensor:
        """ξ₂, ``(num_hidden,)`` or ``()``."""
        return self.units.xi2

    @property
    def energy(self) -> Energy:
        """E(x, h) by its tensors, as they are now."""
        d = self.d if self.unit_kind == "trug" else None
        a = self.visible_precision if self.visible_kind == "gaussian" else None
        return Energy(self.W, self.b, self.c, d, self.xi1, self.xi2, a)

    def _checked(self, x: Tensor, size: int, name: str) -> Tensor:
        if x.shape[-1:] != (size,):
            raise ValueError(f"TruGRBM needs {name} of shape (..., {size}), got {tuple(x.shape)}")
        return x.to(self.W.dtype)

    def hidden(self, x: Tensor) -> TruncatedNormal | Bernoulli:
        """p(h | x), a distribution of batch shape ``(..., num_hidden)``, with its moments in closed form."""
        return self.energy.hidden(self._checked(x, self.num_visible, "x"))

    def visible(self, h: Tensor) -> Bernoulli | Normal:
        """p(x | h), a distribution of batch shape ``(..., num_visible)``."""
        return self.energy.visible(self._checked(h, self.num_hidden, "h"))

    def forward(self, x: Tensor) -> Tensor:
        """E[h | x], ``(..., num_hidden)``."""
        return self.hidden(x).mean

    def free_energy(self, x: Tensor) -> Tensor:
        """F(x) = −ln ∫ exp(−E(x, h)) dh, shape ``(...)``: ln p(x) = −F(x) − ln Z."""
        return self.energy.free_energy(self._checked(x, self.num_visible, "x"))

    def gibbs(self, x: Tensor, steps: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """x after so many steps h ~ p(h | x), x ~ p(x | h), outside of autograd."""
        return self.energy.gibbs(self._checked(x, self.num_visible, "x"), steps, generator)

    def contrastive_divergence(
        self, x: Tensor, k: int = 1, *, chains: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of CD-k (Hinton, 2002), and the samples of its model phase.

        The loss is the mean of F over the data less that over the samples. Its gradient is the one of −ln p(x), a mean
        over the data, with the expectation under the model replaced by a mean over the samples, and exact given these.
        Its value says nothing.

        Args:
            x: data, (..., num_visible).
            k: Gibbs steps.
            chains: where they start, (..., num_visible); the data if None. Persistent CD (Tieleman, 2008) passes the
                samples of the step before.
            generator: of the samples.
        """
        x = self._checked(x, self.num_visible, "x")
        energy = self.energy
        samples = energy.gibbs(x if chains is None else self._checked(chains, self.num_visible, "chains"), k, generator)
        return energy.free_energy(x).mean() - energy.free_energy(samples).mean(), samples

    def log_partition(self) -> Tensor:
        """ln Z, exactly, by enumeration of x; differentiable.

        Raises:
            ValueError: for Gaussian x, or more than 20 visible units.
        """
        return self.energy.log_partition()

    def log_likelihood(self, x: Tensor, log_partition: Tensor | None = None) -> Tensor:
        """ln p(x), shape ``(...)``, with the given ln Z or the exact one; ``-log_likelihood(x).mean()`` is a loss."""
        return -self.free_energy(x) - (self.log_partition() if log_partition is None else log_partition)

    def annealed_importance_sampling(
        self,
        temperatures: int = 1000,
        chains: int = 100,
        *,
        data: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> LogPartition:
        """An estimate of ln Z with its standard error, from so many ``chains`` through so many ``temperatures``.

        They start at independent units with the means of ``data`` (N, num_visible) if that is given, else with the
        biases b. See :meth:`Energy.annealed_importance_sampling`.

        Raises:
            ValueError: for a model that may have no partition function: Gaussian x with W too large for units that have
                an infinite end.
        """
        base = self.b.detach() if data is None else self.mean_bias(data)
        return self.energy.annealed_importance_sampling(temperatures, chains, base, generator)

    def mean_bias(self, x: Tensor) -> Tensor:
        """The b, (num_visible,), of independent units with the means of data (N, num_visible): a good first b."""
        return mean_bias(self._checked(x, self.num_visible, "x"), self.energy.a)

    def extra_repr(self) -> str:
        return f"{self.num_visible}, {self.num_hidden}, visible={self.visible_kind!r}, units={self.unit_kind!r}"
