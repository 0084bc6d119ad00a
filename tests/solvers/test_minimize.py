"""``minimize`` and ``minimize_module``: what comes back, when it stops, what it refuses."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary, constrain, max_residual
from manopt_torch.manifolds.product import Product
from manopt_torch.solvers import (
    LBFGS,
    Armijo,
    ConjugateGradient,
    GradientDescent,
    HagerZhang,
    Solver,
    StrongWolfe,
    minimize,
    minimize_module,
)

SOLVERS = [GradientDescent(), ConjugateGradient(), LBFGS()]
every = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)


def rayleigh(n=6):
    """xᵀAx with eigenvalues −1, …, and its least value."""
    q = Unitary().random(n, n, dtype=torch.float64)
    a = q @ torch.diag(torch.linspace(-1, 2, n, dtype=torch.float64)) @ q.mH
    return lambda x: x @ a @ x


def start(n=6):
    return Sphere().random(n, dtype=torch.float64)


# ---------------------------------------------------------------------- what comes back
@every
def test_a_result_in_the_words_of_scipy(solver):
    f, x0, seen = rayleigh(), start(), []
    result = minimize(f, Sphere(), x0, solver, callback=seen.append)
    assert result.success
    assert math.isclose(result.fun, -1.0, rel_tol=1e-10)
    assert result.fun == f(result.x).item()
    g = Sphere().rgrad(result.x, torch.func.grad(f)(result.x))
    assert math.isclose(result.grad_norm, g.norm().item(), rel_tol=1e-6)
    assert "tolerance_grad = 1e-06" in result.message
    assert result.nit == len(seen) > 0
    assert [r.nit for r in seen] == list(range(1, result.nit + 1))
    assert result.nhev == 0
    assert 0 < result.njev <= result.nfev
    assert not result.x.requires_grad
    assert {(r.success, r.message) for r in seen} == {(False, "still running")}
    assert torch.equal(seen[-1].x, result.x)


@every
def test_counts_are_those_of_the_cost(solver):
    """nfev: calls of the cost. njev: backward passes."""
    f, calls = rayleigh(), {"forward": 0, "backward": 0}

    def cost(x):
        calls["forward"] += 1
        value = f(x)
        value.register_hook(lambda g: calls.update(backward=calls["backward"] + 1))
        return value

    result = minimize(cost, Sphere(), start(), solver)
    assert (result.nfev, result.njev) == (calls["forward"], calls["backward"])


@every
def test_a_tuple_of_points(solver):
    """x on the sphere and a number: f(x) + (b − 1)²; a list is taken too, and a tuple returned."""
    f, b = rayleigh(), torch.tensor(4.0, dtype=torch.float64)
    for given in ((start(), b), [start(), b]):
        result = minimize(lambda x, b: f(x) + (b - 1).square(), Product(Sphere(), Euclidean()), given, solver)
        assert isinstance(result.x, tuple)
        assert math.isclose(result.fun, -1.0, rel_tol=1e-10)
        assert result.x[1].shape == ()
        assert math.isclose(result.x[1].item(), 1.0, rel_tol=1e-6)


@every
def test_dtypes_may_differ_between_factors(solver):
    """Each keeps its own: a single-precision sphere, a double number, a complex unitary."""
    x0 = (Sphere().random(3), torch.tensor(4.0, dtype=torch.float64), Unitary().random(2, 2, dtype=torch.complex128))
    a = torch.randn(2, 2, dtype=torch.complex128)

    def cost(x, b, w):
        return x[0].double() + (b - 1).square() + (w - a).abs().square().sum()

    result = minimize(cost, Product(Sphere(), Euclidean(), Unitary()), x0, solver, tolerance_grad=1e-3)
    assert result.success
    assert [t.dtype for t in result.x] == [t.dtype for t in x0]


@every
def test_weights_of_a_product_do_not_move_the_minimum(solver):
    f = rayleigh()
    manifold = Product(Sphere(), Euclidean(), weights=(5.0, 0.2))
    b = torch.tensor(4.0, dtype=torch.float64)
    result = minimize(lambda x, b: f(x) + (b - 1).square(), manifold, (start(), b), solver)
    assert math.isclose(result.fun, -1.0, rel_tol=1e-10)


def test_the_start_is_copied():
    x0 = start().requires_grad_()
    bits = x0.detach().clone()
    result = minimize(rayleigh(), Sphere(), x0, LBFGS())
    assert torch.equal(x0, bits)
    assert x0.grad is None
    assert x0.requires_grad
    kept = minimize(lambda x: x.sum() * 0, Sphere(), x0, LBFGS())
    assert kept.x.data_ptr() != x0.data_ptr()
    assert not result.x.requires_grad


def test_verbose_prints_as_it_goes(capsys):
    minimize(rayleigh(), Sphere(), start(), GradientDescent(), verbose=True, max_iter=30, tolerance_grad=0.0)
    lines = capsys.readouterr().out.splitlines()
    shown = [int(line.split()[1].rstrip(":")) for line in lines[:-1]]
    assert shown == [*range(0, 10), 10, 20, 30][: len(shown)]
    assert len(shown) > 10
    assert lines[0].startswith("iteration 0: cost ")
    assert lines[-1].startswith("stopped after ")


def test_under_no_grad():
    with torch.no_grad():
        assert minimize(rayleigh(), Sphere(), start(), LBFGS()).success
        assert not torch.is_grad_enabled()


# ---------------------------------------------------------------------- when it stops
@every
def test_case_47_a_constant_cost(solver):
    """At once, with the bits of the start: success, and nothing but one evaluation."""
    x0 = Stiefel().random(4, 2, dtype=torch.float64)
    for cost in (lambda x: torch.tensor(2.0), lambda x: (x * 0).sum() + 2):
        result = minimize(cost, Stiefel(), x0, solver)
        assert torch.equal(result.x, x0)
        assert (result.fun, result.nit, result.nfev, result.njev, result.grad_norm) == (2.0, 0, 1, 1, 0.0)
        assert result.success
        assert "gradient has norm 0" in result.message


@every
def test_a_converged_start(solver):
    f, x0 = rayleigh(), start()
    first = minimize(f, Sphere(), x0, solver)
    again = minimize(f, Sphere(), first.x, solver)
    assert (again.nit, again.nfev) == (0, 1)
    assert torch.equal(again.x, first.x)


@every
def test_a_start_exactly_at_a_saddle_is_critical(solver):
    """First-order methods see a gradient of zero there."""
    a = torch.diag(torch.tensor([-2.0, 1.0, 3.0], dtype=torch.float64))
    x0 = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    result = minimize(lambda x: x @ a @ x, Sphere(), x0, solver)
    assert torch.equal(result.x, x0)
    assert result.success


@every
def test_max_iter(solver):
    for limit in (0, 3):
        result = minimize(rayleigh(), Sphere(), start(), solver, max_iter=limit)
        assert (result.nit, result.success) == (limit, False)
        assert result.message.startswith(f"max_iter = {limit} iterations (gradient norm ")


def test_max_seconds():
    result = minimize(rayleigh(), Sphere(), start(), LBFGS(), max_seconds=0)
    assert (result.nit, result.success) == (0, False)
    assert result.message.startswith("max_seconds = 0 passed")


@every
def test_tolerance_change(solver):
    costs = []
    f, x0 = rayleigh(), start()
    settings = {"tolerance_grad": 0.0, "tolerance_change": 1e-3, "callback": lambda r: costs.append(r.fun)}
    result = minimize(f, Sphere(), x0, solver, **settings)
    assert result.success
    assert "tolerance_change = 0.001" in result.message
    falls = [a - b for a, b in zip([f(x0).item(), *costs], costs, strict=False)]
    assert falls[-1] <= 1e-3 < min(falls[:-1])


@pytest.mark.parametrize(
    "solver", [GradientDescent(), ConjugateGradient(line_search=StrongWolfe()), LBFGS(line_search=Armijo())], ids=repr
)
def test_without_tolerances_it_halts_at_working_precision(solver):
    """tolerance_change = 0 is never; the message says why nothing more can be done."""
    result = minimize(rayleigh(), Sphere(), start(), solver, tolerance_grad=0.0, max_iter=3000)
    assert not result.success
    assert "no lower cost was found along the gradient: at working precision" in result.message
    assert math.isclose(result.fun, -1.0, rel_tol=1e-14)


@every
def test_rounding_errors_do_not_add_up(solver):
    """Hundreds of steps at the minimum leave the cost where it is, to a few units of roundoff."""
    result = minimize(rayleigh(), Sphere(), start(), solver, tolerance_grad=0.0, max_iter=300)
    assert math.isclose(result.fun, -1.0, rel_tol=1e-14)
    assert result.grad_norm < 1e-6


def test_a_step_that_gains_nothing_does_not_stop_it():
    """tolerance_change = 0 is never."""

    class Idle(Solver):
        def step(self, problem, state):
            return state

    result = minimize(rayleigh(), Sphere(), start(), Idle(), max_iter=4)
    assert (result.nit, result.success) == (4, False)
    assert minimize(rayleigh(), Sphere(), start(), Idle(), max_iter=4, tolerance_change=1e-9).nit == 1


def test_a_callback_stops():
    def callback(result):
        if result.nit == 2:
            raise StopIteration

    result = minimize(rayleigh(), Sphere(), start(), LBFGS(), callback=callback)
    assert (result.nit, result.success, result.message) == (2, False, "the callback stopped it")

    def broken(result):
        raise RuntimeError("a fault of its own")

    with pytest.raises(RuntimeError, match="a fault of its own"):
        minimize(rayleigh(), Sphere(), start(), LBFGS(), callback=broken)


@every
def test_a_cost_without_bound(solver):
    """−Σ log x on the positive numbers: it goes on, and everything stays finite."""
    x0 = torch.eye(2, dtype=torch.float64)
    result = minimize(lambda x: -torch.logdet(x), SPD(), x0, solver, max_iter=20)
    assert not result.success
    assert math.isfinite(result.fun)
    assert result.fun < -1
    assert result.x.isfinite().all()


# ---------------------------------------------------------------------- what it refuses
@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "one real number.*complex", {"cost": lambda x: (x + 0j).sum()}),
        (TypeError, r"one real number.*shape \(6,\)", {"cost": lambda x: x}),
        (TypeError, "one real number.*got 3.0", {"cost": lambda x: 3.0}),
        (ValueError, "cost at x0 is nan", {"cost": lambda x: x.sum() * math.nan}),
        (ValueError, "cost at x0 is inf", {"cost": lambda x: x.sum() + math.inf}),
        (ValueError, "gradient has norm nan", {"cost": lambda x: (x - x).norm(p=0.5) + (x - x).sqrt().sum()}),
        (ValueError, "x0 is not on the manifold: .*residual", {"x0": torch.ones(6, dtype=torch.float64)}),
        (ValueError, "holds NaN or inf", {"x0": torch.full((6,), math.nan, dtype=torch.float64)}),
        (ValueError, "needs at least 1 dim", {"x0": torch.tensor(1.0)}),
        (TypeError, "x0 must be a tensor", {"x0": [1.0, 0.0]}),
        (ValueError, "x0 has 1 members, .* has 2 factors", {"manifold": Product(Sphere(), Sphere()), "x0": (start(),)}),
        (TypeError, "x0 must be .* a tuple of tensors", {"manifold": Product(Sphere(), Sphere())}),
        (TypeError, r"solver must be one such as TrustRegion\(\), got <class", {"solver": LBFGS}),
        (TypeError, "solver must be one", {"solver": "lbfgs"}),
    ],
)
def test_bad_input(error, message, change):
    given = {"cost": rayleigh(), "manifold": Sphere(), "x0": start(), "solver": LBFGS(), **change}
    with pytest.raises(error, match=message):
        minimize(**given)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConjugateGradient("FR"), r"rule must be one of \('fletcher-reeves', .*got 'FR'"),
        (lambda: ConjugateGradient(powell=0.0), "powell must be positive, got 0.0"),
        (lambda: LBFGS(history=0), "history must be an integer of at least 1, got 0"),
    ],
)
def test_bad_settings(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_solvers_are_values():
    assert LBFGS() == LBFGS(10)
    assert LBFGS(history=3) != LBFGS()
    assert hash(ConjugateGradient()) == hash(copy.deepcopy(ConjugateGradient()))
    assert "HagerZhang" in repr(GradientDescent(HagerZhang()))


def test_a_solver_of_ones_own():
    """Two functions: here steps of fixed length."""

    class Fixed(Solver):
        def step(self, problem, state):
            (x,), (g,) = state.x, state.g
            return self.init(problem, problem.manifold.retract((x,), (-0.1 * g,)))

    assert math.isclose(minimize(rayleigh(), Sphere(), start(), Fixed()).fun, -1.0, rel_tol=1e-9)


# ---------------------------------------------------------------------- modules
@every
def test_a_constrained_layer_finds_a_rotation(solver):
    x = torch.randn(20, 4, dtype=torch.float64)
    w = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    w[0] *= torch.linalg.det(w)  # a rotation
    layer = constrain(nn.Linear(4, 4, dtype=torch.float64), "weight", Unitary())
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    y = x @ w.mH + 3.0
    result = minimize_module(layer, lambda: F.mse_loss(layer(x), y), solver)
    assert result.success
    assert result.fun < 1e-12
    torch.testing.assert_close(layer.weight.detach(), w, atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.bias.detach(), torch.full((4,), 3.0, dtype=torch.float64), atol=1e-5, rtol=0)
    assert set(result.x) == {"weight", "bias"}
    assert torch.equal(result.x["weight"], layer.weight)
    assert max_residual(layer) < 1e-14
    assert all(p.grad is None and p.requires_grad for p in layer.parameters())


class Tied(nn.Module):
    """One matrix in two layers, constrained in the first; a parameter that is frozen."""

    def __init__(self):
        super().__init__()
        self.first = constrain(nn.Linear(3, 3, bias=False, dtype=torch.float64), "weight", Unitary())
        self.second = nn.Linear(3, 3, bias=True, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x))


def test_tied_weights_are_one_point():
    """W² is fitted to a rotation by a right angle; both layers still hold one and the same parameter."""
    model, x = Tied(), torch.randn(10, 3, dtype=torch.float64)
    target = torch.linalg.matrix_exp(
        math.pi / 2 * torch.tensor([[0, 1, 0], [-1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    )
    with torch.no_grad():
        turn = torch.tensor([[0, 0.3, 0.1], [-0.3, 0, 0.2], [-0.1, -0.2, 0]], dtype=torch.float64)
        model.first.weight.copy_(torch.linalg.matrix_exp(turn))
    frozen = model.second.bias.clone()
    y = x @ target.mH + frozen
    result = minimize_module(model, lambda: F.mse_loss(model(x), y), LBFGS())
    assert set(result.x) == {"first.weight"}
    assert model.second.weight is model.first.weight
    assert result.fun < 1e-12
    torch.testing.assert_close((model.first.weight @ model.first.weight).detach(), target, atol=1e-6, rtol=0)
    assert torch.equal(model.second.bias, frozen)


def test_a_run_that_raises_leaves_the_model_untouched():
    layer = constrain(nn.Linear(4, 3, dtype=torch.float64), "weight", Stiefel())
    before = copy.deepcopy(layer.state_dict())
    x, calls = torch.randn(5, 4, dtype=torch.float64), []

    def closure():
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of luck")
        return layer(x).square().sum()

    with pytest.raises(RuntimeError, match="out of luck"):
        minimize_module(layer, closure, GradientDescent())
    assert len(calls) == 4
    assert all(torch.equal(layer.state_dict()[k], v) for k, v in before.items())
    assert all(p.requires_grad and p.is_leaf for p in layer.parameters())


def test_a_model_without_trainable_parameters_is_refused():
    layer = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        minimize_module(layer, lambda: layer(torch.ones(2)).sum(), LBFGS())


def test_settings_reach_minimize():
    layer = constrain(nn.Linear(3, 3), "weight", Unitary())
    x = torch.randn(4, 3)
    result = minimize_module(layer, lambda: layer(x).sum(), LBFGS(), max_iter=2, tolerance_grad=0.0)
    assert result.nit == 2
    with pytest.raises(TypeError, match="unheard"):
        minimize_module(layer, lambda: layer(x).sum(), LBFGS(), unheard=1)
