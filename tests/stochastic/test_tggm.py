"""TruG-TGGM: exact values, the mean-field equations, the bound and its gradients, both likelihoods, errors."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor, nn

from manopt_torch.nn import TruG
from manopt_torch.stochastic import TruGTGGM, TruGTGGMRegressor

INF = math.inf
CASES = json.loads((Path(__file__).parents[1] / "reference" / "tggm_exact.json").read_text())["cases"]
WEIGHTS = ("W0", "b0", "W1", "b1")
METHODS = ("newton", "coordinates")
BOXES = [(-1.0, 1.0), (0.0, INF), (-INF, 0.5)]


def doubles(values: object) -> Tensor:
    return torch.as_tensor(np.array(values, dtype=float))  # "inf" too


def close(found: Tensor, expected: object, tolerance: float = 1e-8) -> None:
    expected = expected if isinstance(expected, Tensor) else doubles(expected)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=tolerance, atol=tolerance)


def of_case(case: dict) -> TruGTGGM:
    """The model of a case of the reference, both ends leaves of their own."""
    ends = {"lower": doubles(case["xi1"]), "upper": doubles(case["xi2"])}
    model = TruGTGGM(2, 2, 2, sigma2=case["sigma2"], learn=None, dtype=torch.float64, **ends)
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(model, name).copy_(doubles(case[name]))
    model.units.lower.requires_grad_()
    model.units.upper.requires_grad_()
    return model


def gradients(model: TruGTGGM) -> dict[str, Tensor]:
    found = {name: getattr(model, name).grad for name in WEIGHTS}
    return {**found, "xi1": model.units.lower.grad, "xi2": model.units.upper.grad}


def random_model(dx: int, K: int, D: int, scale: float = 0.8, **settings: object) -> TruGTGGM:
    """Dense random parameters."""
    model = TruGTGGM(dx, K, D, dtype=torch.float64, **settings)
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(model, name).normal_(0, scale)
    return model


def data(model: TruGTGGM, *shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape, model.num_inputs, dtype=torch.float64)
    if model.likelihood == "categorical":
        return x, torch.randint(model.num_outputs, shape)
    return x, 2 * torch.randn(*shape, model.num_outputs, dtype=torch.float64)


def log_joint(model: TruGTGGM, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """ln p(y, h | x) for one x, one y and h (..., K), from the definition."""
    a = h @ model.W1.mH + model.b1
    prior = model.hidden(x).log_prob(h).sum(-1)
    if model.likelihood == "categorical":
        return prior + a.log_softmax(-1)[..., y]
    return prior + torch.distributions.Normal(a, math.sqrt(model.sigma2)).log_prob(y).sum(-1)


def quadrature(model: TruGTGGM, count: int = 48) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes (count², 2) and the logarithms of their weights, differentiable in ξ; K = 2."""
    nodes, weights = map(torch.as_tensor, np.polynomial.legendre.leggauss(count))
    low, high = (end.expand(2) for end in (model.xi1, model.xi2))
    high = torch.where(high.isinf(), low + 8, high)
    grid = torch.cartesian_prod(nodes, nodes)
    one = low + (high - low) * (grid + 1) / 2
    return one, torch.cartesian_prod(weights, weights).prod(1).log() + ((high - low) / 2).log().sum()


