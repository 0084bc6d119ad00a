"""The feed-forward truncated Gaussian graphical model."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

from manopt_torch import special
from manopt_torch.distributions import TruncatedNormal
from manopt_torch.nn.trug import SIGMA2, TruG

#: of the mean-field equations, in E h beside σ + |E h|
TOLERANCE = 1e-10
#: Newton steps: 3 to 7 for weights around 1, 200 for weights of 30; coordinate updates need many more sweeps
MAX_STEPS = 500
#: a step is taken unless the bound falls by more than this part of 1 + |bound|, which rounding errors do not reach
SLACK = 1e-11


class TruGTGGM(nn.Module):
    """Regression or classification by one hidden layer of truncated Gaussian units (Su, Liao and Carin, 2017, 3.3).

    ::

        h_j | x ~ N(μ_j, σ²) on [ξ₁, ξ₂],  μ = W0 x + b0;    y | h ~ N(W1 h + b1, σ² I)
        E[y | x] = W1 E[h | x] + b1

    so that prediction is that of ``Sequential(Linear, TruG, Linear)``, and with [0, ∞) of a soft ReLU network. Learning
    is not: ln p(y | x) takes an expectation over h given x *and* y, of which :meth:`elbo` is a lower bound, by the best
    q(h) = Π_j q_j(h_j)::

        L = E_q ln p(y | h) − KL(q ‖ p(h | x))
        q_j = N(m_j, v_j) on [ξ₁, ξ₂],    v_j = σ²/(1 + |w_j|²),    w_j column j of W1
        m_j = v_j/σ² (μ_j + w_jᵀ (y − b1 − Σ_{k≠j} w_k E_q h_k))

    −L is strictly convex in the means E_q h: the equations have one solution, whatever the start. There the gradient of
    L is that of its terms with q held fixed, and ``backward()`` finds it in closed form, for any optimizer::

        ∂L/∂W1 = ((y − b1) E_q hᵀ − W1 E_q hhᵀ)/σ²       ∂L/∂b1 = (y − b1 − W1 E_q h)/σ²
        ∂L/∂W0 = (E_q h − E[h|x]) xᵀ/σ²                  ∂L/∂b0 = (E_q h − E[h|x])/σ²
        ∂L/∂ξ₁ = −(q(h=ξ₁) − p(h=ξ₁|x))                  ∂L/∂ξ₂ = q(h=ξ₂) − p(h=ξ₂|x)

    ``likelihood="categorical"`` is an extension of ours: y is a class, p(y = c | h) = softmax(W1 h + b1)_c. The second
    derivatives of ln Σ exp are at most ½ (Böhning, 1992, which has them less (1/2D) 11ᵀ besides), so that with
    a = W1 E_q h + b1 ::

        ln p(y = c | x) ≥ L = a_c − ln Σ_c' exp a_c' − ¼ Σ_j |w_j|² Var_q h_j − KL(q ‖ p(h | x))
        1/v_j = 1/σ² + |w_j|²/2,    m_j = v_j (μ_j/σ² + w_jᵀ (onehot(c) − softmax(a)) + ½ |w_j|² E_q h_j)

    with the same convexity. σ² is then that of h alone, and :meth:`forward` gives the logits W1 E[h | x] + b1; their
    softmax approximates p(y | x), it is not its expectation.

    The truncation points are learned as in :class:`manopt_torch.nn.TruG`, which is the submodule ``units``. The
    original model (Su, Liao, Chen and Carin, 2016) is ``lower=0, upper=inf, learn=None``.

    >>> model = TruGTGGM(10, 50, upper=4.0)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    >>> loss = -model.elbo(torch.randn(100, 10), torch.randn(100, 1)).mean()
    >>> loss.backward()
    >>> optimizer.step()

    Parameters: ``W0`` (num_hidden, num_inputs), ``b0`` (num_hidden,), ``W1`` (num_outputs, num_hidden), ``b1``
    (num_outputs,) and those of ``units``; :attr:`sigma2`, :attr:`xi1` and :attr:`xi2` are what they stand for.

    Args:
        num_inputs, num_hidden, num_outputs: sizes of x, h and y; of classes, their number.
        sigma2: σ², fixed; of both layers, so that y should be scaled to variance 1.
        lower, upper: ξ₁ and ξ₂, numbers or tensors (num_hidden,); if learned, what they are at first.
        learn: one pair of truncation points for each "unit", one pair "shared" by all, or None: fixed.
        likelihood: what y is, "gaussian" or "categorical".
        dtype, device: of all parameters. Expectations are computed in float64 whatever it is.

    Shape: x is ``(..., num_inputs)``, y ``(..., num_outputs)``, or of integers ``(...)`` if categorical.

    Raises:
        ValueError: for sizes below 1 (2 classes), and what :class:`~manopt_torch.nn.TruG` refuses; in use for x or y
            of another shape, not finite, or no class.
        TypeError: for x or y of another kind of dtype.
    """

    def __init__(
        self,
        num_inputs: int,
        num_hidden: int,
        num_outputs: int = 1,
        *,
        sigma2: float = SIGMA2,
        lower: Tensor | float = 0.0,
        upper: Tensor | float = math.inf,
        learn: Literal["unit", "shared"] | None = "unit",
        likelihood: Literal["gaussian", "categorical"] = "gaussian",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if likelihood not in ("gaussian", "categorical"):
            raise ValueError(f'likelihood must be "gaussian" or "categorical", got {likelihood!r}')
        least = 2 if likelihood == "categorical" else 1
        if num_inputs < 1 or num_hidden < 1 or num_outputs < least:
            raise ValueError(
                f"num_inputs, num_hidden and num_outputs must be at least 1, 1 and {least}, got {num_inputs}, "
                f"{num_hidden} and {num_outputs}"
            )
        self.num_inputs, self.num_hidden, self.num_outputs = num_inputs, num_hidden, num_outputs
        self.likelihood = likelihood
        self.W0 = nn.Parameter(torch.empty(num_hidden, num_inputs, dtype=dtype, device=device))
        self.b0 = nn.Parameter(torch.empty(num_hidden, dtype=dtype, device=device))
        self.W1 = nn.Parameter(torch.empty(num_outputs, num_hidden, dtype=dtype, device=device))
        self.b1 = nn.Parameter(torch.empty(num_outputs, dtype=dtype, device=device))
        self.units = TruG(num_hidden, sigma2, lower=lower, upper=upper, learn=learn, dtype=dtype, device=device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights and biases uniform as in :class:`torch.nn.Linear`, ξ where it began."""
        for weight, bias in ((self.W0, self.b0), (self.W1, self.b1)):
            bound = 1 / math.sqrt(weight.shape[1])
            weight.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        self.units.reset_parameters()

    @property
    def sigma2(self) -> float:
        """σ²."""
        return self.units.sigma2

    @property
    def xi1(self) -> Tensor:
        """ξ₁, ``(num_hidden,)`` or ``()``."""
        return self.units.xi1

    @property
    def xi2(self) -> Tensor:
        """ξ₂, ``(num_hidden,)`` or ``()``."""
        return self.units.xi2

    def _inputs(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"TruGTGGM takes real floating point x, got {x.dtype}: pass x.to({self.W0.dtype})")
        if x.shape[-1:] != (self.num_inputs,):
            raise ValueError(f"TruGTGGM needs x of shape (..., {self.num_inputs}), got {tuple(x.shape)}")
        return x.to(self.W0.dtype)

    def _targets(self, x: Tensor, y: Tensor) -> Tensor:
        """y, or the unit vector of its class, as rows (N, num_outputs)."""
        categorical = self.likelihood == "categorical"
        if y.is_complex() or y.dtype == torch.bool or y.is_floating_point() == categorical:
            kind = "integer" if categorical else "real floating point"
            raise TypeError(f"{self.likelihood} likelihood takes y of {kind} dtype, got {y.dtype}")
        shape = x.shape[:-1] if categorical else (*x.shape[:-1], self.num_outputs)
        if y.shape != shape:
            raise ValueError(f"x of shape {tuple(x.shape)} needs y of shape {tuple(shape)}, got {tuple(y.shape)}")
        if not x.isfinite().all() or not y.isfinite().all():
            raise ValueError("x and y must be finite: leave out the rows that are not")
        if not categorical:
            return y.reshape(-1, self.num_outputs).double()
        if not ((y >= 0) & (y < self.num_outputs)).all():
            raise ValueError(f"classes are 0 to {self.num_outputs - 1}, got {y.min()} to {y.max()}")
        return one_hot(y.reshape(-1).long(), self.num_outputs).double()

    def hidden(self, x: Tensor) -> TruncatedNormal:
        """p(h | x), a distribution of batch shape ``(..., num_hidden)``."""
        loc = linear(self._inputs(x), self.W0, self.b0)
        return TruncatedNormal(loc, math.sqrt(self.sigma2), self.xi1, self.xi2, validate_args=False)

    def forward(self, x: Tensor) -> Tensor:
        """E[y | x], ``(..., num_outputs)``, or logits: what ``Sequential(Linear, TruG, Linear)`` gives."""
        return linear(self.units(linear(self._inputs(x), self.W0, self.b0)), self.W1, self.b1)

    def _layers(self, x: Tensor, y: Tensor) -> _Layers:
        """Everything in float64, x and y as rows."""
        mu = linear(x.reshape(-1, self.num_inputs).double(), self.W0.double(), self.b0.double())
        d = mu.new_tensor(1 / self.sigma2)
        low, high = (end.expand(self.num_hidden) for end in self.units.truncation_points())
        categorical = self.likelihood == "categorical"
        prior = special.moments(mu, math.sqrt(self.sigma2), low, high)
        return _Layers(mu, d, prior, self.W1.double(), self.b1.double(), low, high, self._targets(x, y), categorical)

    def posterior(
        self,
        x: Tensor,
        y: Tensor,
        *,
        method: Literal["newton", "coordinates"] = "newton",
        tolerance: float = TOLERANCE,
        max_steps: int = MAX_STEPS,
    ) -> TruncatedNormal:
        """q(h), the mean-field approximation of p(h | x, y): independent units, batch shape ``(..., num_hidden)``.

        Outside of autograd; all rows at a time, from the means of p(h | x) on, until every equation holds within
        ``tolerance`` (σ + |E_q h_j|) in E_q h_j. Both methods raise L with every step, and end at the same q:

        * "coordinates": one unit after the other, in sweeps (Su, Liao and Carin, 2017); many if |w_j|² is large.
        * "newton": all units at once by Newton's method, with steps shortened for the rows whose L falls. W1 has rank
          num_outputs, so that each of them needs one linear system of that size.

        Raises:
            RuntimeError: if that takes more than ``max_steps`` of them, sweeps or Newton steps.
        """
        x = self._inputs(x)
        with torch.no_grad():
            layers = self._layers(x, y)
            precision = layers.precision
            loc = layers.solve(method, tolerance, max_steps).theta / precision
        loc, scale = loc.to(x.dtype), precision.rsqrt().to(x.dtype)
        loc = loc.view(*x.shape[:-1], self.num_hidden)
        return TruncatedNormal(loc, scale, self.xi1.detach(), self.xi2.detach(), validate_args=False)

    def elbo(self, x: Tensor, y: Tensor, *, tolerance: float = TOLERANCE, max_steps: int = MAX_STEPS) -> Tensor:
        """L ≤ ln p(y | x), shape ``(...)``; ``-elbo(x, y).mean()`` is a loss.

        Its gradient, that with q held fixed, is the exact one up to ``tolerance``; it has no second derivatives. See
        :meth:`posterior` for q.
        """
        x = self._inputs(x)
        layers = self._layers(x, y)
        with torch.no_grad():
            q = layers.solve("newton", tolerance, max_steps)
            d = layers.precision
        return layers.bound(q, d).to(x.dtype).view(x.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.num_inputs}, {self.num_hidden}, {self.num_outputs}, likelihood={self.likelihood!r}"


