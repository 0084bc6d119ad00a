"""Bipartite networks given by their tensors: conditionals, free energy, Gibbs sampling, the partition function.

The joint density of visible units x and hidden units h is exp(−E(x, h))/Z with::

    E(x, h) = ½ Σ a_i x_i² + ½ Σ d_j h_j² − xᵀ W h − bᵀ x − cᵀ h        ξ₁ ≤ h_j ≤ ξ₂

The first term is there for Gaussian x only, the second and the truncation for truncated Gaussian h only. With
α = Wᵀ x + c and β = W h + b the conditionals are independent (Su, Liao and Carin, 2017, section 3.1)::

    h_j | x ~ N(α_j/d_j, 1/d_j) on [ξ₁, ξ₂]    or, binary,    P(h_j = 1 | x) = sigmoid(α_j)
    x_i | h ~ N(β_i/a_i, 1/a_i)                or, binary,    P(x_i = 1 | h) = sigmoid(β_i)

and h is integrated out in closed form: ln p(x) = −F(x) − ln Z, F(x) = ½ Σ a_i x_i² − bᵀ x − Σ ln I_j(α_j).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal
from torch.nn.functional import softplus

from manopt_torch import special
from manopt_torch.distributions import TruncatedNormal

#: most visible units whose 2ⁿ configurations are enumerated, and how many of these are worked on at a time
MOST_ENUMERATED, _CHUNK = 20, 1 << 13
_LOG_2PI = math.log(2 * math.pi)


class _LogIntegral(torch.autograd.Function):
    """ln I and, for its derivatives, E h, E h², and the densities at both ends; float64 arguments of one shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(alpha: Tensor, d: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        z = alpha / d
        found = special.moments(z, d.rsqrt(), low, high)
        # ln I = −E(r) − ln p(r) at the mode r, where neither term is a difference of large ones
        left, right = z < low, z > high
        mode = torch.where(left, low, torch.where(right, high, z))
        end = torch.where(left, found.density_low, torch.where(right, found.density_high, 1.0)).log()
        inside = 0.5 * (_LOG_2PI - d.log()) + found.log_partition
        value = mode * (alpha - 0.5 * d * mode) + torch.where(left | right, -end, inside)
        return value, found.mean, found.variance + found.mean.square(), found.density_low, found.density_high

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (alpha, d, low, high), (mean, square, p1, p2) = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        if torch.is_grad_enabled():  # the derivative is to be differentiated in turn
            found = special.moments(alpha / d, d.rsqrt(), low, high)
            mean, square, p1, p2 = found[1], found[2] + found[1].square(), found[4], found[5]
        row = (mean, -0.5 * square, -p1, p2)
        return tuple(grad * x if need else None for x, need in zip(row, ctx.needs_input_grad, strict=True))


def log_integral(alpha: Tensor, d: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``ln ∫ exp(α h − d h²/2) dh`` over ``low ≤ h ≤ high``, elementwise, d > 0; either end may be infinite.

    That is ln P + ½ ln(2π/d) + α²/(2d), whose first and last term cancel in the tails: here it is taken from the
    density at the mode. Derivatives are E h, −½ E h², minus the density at ``low`` and the density at ``high``; those
    with respect to an infinite end are zero. Computed in float64 and returned in the dtype of ``alpha``.
    """
    wide = torch.broadcast_tensors(*(t.double() for t in (alpha, d, low, high)))
    return _LogIntegral.apply(*wide)[0].to(alpha.dtype)


class Energy(NamedTuple):
    """E(x, h) of the module's text, for n visible and m hidden units.

    ``b`` and ``c`` may have leading dimensions, to have other biases for every x or h. ``d`` None: binary h; ``a``
    None: binary x. Samples are drawn outside of autograd; everything else is differentiable in all tensors.
    """

    W: Tensor  #: (n, m)
    b: Tensor  #: (..., n)
    c: Tensor  #: (..., m)
    d: Tensor | None  #: (m,), positive
    xi1: Tensor  #: (m,) or ()
    xi2: Tensor  #: (m,) or ()
    a: Tensor | None  #: (n,), positive

    def hidden(self, x: Tensor) -> TruncatedNormal | Bernoulli:
        """p(h | x) for x (..., n): a distribution of batch shape (..., m)."""
        alpha = x @ self.W + self.c
        if self.d is None:
            return Bernoulli(logits=alpha, validate_args=False)
        return TruncatedNormal(alpha / self.d, self.d.rsqrt(), self.xi1, self.xi2, validate_args=False)

    def visible(self, h: Tensor) -> Bernoulli | Normal:
        """p(x | h) for h (..., m): a distribution of batch shape (..., n)."""
        field = h @ self.W.mH + self.b
        if self.a is None:
            return Bernoulli(logits=field, validate_args=False)
        return Normal(field / self.a, self.a.rsqrt(), validate_args=False)

    def free_energy(self, x: Tensor) -> Tensor:
        """F(x) = −ln ∫ exp(−E(x, h)) dh, shape (...), for x (..., n)."""
        alpha = x @ self.W + self.c
        log = softplus(alpha) if self.d is None else log_integral(alpha, self.d, self.xi1, self.xi2)
        linear = x * self.b if self.a is None else x * (self.b - 0.5 * self.a * x)
        return -linear.sum(-1) - log.sum(-1)

    @torch.no_grad()
    def sample_hidden(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """h (..., m) from p(h | x), exactly."""
        given = self.hidden(x)
        if isinstance(given, Bernoulli):
            return torch.bernoulli(given.probs, generator=generator)
        return special.sample(given.loc, given.scale, given.low, given.high, generator)

    @torch.no_grad()
    def sample_visible(self, h: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """x (..., n) from p(x | h)."""
        given = self.visible(h)
        if isinstance(given, Bernoulli):
            return torch.bernoulli(given.probs, generator=generator)
        noise = torch.randn(given.loc.shape, dtype=h.dtype, device=h.device, generator=generator)
        return given.loc + given.scale * noise

    def gibbs(self, x: Tensor, steps: int, generator: torch.Generator | None = None) -> Tensor:
        """x (..., n) after so many times h ~ p(h | x), x ~ p(x | h)."""
        for _ in range(steps):
            x = self.sample_visible(self.sample_hidden(x, generator), generator)
        return x

    def log_partition(self) -> Tensor:
        """ln Z, in the leading dimensions of b and c, by the sum over all 2ⁿ binary x; differentiable.

        Raises:
            ValueError: for Gaussian x, or n > 20.
        """
        n = self.W.shape[0]
        if self.a is not None or n > MOST_ENUMERATED:
            raise ValueError(
                f"ln Z is enumerated for at most {MOST_ENUMERATED} binary visible units, got {n} "
                f"{'binary' if self.a is None else 'Gaussian'} ones: use annealed_importance_sampling"
            )
        ones = [1] * max(self.b.dim() - 1, self.c.dim() - 1)
        parts = (configurations(part, n) for part in torch.arange(2**n, device=self.W.device).split(_CHUNK))
        return torch.cat([-self.free_energy(x.view(-1, *ones, n).to(self.W.dtype)) for x in parts]).logsumexp(0)

    @torch.no_grad()
    def annealed_importance_sampling(
        self, temperatures: int, chains: int, base: Tensor, generator: torch.Generator | None = None
    ) -> LogPartition:
        """ln Z by annealing from independent x (Neal, 2001; Salakhutdinov and Murray, 2008), in float64.

        The distributions on the way have β W for W and (1 − β) ``base`` + β b for b, β = 0, 1/K, …, 1; the first
        of them has a known Z. Every chain visits x₀, …, x_{K−1} by one Gibbs step each, and::

            ln w = ln Z₀ + Σ_k F_{k/K}(x_k) − F_{(k+1)/K}(x_k),    Z = E w

        Args:
            temperatures: K.
            chains: independent weights w.
            base: (..., n), the biases of x where W = 0; those of the means of the data are good ones. With the leading
                dimensions of b and c, or fewer.

        Raises:
            ValueError: for a model that may have no Z, see :meth:`check_normalizable`.
        """
        self.check_normalizable()
        wide = Energy._make(None if t is None else t.double() for t in self)
        base, c = base.double(), wide.c
        lead = torch.broadcast_shapes(base.shape[:-1], wide.b.shape[:-1], c.shape[:-1])
        hidden = softplus(c) if wide.d is None else log_integral(c, wide.d, wide.xi1, wide.xi2)
        visible = softplus(base) if wide.a is None else 0.5 * (_LOG_2PI - wide.a.log() + base.square() / wide.a)
        energies = (
            wide._replace(W=beta * wide.W, b=torch.lerp(base, wide.b, beta))
            for beta in torch.linspace(0, 1, temperatures + 1, dtype=torch.float64).tolist()
        )
        now = next(energies)
        x = now.sample_visible(wide.W.new_zeros(chains, *lead, wide.W.shape[1]), generator)
        log_weight = visible.sum(-1) + hidden.sum(-1) + wide.W.new_zeros(chains, *lead)
        for k, following in enumerate(energies, 1):
            log_weight += now.free_energy(x) - following.free_energy(x)
            now, x = following, following.gibbs(x, int(k < temperatures), generator)
        largest = log_weight.amax(0)
        weight = torch.exp(log_weight - largest)
        error = weight.std(0) / (weight.mean(0) * math.sqrt(chains))
        return LogPartition(largest + weight.mean(0).log(), error)

    def check_normalizable(self) -> None:
        """Raise ValueError unless Z is finite for certain.

        It is finite for binary x, and for Gaussian x where all h are bounded. Where some are not, diag(a) − W diag(1/d)
        Wᵀ over these must be positive definite; that is sufficient, and necessary for h without any bound.
        """
        if self.a is None or self.d is None:
            return
        open_ended = (self.xi1.isinf() | self.xi2.isinf()).expand(self.W.shape[1])
        W = (self.W / self.d.sqrt() / self.a.sqrt()[:, None])[:, open_ended].detach().double()
        if W.numel() and torch.linalg.matrix_norm(W, 2) >= 1:
            raise ValueError(
                "diag(a) - W diag(1/d) W^T over the hidden units with an infinite end is not positive definite, "
                "so that the model may have no partition function: bound the units, or raise their precision d"
            )


class LogPartition(NamedTuple):
    """An estimate of ln Z and its standard error, the relative one of Z; both in the leading dimensions of b and c."""

    value: Tensor
    standard_error: Tensor


def configurations(numbers: Tensor, n: int) -> Tensor:
    """The last n binary digits of whole ``numbers`` (k,), as (k, n) zeros and ones."""
    return (numbers[:, None] >> torch.arange(n, device=numbers.device)) & 1


def mean_bias(x: Tensor, a: Tensor | None) -> Tensor:
    """(n,), the biases b of independent units with the means of x (N, n), those of binary units smoothed::

    ln (Σ x + ½)/(N − Σ x + ½)    for binary x,    a times the mean    for Gaussian x
    """
    if a is not None:
        return a * x.mean(0)
    ones = x.sum(0)
    return torch.log((ones + 0.5) / (len(x) - ones + 0.5))