def log_probability(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """ln(Φ(b) − Φ(a)), from the lower tail."""
    flip = -a < b
    a, b = np.where(flip, -b, a), np.where(flip, -a, b)
    log = scipy.special.log_ndtr(b)
    return log + np.log1p(-np.exp(scipy.special.log_ndtr(a) - log))


def by_definition(model: TruGTGGM, x: Tensor, y: Tensor, loc: Tensor, scale: Tensor) -> float:
    """L of one row for q = Π N(loc, scale²) on the box, with SciPy's moments and MATH's formula, term by term."""
    W, b1, s2, s = model.W1.detach().numpy(), model.b1.detach().numpy(), model.sigma2, math.sqrt(model.sigma2)
    mu = (model.W0 @ x + model.b0).detach().numpy()
    low, high = (np.broadcast_to(e.detach().numpy(), mu.shape) for e in (model.xi1, model.xi2))
    loc, scale = loc.numpy(), np.broadcast_to(scale.numpy(), mu.shape)
    q = scipy.stats.truncnorm((low - loc) / scale, (high - loc) / scale, loc, scale)
    E, V = q.mean(), q.var()
    log_P = log_probability((low - mu) / s, (high - mu) / s)
    log_Q = log_probability((low - loc) / scale, (high - loc) / scale)
    entropy = log_Q + 0.5 * np.log(2 * np.pi * scale**2) + (V + (E - loc) ** 2) / (2 * scale**2)
    divergence = log_P - entropy + 0.5 * np.log(2 * np.pi * s2) + ((E - mu) ** 2 + V) / (2 * s2)
    a, spread = W @ E + b1, ((W**2).sum(0) * V).sum()
    if model.likelihood == "categorical":
        return float(a[y] - np.log(np.exp(a).sum()) - spread / 4 - divergence.sum())
    error = ((y.numpy() - a) ** 2).sum() + spread
    return float(-len(a) / 2 * np.log(2 * np.pi * s2) - error / (2 * s2) - divergence.sum())


# ------------------------------------------------------------------ exact values
@pytest.mark.parametrize("case", CASES)
def test_mean_field_of_the_reference(case: dict) -> None:
    model, x, y = of_case(case), doubles(case["x"]), doubles(case["y"])
    expected = case["mean_field"]
    for method in METHODS:
        q = model.posterior(x, y, method=method)
        close(q.mean, expected["E"], 1e-9)
        close(q.variance, expected["V"], 1e-9)
        close(q.loc, expected["m"], 1e-9)
        close(q.scale.square(), expected["v"], 1e-12)
    bound = model.elbo(x, y)
    close(bound, expected["elbo"], 1e-12)
    assert bound < case["exact"]["logp"]
    bound.backward()
    for name, found in gradients(model).items():
        close(found, expected["grad"][name], 1e-9)
    close(model(x), case["pred_mean"], 1e-12)
    close(model.hidden(x).mean, case["prior_mean"], 1e-12)
    close(model.hidden(x).variance, case["prior_var"], 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_sweeps_of_the_reference(case: dict) -> None:
    """A tolerance between the changes of two sweeps ends the iteration after the second of them."""
    model, x, y = of_case(case), doubles(case["x"]), doubles(case["y"])
    sweeps = [doubles(case["prior_mean"]), *map(doubles, case["mean_field"]["first_sweeps"])]
    changes = [((b - a).abs() / (math.sqrt(case["sigma2"]) + b.abs())).max().item() for a, b in pairwise(sweeps)]
    for sweep, change in zip(sweeps[1:], changes, strict=True):
        q = model.posterior(x, y, method="coordinates", tolerance=change * 1.000001)
        close(q.mean, sweep, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_exact_likelihood_by_quadrature(case: dict) -> None:
    """ln p(y | x) and its gradients from the definition of the model, through what ``hidden`` says of h."""
    model, x, y = of_case(case), doubles(case["x"]), doubles(case["y"])
    h, log_weight = quadrature(model)
    log = (log_joint(model, x, y, h) + log_weight).logsumexp(0)
    close(log, case["exact"]["logp"], 1e-10)
    log.backward()
    for name, found in gradients(model).items():
        close(found, case["exact"]["grad"][name])


# ------------------------------------------------------------------ the layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("learn", ["unit", "shared", None])
def test_prediction_is_that_of_a_sequential(dtype: torch.dtype, learn: str | None) -> None:
    model = TruGTGGM(4, 6, 2, lower=-1.0, upper=2.0, learn=learn, dtype=dtype)
    units = TruG(6, lower=-1.0, upper=2.0, learn=learn, dtype=dtype)
    layers = nn.Sequential(nn.Linear(4, 6, dtype=dtype), units, nn.Linear(6, 2, dtype=dtype))
    for layer, weight, bias in ((layers[0], model.W0, model.b0), (layers[2], model.W1, model.b1)):
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
    x = 3 * torch.randn(5, 7, 4, dtype=dtype)
    assert torch.equal(model(x), layers(x))
    close(model(x[0, 0]), model.W1 @ model.hidden(x[0, 0]).mean + model.b1, 1e-5 if dtype == torch.float32 else 1e-12)


def test_first_weights_are_those_of_linear_layers() -> None:
    torch.manual_seed(3)
    first, second = nn.Linear(50, 40), nn.Linear(40, 30)
    for layer in (first, second):  # another order of the same numbers
        assert layer.weight.abs().max() <= 1 / math.sqrt(layer.in_features)
    model = TruGTGGM(50, 40, 30)
    for mine, theirs in ((model.W0, first), (model.W1, second)):
        bound = 1 / math.sqrt(theirs.in_features)
        assert bound * 0.99 < mine.abs().max() <= bound
        assert abs(mine.std() / theirs.weight.std() - 1) < 0.1
    model.reset_parameters(torch.Generator().manual_seed(1))
    kept = model.W1.clone()
    model.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(kept, model.W1)


# ------------------------------------------------------------------ the bound
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize(("low", "high"), BOXES)
def test_bound_by_its_definition_and_that_no_other_q_has_a_larger_one(likelihood: str, low: float, high: float) -> None:
    torch.manual_seed(0)
    model = random_model(3, 4, 3, lower=low, upper=high, likelihood=likelihood)
    for x, y in zip(*data(model, 3), strict=True):
        q, bound = model.posterior(x, y), model.elbo(x, y).item()
        assert by_definition(model, x, y, q.loc, q.scale) == pytest.approx(bound, abs=1e-9)
        for _ in range(3):
            loc, scale = q.loc + 0.1 * torch.randn(4).double(), q.scale * (0.2 * torch.randn(4).double()).exp()
            assert by_definition(model, x, y, loc, scale) < bound


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, INF)])
def test_bound_is_below_the_likelihood(likelihood: str, low: float, high: float) -> None:
    torch.manual_seed(1)
    for _ in range(5):
        model = random_model(2, 2, 2, 1.0, lower=low, upper=high, likelihood=likelihood)
        x, y = data(model)
        h, log_weight = quadrature(model)
        exact = (log_joint(model, x, y, h) + log_weight).logsumexp(0)
        assert exact - 1 < model.elbo(x, y) < exact