class _Units(NamedTuple):
    """q, all (N, K) but the last."""

    theta: Tensor  #: m/v
    mean: Tensor
    variance: Tensor
    density_low: Tensor
    density_high: Tensor
    log: Tensor  #: ln ∫ exp(θ h − h²/(2v)) dh
    value: Tensor  #: the part of L that depends on q (N,)


class _Layers(NamedTuple):
    """N problems of mean field for K units and D outputs, all float64."""

    mu: Tensor  #: (N, K)
    d: Tensor  #: 1/σ² ()
    prior: special.Moments  #: of h given x, (N, K) each
    W: Tensor  #: (D, K)
    b: Tensor  #: (D,)
    low: Tensor  #: (K,)
    high: Tensor  #: (K,)
    y: Tensor  #: (N, D)
    categorical: bool

    @property
    def weight(self) -> Tensor:
        """κ |w_j|², (K,), where κ I bounds the second derivatives of −ln p(y | h) with respect to W1 h + b1."""
        return self.W.square().sum(0) * (0.5 if self.categorical else self.d)

    @property
    def precision(self) -> Tensor:
        """1/v, (K,)."""
        return self.d + self.weight

    def log_likelihood(self, a: Tensor) -> Tensor:
        """ln p(y | a), (N,), a = W1 h + b1."""
        if self.categorical:
            return (self.y * a).sum(-1) - a.logsumexp(-1)
        return 0.5 * (self.d.log() - math.log(2 * math.pi) - self.d * (self.y - a).square()).sum(-1)

    def slope(self, a: Tensor) -> Tensor:
        """∂ ln p(y | a)/∂a, (N, D)."""
        return self.y - a.softmax(-1) if self.categorical else self.d * (self.y - a)

    def curvature(self, a: Tensor) -> Tensor:
        """Minus the second derivatives, (N, D, D) or (D, D)."""
        if self.categorical:
            p = a.softmax(-1)
            return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        return self.d * torch.eye(len(self.b), dtype=a.dtype, device=a.device)

    def bound(self, q: _Units, precision: Tensor) -> Tensor:
        """L, (N,), differentiable in everything but q and its ``precision``."""

        def end(x: Tensor, density: Tensor) -> Tensor:  # zero, whose derivative is the density
            return torch.where(x.isinf(), 0.0, x - x.detach()) * density

        square = q.variance + q.mean.square()
        log = self.prior.log_partition + 0.5 * (self.d * self.mu.square() + math.log(2 * math.pi) - self.d.log())
        ratio = (self.d * self.mu - q.theta) * q.mean + 0.5 * (precision - self.d) * square + q.log - log
        ratio = ratio + end(self.high, q.density_high) - end(self.low, q.density_low)
        spread = (self.weight * q.variance).sum(-1)
        return self.log_likelihood(q.mean @ self.W.mH + self.b) - 0.5 * spread + ratio.sum(-1)

    def units(self, theta: Tensor) -> _Units:
        """q of these θ."""
        precision = self.precision
        loc = theta / precision
        found = special.moments(loc, precision.rsqrt(), self.low, self.high)
        mean = found.mean
        log = found.log_partition + 0.5 * (theta * loc + math.log(2 * math.pi) - precision.log())
        terms = (self.d * self.mu - theta + 0.5 * self.weight * mean) * mean + log
        value = self.log_likelihood(mean @ self.W.mH + self.b) + terms.sum(-1)
        return _Units(theta, mean, found.variance, found.density_low, found.density_high, log, value)

    def solve(self, method: str, tolerance: float, max_steps: int) -> _Units:
        """The q that makes L largest."""
        if method not in ("newton", "coordinates"):
            raise ValueError(f'method must be "newton" or "coordinates", got {method!r}')
        if not tolerance > 0 or max_steps < 1:
            raise ValueError(f"tolerance must be positive, max_steps at least 1, got {tolerance} and {max_steps}")
        q, change = (self._coordinates if method == "coordinates" else self._newton)(tolerance, max_steps)
        missed = ~(change <= tolerance).all(-1)
        if missed.any():
            raise RuntimeError(
                f"the mean-field equations of {int(missed.sum())} of {len(missed)} rows do not hold within "
                f"{tolerance:g} after {max_steps} steps, but within {change.max():.1e}: raise max_steps or tolerance, "
                "or look for parameters that are not finite"
            )
        return q

    def _coordinates(self, tolerance: float, max_steps: int) -> tuple[_Units, Tensor]:
        sigma, weight, precision, alpha = self.d.rsqrt(), self.weight, self.precision, self.d * self.mu
        mean = self.prior.mean.clone()
        theta, change = torch.empty_like(mean), mean
        for _ in range(max_steps):
            before, a = mean.clone(), mean @ self.W.mH + self.b
            for j in range(mean.shape[1]):
                theta[:, j] = alpha[:, j] + self.slope(a) @ self.W[:, j] + weight[j] * mean[:, j]
                found = special.mean(theta[:, j] / precision[j], precision[j].rsqrt(), self.low[j], self.high[j])
                a += (found - mean[:, j])[:, None] * self.W[:, j]
                mean[:, j] = found
            change = (mean - before).abs() / (sigma + mean.abs())
            if not (change > tolerance).any():  # NaN stays NaN
                break
        return self.units(theta), change

    def _newton(self, tolerance: float, max_steps: int) -> tuple[_Units, Tensor]:
        sigma, weight, precision, alpha = self.d.rsqrt(), self.weight, self.precision, self.d * self.mu
        mean, variance = self.prior.mean, self.prior.variance
        # a factor exp(−½ weight (h − E h)²) hardly moves the mean; the value lets the first step through
        variance = variance / (1 + weight * variance)
        q = _Units(alpha + weight * mean, mean, variance, mean, mean, mean, mean[:, 0] - math.inf)
        eye = torch.eye(len(self.b), dtype=mean.dtype, device=mean.device)
        length = torch.ones_like(mean[:, :1])
        for step in range(max_steps + 1):
            a = q.mean @ self.W.mH + self.b
            fault = q.theta - alpha - self.slope(a) @ self.W - weight * q.mean
            change = (q.variance * fault).abs() / (sigma + q.mean.abs())  # variance = ∂ mean/∂θ
            if step == max_steps or (step and not (change > tolerance).any()):
                break
            # (A + Wᵀ C W V) s = fault, A = 1 − κ|w|² V
            A = torch.maximum(1 - weight * q.variance, self.d / precision)
            gain, C = q.variance / A, self.curvature(a)
            inner = torch.linalg.solve(
                eye + C @ ((self.W * gain[:, None]) @ self.W.mH), C @ ((gain * fault) @ self.W.mH)[..., None]
            )
            new = self.units(q.theta - length * (fault - inner.squeeze(-1) @ self.W) / A)
            better = new.value >= q.value - SLACK * (1 + q.value.abs())
            length = torch.where(better[:, None], 1.0, length / 4)
            q = _Units(*(torch.where(better.view(-1, *[1] * (n.dim() - 1)), n, o) for n, o in zip(new, q, strict=True)))
        return q, change
