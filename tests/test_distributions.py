"""TruncatedNormal beside SciPy's, mpmath where that is wrong, and the protocol of torch.distributions."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings

import mpmath as mp
import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import Normal, Uniform

from manopt_torch import distributions
from manopt_torch.distributions import TruncatedNormal

INF = math.inf
doubles = functools.partial(torch.tensor, dtype=torch.float64)
#: where SciPy is right
ORDINARY = [
    (0.0, 1.0, -1.0, 1.0),
    (0.3, 2.0, -0.4, 5.0),
    (-1.0, 0.5, 0.0, INF),
    (3.0, 0.7, -INF, 1.5),
    (0.4, 1.3, -INF, INF),
    (-2.0, 1.0, 0.0, 1.0),
]
#: and where the interval is far away or narrow
EXTREME = [(-40.0, 1.0, 0.0, INF), (-1e4, 1.0, 0.0, 0.5), (500.0, 2.0, -3.0, 1.0), (0.5, 1.0, 0.25, 0.25 + 2.0**-30)]


def both(place: tuple[float, ...]) -> tuple[TruncatedNormal, scipy.stats.rv_continuous]:
    z, s, low, high = place
    ours = TruncatedNormal(*doubles(place))
    return ours, scipy.stats.truncnorm((low - z) / s, (high - z) / s, loc=z, scale=s)


@pytest.mark.parametrize("place", ORDINARY)
def test_agrees_with_scipy(place: tuple[float, ...]) -> None:
    ours, theirs = both(place)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    close(ours.mean, theirs.mean())
    close(ours.variance, theirs.var())
    close(ours.stddev, theirs.std())
    if math.isfinite(place[2] + place[3]):  # otherwise SciPy (1.17) has inf · 0
        close(ours.entropy(), theirs.entropy())
    u = doubles([1e-5, 0.2, 0.5, 0.9, 0.99999])
    x = ours.icdf(u)
    close(x, theirs.ppf(u))
    close(ours.cdf(x), theirs.cdf(x))
    close(ours.log_prob(x), theirs.logpdf(x))
    assert ours.icdf(doubles([0.0, 1.0])).tolist() == list(place[2:])
    assert ours.icdf(doubles([-0.1, 1.1])).isnan().all()
    normal = scipy.stats.norm(place[0], place[1])
    close(ours.log_partition.exp(), normal.cdf(place[3]) - normal.cdf(place[2]))


def integrals(place: tuple[float, ...]) -> tuple[float, float, float, float]:
    """Log-partition, mean, variance and entropy by quadrature at 60 digits, relative to the end where the mass is."""
    with mp.workdps(60):
        z, s, low, high = (mp.mpf(v) for v in place)
        anchor, sign = (low, 1) if z < low else (high, -1) if z > high else (low, 1)
        length = min(high - low, 60 * s / max(abs(anchor - z) / s, 1))

        def exponent(t: mp.mpf) -> mp.mpf:
            return -sign * t * (anchor - z) / s**2 - t**2 / (2 * s**2)

        def integral(f: object) -> mp.mpf:
            return mp.quad(lambda t: f(t) * mp.exp(exponent(t)), mp.linspace(0, length, 9))

        mass = integral(lambda t: 1)
        first = integral(lambda t: t) / mass
        variance = integral(lambda t: (t - first) ** 2) / mass
        entropy = mp.log(mass) - integral(exponent) / mass
        log_partition = mp.log(mass) - (anchor - z) ** 2 / (2 * s**2) - mp.log(s * mp.sqrt(2 * mp.pi))
        return tuple(float(v) for v in (log_partition, anchor + sign * first, variance, entropy))


@pytest.mark.parametrize("place", EXTREME)
def test_extreme_places(place: tuple[float, ...]) -> None:
    ours = TruncatedNormal(*doubles(place))
    found = (ours.log_partition, ours.mean, ours.variance, ours.entropy())
    np.testing.assert_allclose(found, integrals(place), rtol=1e-11, atol=0)
    x = ours.icdf(doubles(0.25))
    assert abs(ours.cdf(x) - 0.25) < 1e-8
    assert ours.mode == min(max(place[0], place[2]), place[3])


def test_scipy_is_wrong_there() -> None:
    """The reason for the integrals above; if this fails, SciPy has improved."""
    _, theirs = both(EXTREME[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not abs(theirs.var() / integrals(EXTREME[1])[2] - 1) < 1e-6


def test_limits() -> None:
    z, s = doubles(0.3), doubles(1.7)
    wide, x = TruncatedNormal(z, s, -INF, INF), torch.linspace(-9, 9, 5).double()
    torch.testing.assert_close(wide.log_prob(x), Normal(z, s).log_prob(x), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(wide.entropy(), Normal(z, s).entropy(), rtol=1e-14, atol=0)
    torch.testing.assert_close(wide.cdf(x), Normal(z, s).cdf(x), rtol=1e-12, atol=1e-15)
    flat, uniform = TruncatedNormal(z, 1e7 * s, doubles(-1.0), doubles(2.0)), Uniform(doubles(-1.0), doubles(2.0))
    assert abs(flat.entropy() - uniform.entropy()) < 1e-12
    assert abs(flat.mean - uniform.mean) + abs(flat.variance - uniform.variance) < 1e-12


@pytest.mark.parametrize("place", ORDINARY + EXTREME)
def test_density_integrates_to_one_and_gradients_are_finite(place: tuple[float, ...]) -> None:
    nodes, weights = (doubles(v) for v in np.polynomial.legendre.leggauss(100))
    parameters = [doubles(v).requires_grad_() for v in place]
    ours = TruncatedNormal(*parameters)
    ends = ours.icdf(doubles([1e-14, 1 - 1e-14])).detach()
    x = ends[0] + (ends[1] - ends[0]) * (1 + nodes) / 2
    mass = (ours.log_prob(x).exp() * weights).sum() * (ends[1] - ends[0]) / 2
    assert abs(mass - 1) < 1e-9
    surprise = -ours.log_prob(x) * ours.log_prob(x).exp()
    assert abs((surprise * weights).sum() * (ends[1] - ends[0]) / 2 - ours.entropy()) < 1e-9
    values = (ours.entropy(), ours.log_partition, ours.variance, ours.log_prob(x[7]), ours.cdf(x[9]), ours.rsample())
    for value in values:
        for gradient in torch.autograd.grad(value, parameters, retain_graph=True):
            assert gradient.isfinite()


def test_derivative_of_cdf_is_the_density() -> None:
    for place in ORDINARY + EXTREME:
        ours = TruncatedNormal(*doubles(place))
        x = ours.icdf(doubles([0.05, 0.5, 0.95])).requires_grad_()
        (slope,) = torch.autograd.grad(ours.cdf(x).sum(), x)
        torch.testing.assert_close(slope, ours.log_prob(x).exp(), rtol=1e-6, atol=0)
        u = doubles([0.05, 0.5, 0.95]).requires_grad_()
        (slope,) = torch.autograd.grad(ours.icdf(u).sum(), u)
        torch.testing.assert_close(slope, (-ours.log_prob(ours.icdf(u))).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    ours = TruncatedNormal(torch.zeros(3, 1, dtype=dtype), 1.0, torch.zeros(4, dtype=dtype), INF)
    assert ours.batch_shape == (3, 4)
    assert ours.event_shape == ()
    assert ours.rsample((5,)).shape == ours.sample((5,)).shape == (5, 3, 4)
    assert ours.log_prob(torch.ones(2, 3, 4, dtype=dtype)).shape == (2, 3, 4)
    for value in (ours.mean, ours.variance, ours.stddev, ours.mode, ours.entropy(), ours.log_partition, ours.sample()):
        assert value.shape == (3, 4)
        assert value.dtype == dtype
    wider = ours.expand((2, 3, 4))
    assert wider.batch_shape == (2, 3, 4)
    assert torch.equal(wider.mean[1], ours.mean)
    assert wider.sample((6,)).shape == (6, 2, 3, 4)
    assert not TruncatedNormal(0.0, 1.0, 0.0, 1.0, validate_args=False).expand((2,))._validate_args
    assert ours.support.check(ours.sample((100,))).all()
    assert not ours.support.check(torch.tensor(-0.1)).any()
    assert "TruncatedNormal" in repr(ours)


def test_samples() -> None:
    ours, theirs = both((-1.0, 0.5, 0.0, INF))
    assert scipy.stats.kstest(ours.sample((5000,)).numpy(), theirs.cdf).pvalue > 1e-4
    assert not ours.sample().requires_grad
    torch.manual_seed(3)
    first = ours.rsample((4,))
    torch.manual_seed(3)
    assert torch.equal(ours.sample((4,)), first)


def test_validation() -> None:
    checked = functools.partial(TruncatedNormal, validate_args=True)  # torch.compile turns the default off (2.13)
    for bad in ((0.0, -1.0, 0.0, 1.0), (math.nan, 1.0, 0.0, 1.0)):
        with pytest.raises(ValueError, match="constraint"):
            checked(*bad)
    for low, high in ((1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="low < high"):
            checked(0.0, 1.0, low, high)
    with pytest.raises(ValueError, match="support"):
        checked(0.0, 1.0, 0.0, 1.0).log_prob(torch.tensor(1.5))
    loose = TruncatedNormal(0.0, 1.0, 0.0, 1.0, validate_args=False)
    assert loose.log_prob(torch.tensor([-0.1, 1.5])).tolist() == [-INF, -INF]
    assert checked(0.0, 1.0, 0.0, 1.0).cdf(torch.tensor([-0.1, 1.5])).tolist() == [0.0, 1.0]


def test_copies() -> None:
    ours = TruncatedNormal(torch.zeros(2), 1.0, 0.0, INF)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other.mean, ours.mean)


def test_module_says_what_is_public() -> None:
    assert distributions.__all__ == ["TruncatedNormal"]


def mean_of(x: Tensor) -> Tensor:
    return TruncatedNormal(x, 0.5, 0.0, 1.0, validate_args=False).mean


def test_under_function_transforms() -> None:
    x = torch.randn(4).double()
    torch.testing.assert_close(torch.func.vmap(mean_of)(x), mean_of(x))
    slope = torch.func.vmap(torch.func.grad(mean_of))(x)
    torch.testing.assert_close(slope, TruncatedNormal(x, 0.5, 0.0, 1.0).variance / 0.25)


@pytest.mark.parametrize(
    ("loc", "low", "x"), [(40.0, -1.0, 0.0), (40.0, -1.0, -0.99), (10.0, -30.0, -5.0), (20.0, -1.0, 0.5)]
)
def test_small_probabilities_below_a_point_have_their_digits(loc, low, x):
    with mp.workdps(60):
        cut = [mp.ncdf(mp.mpf(t) - mp.mpf(loc)) for t in (low, x, 1.0)]
        expected = float((cut[1] - cut[0]) / (cut[2] - cut[0]))
    d = TruncatedNormal(torch.tensor(loc, dtype=torch.float64), 1.0, low, 1.0)
    assert d.cdf(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-9)