def test_all_classes_have_a_probability_below_one_in_sum() -> None:
    model = random_model(2, 5, 4, likelihood="categorical", upper=1.0)
    x = torch.randn(6, 1, 2).double().expand(6, 4, 2)
    assert (model.elbo(x, torch.arange(4).expand(6, 4)).exp().sum(1) < 1).all()


def test_one_unit_is_exact() -> None:
    """K = 1: q is the posterior, L the likelihood, by Gauss-Legendre quadrature."""
    model = random_model(2, 1, 2, lower=-0.5, upper=1.5)
    x, y = data(model)
    nodes, weights = map(torch.as_tensor, np.polynomial.legendre.leggauss(200))
    h = nodes[:, None] + 0.5
    density = weights * log_joint(model, x, y, h).exp()
    close(model.elbo(x, y), density.sum().log(), 1e-10)
    close(model.posterior(x, y).mean, (density @ h) / density.sum(), 1e-9)


def test_without_truncation_all_is_gaussian() -> None:
    """y ~ N(W1 μ + b1, σ² (I + W1 W1ᵀ)); q has the exact means; the bound lacks ½ (Σ ln Λ_jj − ln det Λ)."""
    model = random_model(3, 4, 2, lower=-INF, upper=INF, learn=None)
    x, y = data(model, 5)
    W, s2 = model.W1.detach(), model.sigma2
    mu = x @ model.W0.mH + model.b0
    covariance = s2 * (torch.eye(2).double() + W @ W.mH)
    log = torch.distributions.MultivariateNormal(mu @ W.mH + model.b1, covariance).log_prob(y)
    precision = (torch.eye(4).double() + W.mH @ W) / s2
    close(model.elbo(x, y), log - 0.5 * (precision.diagonal().log().sum() - precision.logdet()), 1e-10)
    mean = torch.linalg.solve(precision, ((mu + (y - model.b1) @ W) / s2).mH).mH
    close(model.posterior(x, y).mean, mean)


