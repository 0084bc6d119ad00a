"""Layers of SPD networks (Huang, Van Gool, 2017): covariance matrices in, covariance matrices out.

::

    x (B, T, n) -> CovariancePool() -> BiMap(n, m) -> SPDBatchNorm(m) -> ReEig() -> ... -> LogEig(vectorize=True)

All take batches (*B, n, n) of positive definite matrices, real symmetric or complex Hermitian. Derivatives, first and
second, are right where eigenvalues repeat (:mod:`manopt_torch.spectral`). Half precision is computed in float32 and
rounded at the end, and autocast does not reach inside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manopt_torch import linalg, spectral
from manopt_torch.manifolds import SPD, Stiefel
from manopt_torch.means import frechet_mean, geodesic
from manopt_torch.parameter import ManifoldParameter, constrain
from manopt_torch.precision import full_precision, widen

__all__ = ["BiMap", "CovariancePool", "LogEig", "ReEig", "SPDBatchNorm"]

_CONE = SPD()  # made here, since torch.compile does not trace its checks


def _check(layer: nn.Module, x: Tensor, n: int | None = None, like: Tensor | None = None) -> None:
    """Raise unless ``x`` is (*B, n, n), of a floating dtype, that of the parameter ``like``."""
    name, size = type(layer).__name__, "n" if n is None else n
    if x.ndim < 2 or x.shape[-1] != x.shape[-2] or (n is not None and x.shape[-1] != n):
        raise ValueError(f"{name} takes square matrices (*B, {size}, {size}), got shape {tuple(x.shape)}")
    _check_dtype(name, x, like)


def _check_dtype(name: str, x: Tensor, like: Tensor | None = None) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{name} takes real or complex floating point numbers, got {x.dtype}: write x.float()")
    if like is not None and x.dtype != widen(like).dtype:
        raise TypeError(
            f"{name} has {like.dtype} parameters and got {x.dtype}: write x.to({like.dtype}), or "
            f"{name}(..., dtype={x.dtype})"
        )


class BiMap(nn.Module):
    """``Y = W X Wᴴ`` with orthonormal rows of W, ``WWᴴ = I``: the bilinear map of Huang, Van Gool (2017, eq. 3).

    Eigenvalues of Y lie between the least and the largest of X; BiMap of I is I.

    Parameter: ``weight`` W (out, in), on ``Stiefel()`` seen transposed; uniformly distributed to begin with.

    Shapes: (*B, in, in) -> (*B, out, out).

    Args:
        in_features: n.
        out_features: at most n, so that the rank is kept.
        dtype, device: those of W.

    Raises:
        ValueError: sizes; an argument of forward that is not (*B, in, in).
        TypeError: matrices of another dtype than W; half precision counts as float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= out_features <= in_features:
            raise ValueError(
                f"BiMap({in_features}, {out_features}): out_features must be at least 1 and at most in_features; more "
                "would give singular matrices"
            )
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=dtype, device=device))
        constrain(self, "weight", Stiefel(), init="random")

    def reset_parameters(self) -> None:
        """Draw W anew, uniformly."""
        constrain(self, "weight", Stiefel(), init="random")

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        _check(self, x, self.in_features, self.weight)
        w = widen(self.weight)
        return linalg.herm(w @ x @ w.mH)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class ReEig(nn.Module):
    """Eigenvalues are raised to a ``threshold``, ``U max(λ, ε) Uᴴ`` (Huang, Van Gool, 2017, eq. 4).

    Shapes: (*B, n, n) -> (*B, n, n). Where an eigenvalue is at the threshold, its derivative is the one from below.

    Args:
        threshold: ε > 0, in units of the matrices.
    """

    def __init__(self, threshold: float = 1e-4) -> None:
        super().__init__()
        if not threshold > 0:
            raise ValueError(f"threshold must be above 0, so that results are positive definite, got {threshold}")
        self.threshold = threshold

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        _check(self, x)
        floor = self.threshold * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return floor + spectral.relum(x - floor)

    def extra_repr(self) -> str:
        return f"threshold={self.threshold:g}"


class LogEig(nn.Module):
    """``log X``, from the cone to the flat space of Hermitian matrices (Huang, Van Gool, 2017, eq. 5).

    With ``vectorize`` as a vector of the real numbers that a Hermitian matrix has: the diagonal, then √2 times the
    entries above it row by row, and for complex matrices √2 times the imaginary parts of these. So ``⟨v, w⟩ =
    Re tr(log X log Y)``, and distances of vectors are the log-Euclidean ones (Arsigny et al., 2006).

    Shapes: (*B, n, n) -> (*B, n, n), or (*B, n(n + 1)/2), or (*B, n²) of real numbers for complex matrices.
    """

    def __init__(self, vectorize: bool = False) -> None:
        super().__init__()
        self.vectorize = vectorize

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        _check(self, x)
        log = spectral.logm(x)
        if not self.vectorize:
            return log
        row, column = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
        diagonal, above = log.diagonal(dim1=-2, dim2=-1), 2**0.5 * log[..., row, column]
        if log.is_complex():
            return torch.cat([diagonal.real, above.real, above.imag], -1)
        return torch.cat([diagonal, above], -1)

    def extra_repr(self) -> str:
        return f"vectorize={self.vectorize}"


