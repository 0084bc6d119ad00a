"""TruG-RBM: exact values, the integral in the tails, sampling, partition functions, learning, the estimator."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from manopt_torch import special
from manopt_torch.stochastic import TruGRBM, TruGRBMEstimator
from manopt_torch.stochastic.gibbs import Energy, configurations, log_integral

INF = math.inf
REFERENCE = Path(__file__).parents[1] / "reference" / "rbm_exact.json"
CASES = json.loads(REFERENCE.read_text())["cases"]


def doubles(values: list) -> Tensor:
    return torch.tensor(
        [[float(v) for v in row] if isinstance(row, list) else float(row) for row in values], dtype=torch.float64
    )


def of_case(case: dict, learn: str | None = None, lower: object = None, upper: object = None) -> TruGRBM:
    """The model of a case of the reference, with fixed truncation points unless said otherwise."""
    rbm = TruGRBM(
        3,
        2,
        lower=doubles(case["xi1"]) if lower is None else lower,
        upper=doubles(case["xi2"]) if upper is None else upper,
        precision=doubles(case["d"]),
        learn=learn,
        learn_precision=True,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for name in "Wbc":
            getattr(rbm, name).copy_(doubles(case[name]))
    return rbm


def random_rbm(n: int, m: int, scale: float = 0.8, **settings: object) -> TruGRBM:
    """Dense random parameters."""
    rbm = TruGRBM(n, m, dtype=torch.float64, **settings)
    with torch.no_grad():
        for parameter in (rbm.W, rbm.b, rbm.c):
            parameter.normal_(0, scale)
    return rbm


def close(found: Tensor, expected: list | Tensor, tolerance: float = 1e-8) -> None:
    expected = expected if isinstance(expected, Tensor) else doubles(expected)
    torch.testing.assert_close(found.detach(), expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ exact values
@pytest.mark.parametrize("case", CASES)
def test_reference_values(case: dict) -> None:
    rbm, x = of_case(case), doubles(case["states"])
    close(-rbm.free_energy(x), case["log_unnorm"])
    close(rbm.log_partition(), torch.tensor(case["logZ"], dtype=torch.float64))
    close(rbm.log_likelihood(x), case["log_p"])
    hidden = rbm.hidden(x)
    close(rbm(x), case["cond_mean"])
    close(hidden.mean, case["cond_mean"])
    close(hidden.variance, case["cond_var"])
    for end, key in ((rbm.xi1, "cond_p_xi1"), (rbm.xi2, "cond_p_xi2")):
        finite = end.isfinite()
        density = hidden.log_prob(torch.where(finite, end, 0.5)).exp()
        close(torch.where(finite, density, 0.0), case[key])
    p = rbm.log_likelihood(x).exp()
    close(p @ x, case["model_mean_x"])
    close(p @ rbm(x), case["model_mean_h"])
    close(torch.einsum("k,ki,kj->ij", p, x, rbm(x)), case["model_xh"])


@pytest.mark.parametrize("case", CASES)
def test_reference_gradients(case: dict) -> None:
    """Equation (2.4) by autograd, for every parameter; the derivative with respect to ln d is d times that to d."""
    rbm, expected = of_case(case), case["grad"]
    ends = (rbm.units.lower.requires_grad_(), rbm.units.upper.requires_grad_())
    loglik = rbm.log_likelihood(doubles(case["states"])) @ doubles(case["data_weights"])
    close(loglik, torch.tensor(case["avg_loglik"], dtype=torch.float64))
    loglik.backward()
    for name in "Wbc":
        close(getattr(rbm, name).grad, expected[name])
    close(rbm.log_precision.grad / rbm.d, expected["d"])
    close(ends[0].grad, expected["xi1"])
    close(ends[1].grad, expected["xi2"])


@pytest.mark.parametrize(("i", "learn"), [(0, "shared"), (1, "shared"), (2, "shared"), (2, "unit"), (3, "unit")])
def test_reference_gradients_of_learned_points(i: int, learn: str) -> None:
    """ξ₂ = ξ₁ + 10⁻³ + softplus(raw): the first parameter moves both ends; shared points have the sum over units."""
    case, suffix = CASES[i], "_shared" if learn == "shared" else ""
    ends = (float(case[k][0]) if suffix else doubles(case[k]) for k in ("xi1", "xi2"))
    rbm = of_case(case, learn, *ends)
    (rbm.log_likelihood(doubles(case["states"])) @ doubles(case["data_weights"])).backward()
    first, second = (torch.tensor(case["grad"][k + suffix], dtype=torch.float64) for k in ("xi1", "xi2"))
    close(rbm.units.lower.grad, first + second)
    if i != 2:
        close(rbm.units.raw_width.grad, second * torch.sigmoid(rbm.units.raw_width.detach()))


def exact_log_integral(alpha: float, d: float, low: float, high: float) -> mp.mpf:
    """By complementary error functions of positive arguments, at the working precision."""
    if (low + high) / 2 < alpha / d:
        alpha, low, high = -alpha, -high, -low
    scale = mp.sqrt(mp.mpf(d) / 2)
    a, b = ((end - mp.mpf(alpha) / d) * scale for end in (low, high))
    upper = mp.erfc(b) if high < INF else 0
    return mp.log((mp.erfc(a) - upper) * mp.sqrt(mp.pi / (2 * mp.mpf(d)))) + mp.mpf(alpha) ** 2 / (2 * mp.mpf(d))


@pytest.mark.parametrize("alpha", [-1e5, -300.0, -3.0, 0.1, 4.0, 200.0, 1e5])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.25, INF), (-1.0, 1.0), (-2.0, 0.001), (3.0, 3.001)])
def test_log_integral_in_the_tails(alpha: float, low: float, high: float) -> None:
    d = 5.0
    with mp.workdps(60):
        expected = exact_log_integral(alpha, d, low, high)
        step = mp.mpf(10) ** -18

        def slope(i: int) -> float:
            x = [mp.mpf(v) for v in (alpha, d, low, high)]
            moved = [[v + sign * step * (j == i) for j, v in enumerate(x)] for sign in (1, -1)]
            return float((exact_log_integral(*moved[0]) - exact_log_integral(*moved[1])) / (2 * step))

        slopes = [slope(i) if i < 3 or high < INF else 0.0 for i in range(4)]
    x = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (alpha, d, low, high)]
    found = log_integral(*x)
    assert abs(found.item() - float(expected)) < 1e-13 * max(1, abs(float(expected)), abs(alpha * low))
    for t, e in zip(torch.autograd.grad(found, x), slopes, strict=True):
        assert abs(t.item() - e) <= 1e-10 * abs(e) + 1e-13


def test_derivatives_of_the_log_integral() -> None:
    alpha = torch.tensor([-20.0, -1.0, 0.3, 2.0, 30.0], dtype=torch.float64, requires_grad=True)
    d = torch.tensor([0.5, 1.0, 5.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    low = torch.tensor([-1.0, 0.0, 0.1, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    high = torch.tensor([1.0, 0.4, 2.0, 3.0, 1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_integral, (alpha, d, low, high))
    assert torch.autograd.gradgradcheck(log_integral, (alpha, d, low, high))


@pytest.mark.parametrize("units", ["trug", "binary"])
def test_gaussian_visible_units_by_quadrature(units: str) -> None:
    """n = m = 1: ∫ exp(−E) over h, or the sum over h = 0, 1, and the moments of x given h."""
    rbm = random_rbm(
        1, 1, visible="gaussian", visible_precision=1.7, lower=-0.5, upper=1.25, precision=2.5, units=units, learn=None
    )
    W, b, c = (p.item() for p in (rbm.W, rbm.b, rbm.c))
    for x in (-1.3, 0.4, 2.0):

        def boltzmann(h: float, x: float = x) -> float:
            square = 2.5 * h * h / 2 if units == "trug" else 0.0
            return math.exp(x * W * h + b * x + c * h - 1.7 * x * x / 2 - square)

        total = scipy.integrate.quad(boltzmann, -0.5, 1.25)[0] if units == "trug" else boltzmann(0) + boltzmann(1)
        found = rbm.free_energy(torch.tensor([x], dtype=torch.float64))
        assert found.shape == ()
        assert abs(found.item() + math.log(total)) < 1e-12
    given = rbm.visible(torch.tensor([[0.7]], dtype=torch.float64))
    assert abs(given.mean.item() - (W * 0.7 + b) / 1.7) < 1e-14
    assert abs(given.variance.item() - 1 / 1.7) < 1e-14


def test_binary_units_are_scikit_learn_s() -> None:
    from sklearn.neural_network import BernoulliRBM

    rbm = random_rbm(6, 4, units="binary", learn=None)
    theirs = BernoulliRBM(n_components=4)
    theirs.components_, theirs.intercept_visible_, theirs.intercept_hidden_ = (
        t.detach().numpy() for t in (rbm.W.mH, rbm.b, rbm.c)
    )
    x = configurations(torch.arange(64), 6).double()
    close(rbm.free_energy(x), torch.as_tensor(theirs._free_energy(x.numpy())), 1e-12)
    close(rbm(x), torch.as_tensor(theirs.transform(x.numpy())), 1e-12)
    assert [name for name, _ in rbm.named_parameters()] == ["W", "b", "c"]


def test_biases_may_differ_from_row_to_row() -> None:
    rbm = random_rbm(4, 3, upper=2.0)
    b, c = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    whole = rbm.energy._replace(b=b, c=c)
    x = torch.randint(2, (5, 4)).double()
    h = torch.rand(5, 3, dtype=torch.float64)
    for i in range(5):
        one = rbm.energy._replace(b=b[i], c=c[i])
        close(whole.log_partition()[i], one.log_partition(), 1e-13)
        close(whole.free_energy(x)[i], one.free_energy(x[i]), 1e-13)
        close(whole.visible(h).mean[i], one.visible(h[i]).mean, 1e-13)


# ------------------------------------------------------------------ samples
def state_test(rbm: TruGRBM, x: Tensor) -> float:
    """The p-value of x (N, n) as independent samples of the model: a χ² test of all 2ⁿ states."""
    states = configurations(torch.arange(2**rbm.num_visible), rbm.num_visible).double()
    expected = len(x) * rbm.log_likelihood(states).exp().detach()
    numbers = (x.long() << torch.arange(rbm.num_visible)).sum(-1)
    counts = torch.bincount(numbers, minlength=len(states))
    return float(scipy.stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("case", CASES)
def test_gibbs_sampling_against_exact_expectations(case: dict) -> None:
    """20,000 independent chains from x = 0: means within 5 standard errors, states by χ² at 10⁻⁴."""
    rbm, generator = of_case(case), torch.Generator().manual_seed(3)
    x = torch.zeros(20000, 3, dtype=torch.float64)
    assert state_test(rbm, x) < 1e-10
    x = rbm.gibbs(x, 25, generator=generator)
    assert not x.requires_grad
    assert state_test(rbm, x) > 1e-4
    mean = doubles(case["model_mean_x"])
    assert ((x.mean(0) - mean).abs() < 5 * (mean * (1 - mean) / len(x)).sqrt()).all()
    h = rbm.energy.sample_hidden(x, generator)
    assert ((h >= rbm.xi1) & (h <= rbm.xi2)).all()
    for sample, key in ((h, "model_mean_h"), (x[:, :, None] * h[:, None], "model_xh")):
        assert ((sample.mean(0) - doubles(case[key])).abs() < 5 * sample.std(0) / math.sqrt(len(x))).all()


def test_one_gibbs_step_keeps_the_distribution() -> None:
    rbm = random_rbm(4, 3, 0.6, lower=-1.0, upper=1.5)
    states = configurations(torch.arange(16), 4).double()
    start = states[torch.multinomial(rbm.log_likelihood(states).exp().detach(), 40000, replacement=True)]
    after = rbm.gibbs(start, 1)
    assert (after != start).any(-1).double().mean() > 0.2
    assert state_test(rbm, after) > 1e-4


def test_gibbs_sampling_of_gaussian_units() -> None:
    """x is a mixture: with one hidden unit its density is ∫ N(x | W h + b, 1) over h, weighted in closed form."""
    rbm = random_rbm(1, 1, visible="gaussian", upper=1.5, learn=None)
    x = rbm.gibbs(torch.zeros(20000, 1, dtype=torch.float64), 30)

    def density(v: float) -> float:
        return math.exp(-rbm.free_energy(torch.tensor([v], dtype=torch.float64)).item())

    grid = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    weight = (-rbm.free_energy(grid[:, None])).exp().detach()
    table = torch.cumulative_trapezoid(weight, grid)
    cumulative = torch.cat([torch.zeros(1, dtype=torch.float64), table / table[-1]]).numpy()
    assert abs(table[-1].item() - scipy.integrate.quad(density, -12, 12)[0]) < 1e-6
    found = scipy.stats.kstest(x[:, 0].numpy(), lambda v: np.interp(v, grid.numpy(), cumulative))
    assert found.pvalue > 1e-4


def test_samples_depend_on_the_generator_alone() -> None:
    rbm, x = random_rbm(4, 3), torch.randint(2, (7, 4)).double()
    draws = [rbm.gibbs(x, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# ------------------------------------------------------------------ partition functions
@pytest.mark.parametrize(
    "settings",
    [{"upper": 1.0}, {"lower": -1.0, "upper": 1.0}, {}, {"units": "binary"}],
    ids=["sigmoid", "tanh", "relu", "binary"],
)
def test_annealed_importance_sampling_against_enumeration(settings: dict) -> None:
    rbm = random_rbm(12, 6, **settings)
    data = torch.bernoulli(torch.rand(12, dtype=torch.float64).expand(50, 12))
    exact = rbm.log_partition().item()
    for base in (None, data):
        found = rbm.annealed_importance_sampling(200, 100, data=base, generator=torch.Generator().manual_seed(0))
        assert 0 < found.standard_error < 0.05
        assert abs(found.value.item() - exact) < 5 * found.standard_error.item()


def test_annealing_without_weights_is_exact() -> None:
    """W = 0 from its own biases: every weight is Z."""
    rbm = random_rbm(5, 3, upper=2.0)
    rbm.W.data.zero_()
    found = rbm.annealed_importance_sampling(3, 4)
    close(found.value, rbm.log_partition().detach(), 1e-12)
    assert found.standard_error < 1e-12


@pytest.mark.parametrize(("lower", "upper"), [(-1.0, 1.5), (0.0, INF)])
def test_annealed_importance_sampling_of_gaussian_units(lower: float, upper: float) -> None:
    """One hidden unit: Z = ∫ exp(c h − d h²/2) Π √(2π/a_i) exp((W_i h + b_i)²/(2 a_i)) dh."""
    a = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    rbm = random_rbm(3, 1, 0.4, visible="gaussian", visible_precision=a, lower=lower, upper=upper, learn=None)

    def weight(h: float) -> float:
        field = (rbm.W[:, 0] * h + rbm.b).detach()
        log = (field.square() / (2 * a) + 0.5 * torch.log(2 * math.pi / a)).sum().item()
        return math.exp(rbm.c.item() * h - 2.5 * h * h + log)

    exact = math.log(scipy.integrate.quad(weight, lower, min(upper, 12.0))[0])
    found = rbm.annealed_importance_sampling(300, 200)
    assert 0 < found.standard_error < 0.05
    assert abs(found.value.item() - exact) < 5 * found.standard_error.item()
    with pytest.raises(ValueError, match="3 Gaussian ones: use annealed_importance_sampling"):
        rbm.log_partition()


def test_models_without_partition_function_are_refused() -> None:
    """x and h of variance 1 coupled by more than 1: the quadratic form is not positive."""
    settings = {"visible": "gaussian", "precision": 1.0, "learn": None, "dtype": torch.float64}
    for upper, coupling, refused in ((INF, 1.01, True), (INF, 0.99, False), (5.0, 1.01, False)):
        rbm = TruGRBM(2, 2, upper=upper, **settings)
        rbm.W.data.copy_(coupling * torch.eye(2))
        if refused:
            with pytest.raises(ValueError, match="not positive definite"):
                rbm.annealed_importance_sampling(2, 2)
        else:
            assert rbm.annealed_importance_sampling(2, 2).value.isfinite()
    rbm = TruGRBM(2, 2, lower=torch.tensor([0.0, 0.0]), upper=torch.tensor([1.0, INF]), **settings)
    rbm.W.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))  # the strong coupling is that of the bounded unit
    rbm.energy.check_normalizable()


def patterns() -> Tensor:
    """The 14 pictures of bars or stripes, 3 × 3."""
    rows = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)), dtype=torch.float64)
    stripes = rows[:, :, None].expand(8, 3, 3)
    return torch.cat([stripes, stripes.mT]).flatten(1).unique(dim=0)


def test_annealed_importance_sampling_of_a_trained_model() -> None:
    """n = 16, m = 50, trained by CD on digits in 4 × 4 pixels: within 0.05 nat of the sum over 65,536 states."""
    from sklearn.datasets import load_digits

    pixels = torch.as_tensor(load_digits().data).view(-1, 4, 2, 4, 2).mean((2, 4)).flatten(1)
    x = (pixels >= 8).double()
    rbm = TruGRBM(16, 50, upper=1.0, dtype=torch.float64)
    rbm.b.data.copy_(rbm.mean_bias(x))
    with torch.no_grad():
        before = rbm.log_likelihood(x).mean()
    optimizer = torch.optim.Adam(rbm.parameters(), lr=0.02)
    for _ in range(150):
        loss, _ = rbm.contrastive_divergence(x[torch.randint(len(x), (100,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        exact = rbm.log_partition()
        assert rbm.log_likelihood(x, exact).mean() > before + 0.1
    found = rbm.annealed_importance_sampling(300, 100, data=x)
    assert abs(found.value - exact) < 0.05


# ------------------------------------------------------------------ learning
def gradients(rbm: TruGRBM) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in rbm.named_parameters()}


def test_contrastive_divergence_by_formula() -> None:
    """Moments of h in closed form in both phases, at the samples that are returned."""
    rbm = random_rbm(5, 3, lower=-0.3, upper=1.1, learn_precision=True)
    x = torch.randint(2, (40, 5)).double()
    loss, samples = rbm.contrastive_divergence(x, 2)
    loss.backward()
    assert ((samples == 0) | (samples == 1)).all()
    assert not torch.equal(samples, x)
    expected: dict[str, Tensor] = {"W": 0, "b": 0, "c": 0, "log_precision": 0, "low": 0, "high": 0}
    for data, sign in ((x, -1), (samples, 1)):  # descent on −ln p
        d, (low, high) = rbm.d.detach(), (rbm.xi1.detach(), rbm.xi2.detach())
        found = special.moments((data @ rbm.W + rbm.c).detach() / d, d.rsqrt(), low, high)
        square = found.variance + found.mean.square()
        expected["W"] += sign * data.mT @ found.mean / len(x)
        expected["b"] += sign * data.mean(0)
        expected["c"] += sign * found.mean.mean(0)
        expected["log_precision"] += sign * -0.5 * d * square.mean(0)
        expected["low"] += sign * -found.density_low.mean(0)
        expected["high"] += sign * found.density_high.mean(0)
    found = gradients(rbm)
    for name in ("W", "b", "c", "log_precision"):
        close(found[name], expected[name], 1e-12)
    close(found["units.lower"], expected["low"] + expected["high"], 1e-12)
    close(found["units.raw_width"], expected["high"] * torch.sigmoid(rbm.units.raw_width.detach()), 1e-12)


def test_contrastive_divergence_from_the_model_is_the_exact_gradient() -> None:
    """Chains that start as samples of the model give the gradient of the log-likelihood, within 5 standard errors."""
    rbm = random_rbm(4, 3, upper=2.0, learn_precision=True)
    x = torch.randint(2, (30, 4)).double()
    (-rbm.log_likelihood(x).mean()).backward()
    exact = gradients(rbm)
    states = configurations(torch.arange(16), 4).double()
    start = states[torch.multinomial(rbm.log_likelihood(states).exp().detach(), 40000, replacement=True)]
    parts = []
    for chains in start.split(1000):
        rbm.zero_grad()
        rbm.contrastive_divergence(x, chains=chains)[0].backward()
        parts.append(gradients(rbm))
    for name, value in exact.items():
        found = torch.stack([part[name] for part in parts])
        assert ((found.mean(0) - value).abs() < 5 * found.std(0) / math.sqrt(len(parts))).all(), name
        assert (found.std(0) > 0).all(), name


def test_no_step_no_gradient() -> None:
    rbm = random_rbm(4, 3)
    loss, samples = rbm.contrastive_divergence(torch.rand(6, 4), 0)
    loss.backward()
    assert loss == 0
    assert samples.shape == (6, 4)
    assert all(not g.any() for g in gradients(rbm).values())


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["exact", "cd", "pcd"])
def test_learning_raises_the_likelihood(optimizer: str, method: str) -> None:
    """From the independent model, whose mean of ln p is −9 ln 2 = −6.24, towards −ln 14, with everything learned."""
    x = patterns()
    rbm = TruGRBM(9, 8, lower=-1.0, upper=1.0, learn_precision=True, dtype=torch.float64)
    start = {name: p.detach().clone() for name, p in rbm.named_parameters()}
    step, chains = OPTIMIZERS[optimizer](rbm.parameters()), None
    data = x if method == "exact" else x.repeat(5, 1)
    if method == "pcd":
        chains = torch.bernoulli(torch.full((200, 9), 0.5))
    for _ in range(80):
        step.zero_grad()
        if method == "exact":
            loss = -rbm.log_likelihood(data).mean()
        else:
            loss, samples = rbm.contrastive_divergence(data, 3 if method == "cd" else 1, chains=chains)
            chains = samples if method == "pcd" else None
        loss.backward()
        step.step()
    found = rbm.log_likelihood(x).mean().item()
    assert -6.1 < found < -math.log(14)
    assert all((p - start[name]).abs().max() > 1e-3 for name, p in rbm.named_parameters())
    assert (rbm.xi1 < rbm.xi2).all()
    assert (rbm.d > 0).all()


def test_mean_bias_is_that_of_the_data() -> None:
    x = torch.randint(2, (50, 4)).double()
    x[:, 0] = 0
    rbm = random_rbm(4, 2)
    close(torch.sigmoid(rbm.mean_bias(x)), (x.sum(0) + 0.5) / 51, 1e-12)
    y = torch.randn(50, 4, dtype=torch.float64)
    rbm = random_rbm(4, 2, visible="gaussian", visible_precision=3.0)
    independent = rbm.energy._replace(b=rbm.mean_bias(y)).visible(torch.zeros(2, dtype=torch.float64))
    close(independent.mean, y.mean(0), 1e-12)


# ------------------------------------------------------------------ life as a module
def test_single_precision_and_shapes() -> None:
    rbm = random_rbm(4, 3, upper=2.0, learn_precision=True)
    small = copy.deepcopy(rbm).float()
    x = torch.randint(2, (2, 5, 4))
    assert small(x).shape == (2, 5, 3)
    assert small(x).dtype == torch.float32
    assert small.free_energy(x).shape == (2, 5)
    assert small.gibbs(x).dtype == torch.float32
    torch.testing.assert_close(small(x).double(), rbm(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(small.log_likelihood(x).double(), rbm.log_likelihood(x), rtol=1e-5, atol=1e-5)


def test_copies_and_state() -> None:
    rbm = random_rbm(4, 3, lower=-1.0, upper=2.0, learn_precision=True)
    with torch.no_grad():
        for p in rbm.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randint(2, (5, 4)).double()
    other = TruGRBM(4, 3, upper=1.0, learn_precision=True, dtype=torch.float64)
    other.load_state_dict(rbm.state_dict())
    for one in (other, copy.deepcopy(rbm), pickle.loads(pickle.dumps(rbm))):
        assert torch.equal(one.free_energy(x), rbm.free_energy(x))
    other.reset_parameters()
    close(other.xi2, torch.ones(3, dtype=torch.float64), 1e-12)
    close(other.d, torch.full((3,), 5.0, dtype=torch.float64), 1e-12)
    assert "4, 3, visible='binary', units='trug'" in repr(rbm)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"learn": None}, {"W", "b", "c"}),
        ({"learn": "shared"}, {"W", "b", "c", "units.lower"}),
        ({"learn": "unit", "upper": 1.0}, {"W", "b", "c", "units.lower", "units.raw_width"}),
        ({"learn": None, "learn_precision": True}, {"W", "b", "c", "log_precision"}),
    ],
)
def test_what_is_learned(settings: dict, parameters: set[str]) -> None:
    rbm = TruGRBM(4, 3, **settings)
    assert {name for name, _ in rbm.named_parameters()} == parameters
    assert rbm.xi1.shape == ((3,) if settings["learn"] == "unit" else ())


def test_gradients_of_single_rows() -> None:
    rbm = random_rbm(4, 3, upper=1.5, learn_precision=True)
    x = torch.randint(2, (6, 4)).double()
    weights = {name: p.detach() for name, p in rbm.named_parameters()}

    def mean(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(_FreeEnergy(rbm), {f"rbm.{k}": v for k, v in values.items()}, (row,))

    rows = vmap(grad(mean), (None, 0))(weights, x)
    for i in range(6):
        rbm.zero_grad()
        rbm.free_energy(x[i]).backward()
        for name, value in gradients(rbm).items():
            close(rows[name][i], value, 1e-12)


class _FreeEnergy(torch.nn.Module):
    def __init__(self, rbm: TruGRBM) -> None:
        super().__init__()
        self.rbm = rbm

    def forward(self, x: Tensor) -> Tensor:
        return self.rbm.free_energy(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": 0.0}, "precision must be positive, got 0.0"),
        ({"precision": -1.0, "upper": 1.0}, "precision must be positive"),
        ({"precision": INF}, "precision must be positive"),
        ({"precision": torch.ones(4)}, r"of shape \(3,\), got shape \(4,\)"),
        ({"visible_precision": torch.tensor([1.0, -1.0])}, "visible_precision must be positive"),
        ({"visible": "real"}, "visible must be"),
        ({"units": "relu"}, "units must be"),
        ({"learn": "all"}, "learn must be"),
        ({"lower": 1.0, "upper": 1.0}, "lower"),
        ({"num_hidden": 0}, "at least 1, got 2 and 0"),
    ],
)
def test_refused_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TruGRBM(**{"num_visible": 2, "num_hidden": 3, **arguments})


def test_refused_inputs() -> None:
    rbm = TruGRBM(21, 3)
    for method in (rbm, rbm.free_energy, rbm.gibbs, rbm.contrastive_divergence, rbm.log_likelihood, rbm.mean_bias):
        with pytest.raises(ValueError, match=r"needs x of shape \(..., 21\), got \(5, 3\)"):
            method(torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"needs h of shape \(..., 3\), got \(5, 21\)"):
        rbm.visible(torch.zeros(5, 21))
    with pytest.raises(ValueError, match="at most 20 binary visible units, got 21 binary ones"):
        rbm.log_partition()
    assert isinstance(rbm.energy, Energy)


# ------------------------------------------------------------------ the estimator
def rows(repeats: int = 10) -> object:
    return patterns().repeat(repeats, 1).numpy()


def test_estimator_protocol() -> None:
    from sklearn.base import clone

    estimator = TruGRBMEstimator(5, upper=2.0, learn="shared")
    params = estimator.get_params()
    assert params["n_components"] == 5
    assert params["upper"] == 2.0
    assert clone(estimator).get_params() == params
    assert estimator.set_params(lower=-1.0, k=3) is estimator
    assert (estimator.get_params(deep=False)["lower"], estimator.k) == (-1.0, 3)
    with pytest.raises(ValueError, match="has no depth, width; it has n_components, lower"):
        estimator.set_params(width=1, depth=2)
    with pytest.raises(AttributeError, match="not fitted yet"):
        estimator.transform(rows())


def test_fit_learns_and_scores_exactly() -> None:
    X = rows()
    estimator = TruGRBMEstimator(8, lower=-1.0, upper=1.0, k=3, n_iter=80, learning_rate=0.03, random_state=1)
    features = estimator.fit_transform(X)
    rbm = estimator.rbm_
    assert features.shape == (140, 8)
    assert features.dtype == "float32"
    assert torch.equal(torch.as_tensor(features), rbm(torch.as_tensor(X)))
    scores = estimator.score_samples(X)
    close(torch.as_tensor(scores), rbm.log_likelihood(torch.as_tensor(X)), 1e-6)
    assert estimator.score(X) == pytest.approx(scores.mean())
    assert -math.log(14) > estimator.score(X) > -4.5


def test_fit_again() -> None:
    """The seed decides; another fit forgets the first one's ln Z and columns."""
    X = rows()
    estimator = TruGRBMEstimator(3, n_iter=2, random_state=1).fit(X)
    first = estimator.rbm_
    assert estimator.score(X) < 0
    assert torch.equal(TruGRBMEstimator(**estimator.get_params()).fit(X).rbm_.W, first.W)
    assert not torch.equal(TruGRBMEstimator(3, n_iter=2, random_state=2).fit(X).rbm_.W, first.W)
    estimator.fit(X[:, :4])
    assert estimator.rbm_.W.shape == (4, 3)
    states = configurations(torch.arange(16), 4).numpy()
    assert math.fsum(math.exp(s) for s in estimator.score_samples(states)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("persistent", [False, True])
def test_chains_persist_if_asked(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = TruGRBM.contrastive_divergence

    def spy(self: TruGRBM, x: Tensor, k: int, *, chains: Tensor | None, generator: object) -> tuple[Tensor, Tensor]:
        found = original(self, x, k, chains=chains, generator=generator)
        seen.append((chains, found[1]))
        return found

    monkeypatch.setattr(TruGRBM, "contrastive_divergence", spy)
    TruGRBMEstimator(3, persistent=persistent, n_iter=2, batch_size=70).fit(rows())
    assert len(seen) == 4
    for (_, samples), (chains, _) in itertools.pairwise(seen):
        assert chains is (samples if persistent else None)


def test_score_by_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 columns as if they were too many, against their enumeration; a fixed seed always draws the same chains."""
    monkeypatch.setattr("manopt_torch.stochastic.estimator.MOST_ENUMERATED", 8)
    X = rows()
    estimator = TruGRBMEstimator(4, n_iter=10, temperatures=100, chains=100, random_state=0).fit(X)
    exact = estimator.rbm_.log_likelihood(torch.as_tensor(X)).mean().item()
    assert estimator.score(X) == pytest.approx(exact, abs=0.05)
    assert estimator.score(X) != pytest.approx(exact, abs=1e-6)
    assert estimator.score(X) == estimator.fit(X).score(X)


def test_gaussian_scores_are_a_density() -> None:
    X = np.random.default_rng(0).normal([[-2.0], [1.5]], 0.7, (2, 200)).reshape(-1, 1)
    estimator = TruGRBMEstimator(3, lower=-1.0, upper=1.0, visible="gaussian", visible_precision=2.0, random_state=0)
    estimator.fit(X)
    grid = np.linspace(-15, 15, 3001)
    density = np.exp(estimator.score_samples(grid[:, None]))
    assert scipy.integrate.trapezoid(density, grid) == pytest.approx(1, abs=0.02)
    independent = scipy.stats.norm(X.mean(), math.sqrt(0.5)).logpdf(X).mean()
    assert estimator.score(X) > independent + 0.5


def test_grid_search_chooses_the_truncation_points() -> None:
    """Units between −1 and −0.99 can only leave the pixels nearly independent."""
    from sklearn.model_selection import GridSearchCV

    estimator = TruGRBMEstimator(8, lower=-1.0, learn=None, k=3, n_iter=60, learning_rate=0.05, random_state=0)
    search = GridSearchCV(estimator, {"upper": [-0.99, 1.0]}, cv=2).fit(rows())
    assert search.best_params_ == {"upper": 1.0}
    low, high = search.cv_results_["mean_test_score"]
    assert low == pytest.approx(-9 * math.log(2), abs=0.1)
    assert high > low + 0.3
    assert search.best_estimator_.transform(rows(1)).shape == (14, 8)


def test_features_in_a_pipeline() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    X = rows()
    y = X[:, :3].sum(1) > 1
    model = make_pipeline(
        TruGRBMEstimator(12, n_iter=20, learning_rate=0.05, random_state=0), LogisticRegression(C=100)
    )
    assert model.fit(X, y).score(X, y) > 0.8


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([[0.0, 2.0]], r'visible="binary" needs X in \[0, 1\], got 0 to 2'),
        ([[0.0, math.nan]], "not finite"),
        ([0.0, 1.0], r"must be \(samples, features\), got shape \(2,\)"),
        ([[]], r"must be \(samples, features\), got shape \(1, 0\)"),
    ],
)
def test_refused_data(X: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TruGRBMEstimator(2).fit(X)


def test_other_columns_than_fitted_are_refused() -> None:
    estimator = TruGRBMEstimator(2, visible="gaussian", n_iter=1).fit([[1.0, -5.0], [2.0, 3.0]])
    with pytest.raises(ValueError, match=r"\(samples, 2\), got shape \(1, 3\)"):
        estimator.transform([[1.0, 2.0, 3.0]])