def test_outputs_that_do_not_depend_on_h() -> None:
    model = random_model(3, 4, 2, upper=1.0)
    model.W1.data.zero_()
    x, y = data(model, 5)
    close(model.elbo(x, y), torch.distributions.Normal(model.b1, math.sqrt(0.2)).log_prob(y).sum(1), 1e-12)
    close(model.posterior(x, y).mean, model.hidden(x).mean, 1e-12)
    assert torch.autograd.grad(model.elbo(x, y).sum(), model.W0)[0].abs().max() < 1e-12


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize(("low", "high", "learn"), [(-1.0, 1.0, "unit"), (0.0, INF, "shared"), (-INF, 0.5, "unit")])
def test_gradient_is_the_derivative_of_the_bound(likelihood: str, low: float, high: float, learn: str) -> None:
    """Finite differences of L, in which q moves, of all parameters, of x, and of real y."""
    torch.manual_seed(2)
    model = random_model(2, 3, 2, lower=low, upper=high, learn=learn, likelihood=likelihood)
    x, y = data(model, 2)
    names, values = zip(*Bound(model).named_parameters(), strict=True)
    assert any(".units." in name for name in names)

    def bound(x: Tensor, y: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(Bound(model), dict(zip(names, values, strict=True)), (x, y))

    given = (y.requires_grad_(),) if likelihood == "gaussian" else (y,)
    assert torch.autograd.gradcheck(bound, (x.requires_grad_(), *given, *values), eps=1e-5, atol=1e-7)


class Bound(nn.Module):
    """``elbo`` as the call of a module."""

    def __init__(self, model: TruGTGGM) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.elbo(x, y, tolerance=1e-13)


# ------------------------------------------------------------------ the equations
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize(("low", "high"), BOXES)
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_both_methods_find_one_solution(likelihood: str, low: float, high: float, scale: float) -> None:
    """The equations as they are written, on the result; every q of a looser tolerance has a smaller L."""
    torch.manual_seed(4)
    model = random_model(3, 5, 2, scale, lower=low, upper=high, likelihood=likelihood)
    x, y = data(model, 10)
    q, other = (model.posterior(x, y, method=method, max_steps=20000) for method in METHODS)
    close(q.mean, other.mean, 1e-6)
    W, s2 = model.W1.detach(), model.sigma2
    norms, a = W.square().sum(0), q.mean @ W.mH + model.b1.detach()
    if likelihood == "categorical":
        v = 1 / (1 / s2 + norms / 2)
        slope = nn.functional.one_hot(y, 2) - a.softmax(-1) + 0.0
        expected = v * (model.hidden(x).loc / s2 + slope @ W + norms / 2 * q.mean)
    else:
        v = s2 / (1 + norms)
        expected = v / s2 * (model.hidden(x).loc + (y - a) @ W + norms * q.mean)
    close(q.scale[0].square(), v, 1e-12)
    normal = torch.distributions.Normal(0, 1)  # the mean by the textbook, where that is right
    low_end, high_end = ((end - expected) / v.sqrt() for end in (low, high))
    inside = normal.cdf(high_end) - normal.cdf(low_end)
    density = normal.log_prob(low_end).exp().nan_to_num() - normal.log_prob(high_end).exp().nan_to_num()
    mean = expected + v.sqrt() * density / inside
    usual = (inside > 1e-6) & (inside.abs() < 2)
    assert usual.double().mean() > 0.3
    close(q.mean[usual], mean[usual], 1e-8)
    bounds = []
    for tolerance in (1e-1, 1e-2, 1e-10):
        loose = model.posterior(x[0], y[0], method="coordinates", tolerance=tolerance, max_steps=20000)
        bounds.append(by_definition(model, x[0], y[0], loose.loc, loose.scale))
    assert all(b >= a - 1e-9 for a, b in pairwise(bounds))


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize(("low", "high"), BOXES)
def test_hard_problems(likelihood: str, low: float, high: float) -> None:
    """Weights of 30, inputs that saturate the units, targets far from all predictions: still Newton's method."""
    torch.manual_seed(5)
    model = random_model(4, 30, 3, 30.0, lower=low, upper=high, likelihood=likelihood)
    x, y = data(model, 50)
    if likelihood == "gaussian":
        y = 1000 * y
    bound = model.elbo(x, y, max_steps=100)
    bound.mean().backward()
    assert bound.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_rows_do_not_know_of_each_other() -> None:
    model = random_model(3, 4, 2, upper=1.0)
    x, y = data(model, 2, 3)
    together, q = model.elbo(x, y), model.posterior(x, y)
    assert together.shape == (2, 3)
    assert q.mean.shape == (2, 3, 4)
    for i in range(2):
        for j in range(3):
            close(together[i, j], model.elbo(x[i, j], y[i, j]), 1e-12)
            close(q.mean[i, j], model.posterior(x[i, j], y[i, j]).mean, 1e-9)


def test_single_precision() -> None:
    model = random_model(3, 8, 2, upper=1.0)
    x, y = data(model, 30)
    bound = model.elbo(x, y)
    right = torch.autograd.grad(bound.mean(), list(model.parameters()))
    single = model.float()
    found = single.elbo(x.float(), y.float())
    assert found.dtype == single.posterior(x.float(), y.float()).mean.dtype == torch.float32
    close(found.double(), bound, 1e-5)
    for a, b in zip(torch.autograd.grad(found.mean(), list(single.parameters())), right, strict=True):
        close(a.double(), b, 1e-4)


def test_shared_ends_have_the_sum_of_the_gradients() -> None:
    one = random_model(3, 4, 2, lower=-1.0, upper=1.0)
    other = TruGTGGM(3, 4, 2, lower=-1.0, upper=1.0, learn="shared", dtype=torch.float64)
    for name in WEIGHTS:
        getattr(other, name).data.copy_(getattr(one, name))
    x, y = data(one, 5)
    for model in (one, other):
        model.elbo(x, y).sum().backward()
    for name in ("lower", "raw_width"):
        close(getattr(other.units, name).grad, getattr(one.units, name).grad.sum(), 1e-10)


# ------------------------------------------------------------------ learning
@pytest.mark.parametrize("learn", ["unit", "shared", None])
def test_regression_learns_a_bump(learn: str | None) -> None:
    """y = 2 exp(−x²) − 1, which no line fits: its variance is 0.45."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 40)[:, None]
    y = 2 * torch.exp(-x.square()) - 1
    model = TruGTGGM(1, 10, lower=-1.0, upper=1.0, learn=learn)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = model.elbo(x, y).mean().item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = -model.elbo(x, y, tolerance=1e-6).mean()
        loss.backward()
        optimizer.step()
    assert -loss.item() > first + 0.5
    assert (model(x) - y).square().mean() < 0.05
    moved = (model.xi1 + 1).abs().max() + (model.xi2 - 1).abs().max()
    assert moved == 0 if learn is None else moved > 0.05
    assert (model.xi1 < model.xi2).all()


def test_classification_learns_a_ring() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 2)
    y = (x.norm(dim=1) > 1).long() + (x.norm(dim=1) > 1.8)
    model = TruGTGGM(2, 12, 3, lower=-1.0, upper=1.0, likelihood="categorical")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (-model.elbo(x, y, tolerance=1e-6).mean()).backward()
        optimizer.step()
    assert (model(x).argmax(-1) == y).double().mean() > 0.9


# ------------------------------------------------------------------ scikit-learn
def test_regressor_in_a_grid_search() -> None:
    """The box is chosen by R²; a pipeline, a clone, and the same seed twice."""
    sklearn = pytest.importorskip("sklearn")
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score
    from sklearn.model_selection import GridSearchCV

    generator = np.random.default_rng(0)
    X = 100 + 5 * generator.normal(size=(80, 2))
    y = 1000 * np.abs(X[:, 0] - 100)
    settings = {"n_hidden": 8, "learn": None, "n_iter": 40, "random_state": 0, "batch_size": 80, "learning_rate": 0.1}
    search = GridSearchCV(TruGTGGMRegressor(**settings, lower=-1.0), {"upper": [-0.999, 1.0]}, cv=2)
    search.fit(X, y)
    assert search.best_params_ == {"upper": 1.0}  # the other box is too narrow for anything
    best = search.best_estimator_
    assert sklearn.base.is_regressor(best)
    assert best.predict(X).shape == (80,)
    assert best.score(X, y) == pytest.approx(r2_score(y, best.predict(X)))
    assert best.score(X, y) > 0.6 > LinearRegression().fit(X, y).score(X, y) + 0.4
    again = sklearn.base.clone(best).fit(X, y)
    assert np.array_equal(again.predict(X), best.predict(X))
    both = np.stack([y, X[:, 1]], 1)
    two = TruGTGGMRegressor(**{**settings, "n_iter": 2}).fit(X, both)
    assert two.predict(X).shape == (80, 2)
    assert two.score(X, both) == pytest.approx(r2_score(both, two.predict(X)))
    constant = TruGTGGMRegressor(n_iter=1).fit(np.ones((5, 2)), np.ones(5))
    assert np.isfinite(constant.predict(np.ones((1, 2)))).all()


def test_regressor_refuses() -> None:
    estimator = TruGTGGMRegressor(4, n_iter=1)
    with pytest.raises(AttributeError, match="not fitted yet"):
        estimator.predict(np.ones((2, 3)))
    for X, y, said in (
        (np.ones(3), np.ones(3), r"X must be \(samples, columns\), got shape \(3,\)"),
        (np.ones((3, 2)), np.ones(4), "same number of samples, got 3 and 4"),
        (np.full((3, 2), np.nan), np.ones(3), "X has entries that are not finite"),
        (np.ones((3, 2)), np.full(3, np.inf), "y has entries that are not finite"),
    ):
        with pytest.raises(ValueError, match=said):
            estimator.fit(X, y)
    estimator.fit(np.random.default_rng(0).normal(size=(9, 2)), np.arange(9.0))
    with pytest.raises(ValueError, match=r"X must be \(samples, 2\), got shape \(2, 3\)"):
        estimator.predict(np.ones((2, 3)))
    with pytest.raises(ValueError, match="has no hidden; it has n_hidden, lower"):
        estimator.set_params(hidden=3)
    assert estimator.set_params(n_hidden=6).get_params()["n_hidden"] == 6


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_hidden": 0}, "at least 1, 1 and 1, got 3, 0 and 2"),
        ({"num_outputs": 1, "likelihood": "categorical"}, "at least 1, 1 and 2"),
        ({"likelihood": "poisson"}, '"gaussian" or "categorical", got'),
        ({"sigma2": 0.0}, "sigma2 must be positive, got 0.0"),
        ({"lower": 1.0, "upper": 0.5}, "lower"),
        ({"learn": "all"}, "learn must be"),
    ],
)
def test_refused_models(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TruGTGGM(**{"num_inputs": 3, "num_hidden": 4, "num_outputs": 2, **settings})


@pytest.mark.parametrize(
    ("x", "y", "error", "said"),
    [
        (torch.ones(5, 2), torch.ones(5, 2), ValueError, r"x of shape \(..., 3\), got \(5, 2\)"),
        (torch.ones(5, 3), torch.ones(5), ValueError, r"needs y of shape \(5, 2\), got \(5,\)"),
        (torch.ones(5, 3), torch.ones(4, 2), ValueError, r"needs y of shape \(5, 2\), got \(4, 2\)"),
        (torch.ones(5, 3).long(), torch.ones(5, 2), TypeError, "real floating point x, got torch.int64"),
        (torch.ones(5, 3), torch.ones(5, 2).long(), TypeError, "y of real floating point dtype, got torch.int64"),
        (torch.full((5, 3), math.nan), torch.ones(5, 2), ValueError, "must be finite"),
        (torch.ones(5, 3), torch.full((5, 2), INF), ValueError, "must be finite"),
    ],
)
def test_refused_data(x: Tensor, y: Tensor, error: type[Exception], said: str) -> None:
    model = TruGTGGM(3, 4, 2)
    for call in (model.elbo, model.posterior):
        with pytest.raises(error, match=said):
            call(x, y)


@pytest.mark.parametrize(
    ("y", "error", "said"),
    [
        (torch.ones(5), TypeError, "integer dtype, got torch.float32"),
        (torch.ones(5, 2).long(), ValueError, r"needs y of shape \(5,\)"),
        (torch.full((5,), 2), ValueError, "classes are 0 to 1, got 2 to 2"),
        (torch.full((5,), -1), ValueError, "classes are 0 to 1, got -1 to -1"),
    ],
)
def test_refused_classes(y: Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        TruGTGGM(3, 4, 2, likelihood="categorical").elbo(torch.ones(5, 3), y)


def test_equations_that_are_not_solved_are_an_error() -> None:
    model = random_model(3, 4, 2, 3.0)
    x, y = data(model, 10)
    for method in METHODS:
        with pytest.raises(RuntimeError, match=r"of 10 rows do not hold within 1e-10 after 1 steps"):
            model.posterior(x, y, method=method, max_steps=1)
        with pytest.raises(ValueError, match="tolerance must be positive"):
            model.posterior(x, y, method=method, tolerance=0.0)
    with pytest.raises(ValueError, match='"newton" or "coordinates", got'):
        model.posterior(x, y, method="gibbs")
    model.W1.data[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="parameters that are not finite"):
        model.elbo(x, y)


def test_one_row_and_no_rows() -> None:
    model = random_model(3, 4, 2)
    assert model.elbo(*data(model)).shape == ()
    assert model.elbo(*data(model, 0)).shape == (0,)
    assert repr(model).startswith("TruGTGGM(\n  3, 4, 2, likelihood='gaussian'")


def test_regressor_scores_columns_and_flat_targets_alike() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).numpy()
    y = x.sum(1)
    for fitted in (y, y[:, None]):
        model = TruGTGGMRegressor(5, n_iter=20, random_state=0).fit(x, fitted)
        assert model.score(x, y) == pytest.approx(model.score(x, y[:, None]))
        assert model.score(x, y) > 0.3
    with pytest.raises(ValueError, match="reshape"):
        model.score(x, np.stack([y, y], 1))