class SPDBatchNorm(nn.Module):
    """Batch normalisation of positive definite matrices (Brooks et al., 2019, algorithm 1), by the Karcher mean M.

    ::

        Yᵢ = B^½ (M^-½ Xᵢ M^-½) B^½

    Congruences are isometries: in training the Karcher mean of the Y is B, and distances between matrices stay. M is
    that of the batch in training, and then ``running_mean`` moves towards it along the geodesic, by the share
    ``momentum``; in evaluation M is ``running_mean``. Matrices in all dimensions in front are one batch.

    Parameter: ``bias`` B (n, n) on ``SPD()``, I to begin with. Buffers: ``running_mean`` (n, n), I to begin with, and
    ``num_batches_tracked``.

    Shapes: (*B, n, n) -> (*B, n, n); in training with at least one matrix.

    Args:
        n: size of the matrices.
        momentum: in [0, 1]; None moves by 1/(number of batches seen), the mean of all batches so far.
        iterations: at most so many of the Karcher mean (:func:`manopt_torch.means.frechet_mean`), from the arithmetic
            mean on; gradients go through them, exact to what they leave. Fewer take less time; the paper takes 1.
        dtype, device: of B and of the buffers.

    Raises:
        ValueError: sizes; an empty batch in training; an argument of forward that is not (*B, n, n).
        TypeError: matrices of another dtype than B; half precision counts as float32.
    """

    running_mean: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        n: int,
        momentum: float | None = 0.1,
        *,
        iterations: int = 12,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if n < 1 or iterations < 1:
            raise ValueError(f"n and iterations must be at least 1, got n={n}, iterations={iterations}")
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], or None for the mean of all batches, got {momentum}")
        self.n, self.momentum, self.iterations = n, momentum, iterations
        eye = torch.eye(n, dtype=dtype, device=device)
        self.bias = ManifoldParameter(eye, _CONE)
        self.register_buffer("running_mean", eye.clone())
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))

    def reset_parameters(self) -> None:
        """Put B and the running mean at I, and forget how many batches there were."""
        with torch.no_grad():
            for t in (self.bias, self.running_mean):
                nn.init.eye_(t)
            self.num_batches_tracked.zero_()

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        _check(self, x, self.n, self.bias)
        bias = widen(self.bias)
        mean = self._batch_mean(x.reshape(-1, self.n, self.n)) if self.training else widen(self.running_mean)
        carry = spectral.sqrtm(bias) @ spectral.inv_sqrtm(mean)
        return linalg.herm(carry @ x @ carry.mH)

    def _batch_mean(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            raise ValueError("SPDBatchNorm in training needs at least one matrix, got an empty batch")
        mean = frechet_mean(_CONE, x, start=x.mean(0), max_iter=self.iterations)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked.to(mean.real.dtype) if self.momentum is None else self.momentum
            self.running_mean.copy_(geodesic(_CONE, widen(self.running_mean), mean, share))
        return mean

    def extra_repr(self) -> str:
        return f"{self.n}, momentum={self.momentum}, iterations={self.iterations}"


class CovariancePool(nn.Module):
    """The covariance of a sequence over time, shrunk towards a multiple of I to be positive definite.

    ::

        C = Σ_t (x_t − x̄)(x_t − x̄)ᴴ / (T − 1),    Y = (1 − s) C + s tr(C)/n I + ε I

    Shapes: (*B, T, n), T ≥ 2 -> (*B, n, n). Exactly Hermitian.

    Args:
        shrinkage: s in [0, 1] (Ledoit, Wolf, 2004).
        epsilon: ε ≥ 0, in the square of the units of x. C has rank T − 1 at most: s or ε must be above 0 where T ≤ n.

    Raises:
        ValueError: options; fewer than two steps.
        TypeError: integers.
    """

    def __init__(self, shrinkage: float = 0.0, epsilon: float = 1e-5) -> None:
        super().__init__()
        if not (0 <= shrinkage <= 1 and epsilon >= 0):
            raise ValueError(
                f"shrinkage must be in [0, 1] and epsilon at least 0, got shrinkage={shrinkage}, epsilon={epsilon}"
            )
        self.shrinkage, self.epsilon = shrinkage, epsilon

    @full_precision
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[-2] < 2:
            raise ValueError(f"CovariancePool takes sequences (*B, T, n) of T >= 2 steps, got shape {tuple(x.shape)}")
        _check_dtype("CovariancePool", x)
        x = x - x.mean(-2, keepdim=True)
        covariance = linalg.herm((x.mH @ x).conj()) / (x.shape[-2] - 1)
        level = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return (1 - self.shrinkage) * covariance + (self.shrinkage * level + self.epsilon) * eye

    def extra_repr(self) -> str:
        return f"shrinkage={self.shrinkage:g}, epsilon={self.epsilon:g}"
