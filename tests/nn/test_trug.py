"""TruG: the laws of the unit, what is learned and how, and life inside torch."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from manopt_torch.nn import TruG
from manopt_torch.nn.trug import MIN_WIDTH

INF = math.inf
SIGMA = math.sqrt(0.2)
PRESETS = {"relu": (0.0, INF), "tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0), "ramp": (0.0, 4.0)}
GRID = torch.arange(-1200, 1201, dtype=torch.float64) / 200


def fixed(lower: float, upper: float, sigma2: float = 0.2) -> TruG:
    return TruG(sigma2=sigma2, lower=lower, upper=upper, learn=None, dtype=torch.float64)


# ------------------------------------------------------------------ laws
@pytest.mark.parametrize("sigma", [SIGMA, 0.1, 0.01])
def test_distance_from_relu(sigma: float) -> None:
    """E h − max(z, 0) is largest at 0, where h is half-normal: σ√(2/π); so it tends to 0 with σ."""
    distance = fixed(0.0, INF, sigma**2)(GRID) - GRID.relu()
    assert GRID[distance.argmax()] == 0
    assert abs(distance.max() - sigma * math.sqrt(2 / math.pi)) < 1e-14
    assert (distance >= 0).all()
    assert (distance[GRID <= 0] > 0).all()


@pytest.mark.parametrize("sigma", [0.2, 0.1, 0.01])
def test_distance_from_hardtanh(sigma: float) -> None:
    """At each corner as for one end, but for what the other end, 2/σ away, takes."""
    distance = (fixed(-1.0, 1.0, sigma**2)(GRID) - nn.functional.hardtanh(GRID)).abs()
    half = scipy.stats.halfnorm(scale=sigma)
    corner = half.expect(ub=2.0, conditional=True)
    assert abs(distance.max() - corner) < 1e-9
    assert {abs(v) for v in GRID[distance > distance.max() - 1e-12].tolist()} == {1.0}


def test_identities() -> None:
    unit, z = fixed(-0.3, 1.4), GRID[::50]
    torch.testing.assert_close(fixed(0.7, 2.4)(z + 1), unit(z) + 1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fixed(-0.6, 2.8, 0.8)(2 * z), 2 * unit(z), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fixed(-1.4, 0.3)(-z), -unit(z), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fixed(-INF, INF)(z), z, rtol=0, atol=1e-15)
    learned = TruG(49, lower=-0.3, upper=1.4, learn="unit", dtype=torch.float64)
    z = z.clone().requires_grad_()
    value = learned(z)
    dz, dlower, draw = torch.autograd.grad(value.sum(), (z, learned.lower, learned.raw_width))
    # ξ₁ moves both ends: all three derivatives of E h sum to one
    torch.testing.assert_close(dz + dlower, torch.ones_like(dz), rtol=0, atol=1e-13)
    width = 1 / (1 + torch.exp(-learned.raw_width))
    assert ((draw >= 0) & (draw / width <= dlower + 1e-13)).all()


def test_figures_of_the_imitations() -> None:
    """Computed at high precision for the design of this layer."""
    at = torch.tensor([1.0, -1.0], dtype=torch.float64)
    relu = TruG.relu(learn=None)(at) - at.relu()
    assert [round(v, 4) for v in relu.tolist()] == [0.0148, 0.1555]
    tanh = fixed(*PRESETS["tanh"])
    assert round(float((tanh(GRID) - GRID.tanh()).abs().max()), 3) == 0.130
    slopes = torch.arange(0.6, 0.8, 0.002)
    nearest = (tanh(GRID) - (slopes[:, None] * GRID).tanh()).abs().amax(-1)
    assert round(float(nearest.min()), 3) == 0.061
    assert round(float(slopes[nearest.argmin()]), 2) == 0.69
    assert round(float(grad(tanh)(torch.zeros((), dtype=torch.float64))), 4) == 0.8497
    sigmoid = fixed(*PRESETS["sigmoid"])
    assert round(float((sigmoid(GRID) - torch.sigmoid(GRID - 0.5)).abs().max()), 4) == 0.0491
    assert round(float((sigmoid(GRID) - torch.sigmoid(GRID)).abs().max()), 3) == 0.167
    assert round(float(grad(sigmoid)(torch.tensor(0.5, dtype=torch.float64))), 4) == 0.3516


def test_langevin_limit() -> None:
    """σ → ∞ with z/σ² = k: the density is exponential, E h = coth k − 1/k on [−1, 1]."""
    k = torch.tensor([-7.0, -0.5, 0.3, 4.0], dtype=torch.float64)
    torch.testing.assert_close(fixed(-1.0, 1.0, 1e12)(k * 1e12), 1 / k.tanh() - 1 / k, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    unit = getattr(TruG, name)()
    assert (unit.lower.item(), round(unit.xi2.item(), 6)) == PRESETS[name]
    assert unit.sigma2 == 0.2
    torch.testing.assert_close(unit(GRID), fixed(*PRESETS[name])(GRID), rtol=1e-6, atol=1e-6)
    other = getattr(TruG, name)(3, 0.5, learn="unit", stochastic=True)
    assert (other.num_units, other.sigma2, other.learn, other.stochastic) == (3, 0.5, "unit", True)


# ------------------------------------------------------------------ what is learned
@pytest.mark.parametrize(
    ("ends", "learn", "parameters", "buffers"),
    [
        ((0.0, INF), "shared", {"lower": ()}, {"upper": ()}),
        ((-INF, 0.5), "unit", {"upper": (4,)}, {"lower": (4,)}),
        ((-1.0, 1.0), "unit", {"lower": (4,), "raw_width": (4,)}, {}),
        ((-1.0, 1.0), "shared", {"lower": (), "raw_width": ()}, {}),
        ((-1.0, 1.0), None, {}, {"lower": (), "upper": ()}),
        ((-INF, INF), None, {}, {"lower": (), "upper": ()}),
    ],
)
def test_what_is_stored(ends: tuple, learn: str | None, parameters: dict, buffers: dict) -> None:
    unit = TruG(4, lower=ends[0], upper=ends[1], learn=learn)
    assert {k: tuple(v.shape) for k, v in unit.named_parameters()} == parameters
    assert {k: tuple(v.shape) for k, v in unit.named_buffers()} == buffers
    torch.testing.assert_close(unit.xi1, torch.full_like(unit.xi1, ends[0]))
    torch.testing.assert_close(unit.xi2, torch.full_like(unit.xi2, ends[1]))
    assert all(p.isfinite().all() for p in unit.parameters())
    value = unit(torch.randn(7, 4) * 30)
    assert value.isfinite().all()
    if parameters:
        value.sum().backward()
        assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in unit.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_survives_any_step(dtype: torch.dtype) -> None:
    unit = TruG.tanh(5, learn="unit").to(dtype)
    z = torch.randn(20, 5, dtype=dtype)
    for step in (-1e4, 1e4, -1e4):
        with torch.no_grad():
            unit.raw_width += step
            unit.lower += torch.randn_like(unit.lower)
        low, high = unit.truncation_points()
        assert (high - low >= 0.99 * MIN_WIDTH).all()
        assert unit(z).isfinite().all()


def test_learns_the_truncation_points() -> None:
    torch.manual_seed(0)
    target, unit = fixed(-0.5, 2.0), TruG(lower=-1.0, upper=1.0, dtype=torch.float64)
    z = torch.linspace(-4, 4, 100, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(unit.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (unit(z) - target(z)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert abs(unit.xi1.item() + 0.5) < 1e-4
    assert abs(unit.xi2.item() - 2) < 1e-4
    unit.reset_parameters()
    assert (unit.xi1.item(), round(unit.xi2.item(), 12)) == (-1, 1)


def test_ends_as_tensors() -> None:
    lower, upper = torch.tensor([-1.0, 0.0, -INF]), torch.tensor([1.0, INF, INF])
    unit, z = TruG(3, lower=lower, upper=upper, learn=None), torch.randn(5, 3)
    for i in range(3):
        torch.testing.assert_close(unit(z)[:, i], fixed(lower[i].item(), upper[i].item())(z[:, i]))
    learned = TruG(2, lower=torch.tensor([-1.0, 0.5]), upper=4.0, learn="unit")
    torch.testing.assert_close(learned.xi2, torch.tensor([4.0, 4.0]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_units": 0}, "num_units"),
        ({"sigma2": 0.0}, "sigma2"),
        ({"learn": "all"}, "learn"),
        ({"learn": "unit"}, "needs num_units"),
        ({"lower": 1.0, "upper": 1.0, "learn": None}, "lower < upper"),
        ({"lower": math.nan, "learn": None}, "lower < upper"),
        ({"lower": 1.0, "upper": 1.0005}, "learns lower"),
        ({"lower": -INF, "upper": INF}, "nothing to learn"),
        ({"num_units": 2, "lower": torch.zeros(2)}, "must be numbers"),
        ({"num_units": 2, "lower": torch.zeros(3), "learn": "unit"}, "shape"),
        ({"num_units": 2, "lower": torch.zeros(3), "learn": None}, r"numbers or \(2,\)"),
        ({"num_units": 2, "lower": torch.tensor([0.0, -INF]), "learn": "unit"}, "infinite for all"),
    ],
)
def test_refusals(arguments: dict, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        TruG(**arguments)


def test_refused_input() -> None:
    with pytest.raises(ValueError, match=r"last dimension .* \(4, 2\)"):
        TruG(3)(torch.randn(4, 2))
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match="real floating point"):
            TruG()(torch.ones(3, dtype=dtype))


# ------------------------------------------------------------------ samples
def test_stochastic() -> None:
    unit = TruG.tanh(learn="shared", stochastic=True)
    z = torch.full((20_000,), 0.4, requires_grad=True)
    h = unit(z)
    plain = TruG.tanh()
    assert abs(h.mean() - plain(z[0])) < 0.02
    assert h.std() > 0.3
    ends = torch.tensor(PRESETS["tanh"])
    assert (h >= ends[0]).all()
    assert (h <= ends[1] + 1e-6).all()
    found = torch.autograd.grad(h.mean(), (z, *unit.parameters()))
    expected = torch.autograd.grad(plain(z[:1]).mean(), (z, *plain.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert abs(a.sum() - b.sum()) < 0.02
    unit.eval()
    assert torch.equal(unit(z), plain(z))


# ------------------------------------------------------------------ inside torch
def network(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), TruG(5, lower=-1.0, upper=1.0, learn="unit", **options), nn.Linear(5, 2))


def test_state_dict_copies_and_dtypes() -> None:
    model, x = network(), torch.randn(4, 3)
    with torch.no_grad():
        model[1].raw_width += torch.randn(5)
    other = network()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict(), strict=True)
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin[1](x[:, :1].expand(4, 5)), model[1](x[:, :1].expand(4, 5)))
    assert model.double()(x.double()).dtype == torch.float64
    assert "learn='unit'" in repr(model)
    with torch.device("meta"):
        bare = network()
    bare.to_empty(device="cpu")[1].reset_parameters()
    torch.testing.assert_close(bare[1].xi2, torch.ones(5))


def test_vmap_over_networks() -> None:
    models, x = [network() for _ in range(3)], torch.randn(4, 3)
    for i, model in enumerate(models):
        with torch.no_grad():
            model[1].lower += 0.1 * i
    parameters, buffers = stack_module_state(models)

    def loss(parameters: dict, buffers: dict, x: Tensor) -> Tensor:
        return functional_call(models[0], (parameters, buffers), (x,)).square().sum()

    gradients = vmap(grad(loss), in_dims=(0, 0, None))(parameters, buffers, x)
    for i, model in enumerate(models):
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for (name, _), value in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(gradients[name][i], value, rtol=1e-4, atol=1e-6)


# torch.compile itself instantiates a Function while it traces one (2.13)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_break(backend: str) -> None:
    model, x = network(), torch.randn(4, 3)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), list(model.parameters())))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_autocast_and_half_precision() -> None:
    model, x = network(), torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = model[0](x)
        h = model[1](z)
        assert z.dtype == h.dtype == torch.bfloat16
        model(x).sum().backward()
    torch.testing.assert_close(h, model[1](z.double()).to(torch.bfloat16))
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    half = TruG.relu().half()(torch.tensor([-300.0, 0.0, 300.0], dtype=torch.float16))
    assert half.dtype == torch.float16
    torch.testing.assert_close(
        half.float(), torch.tensor([0.2 / 300, SIGMA * math.sqrt(2 / math.pi), 300.0]), rtol=1e-3, atol=0
    )
