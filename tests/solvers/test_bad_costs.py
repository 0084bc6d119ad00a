"""Costs and arguments that are not what a solver hopes for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manopt_torch import Euclidean, Sphere, Stiefel
from manopt_torch.manifolds import Product
from manopt_torch.solvers import (
    LBFGS,
    AdaptiveRegularization,
    Armijo,
    ConjugateGradient,
    GradientDescent,
    TrustRegion,
    minimize,
    minimize_module,
)

D = torch.float64
A = torch.diag(torch.arange(6.0, dtype=D))
SOLVERS = [GradientDescent(), ConjugateGradient(), LBFGS(), TrustRegion(), AdaptiveRegularization()]
EACH = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)


def trace(x):
    return (x.mH @ A @ x).diagonal().sum()


def start():
    return Stiefel().random(6, 2, dtype=D, generator=torch.Generator().manual_seed(0))


@EACH
def test_inference_mode_does_not_stop_the_search(solver):
    x0 = start()
    with torch.inference_mode():
        result = minimize(trace, Stiefel(), x0, solver)
    assert result.success
    assert result.fun == pytest.approx(1, abs=1e-8)


@EACH
def test_a_cost_that_autograd_cannot_see_is_named(solver):
    result = minimize(lambda x: trace(x.detach()), Stiefel(), start(), solver)
    assert "autograd sees no dependence" in result.message


@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor(True), torch.tensor(1j)])
def test_costs_are_real_floating_point_numbers(value):
    with pytest.raises(TypeError, match="one real number as a floating point tensor"):
        minimize(lambda x: value, Stiefel(), start(), LBFGS())


SECOND = pytest.mark.parametrize("solver", [TrustRegion(), AdaptiveRegularization()], ids=lambda s: type(s).__name__)


@SECOND
def test_no_success_at_a_saddle_or_maximum(solver):
    d = torch.tensor([1.0, 2.0, 3.0], dtype=D)
    top = torch.tensor([0, 0, 1.0], dtype=D)
    result = minimize(lambda x: (d * x * x).sum(), Sphere(), top, solver, max_iter=0)
    assert not result.success
    assert minimize(lambda x: (d * x * x).sum(), Sphere(), top, solver).fun == pytest.approx(1)


@SECOND
def test_a_cost_that_changes_little_may_still_be_at_a_saddle(solver):
    def f(x):
        return x[0] ** 4 - x[1] ** 2 + x[1] ** 4

    result = minimize(f, Euclidean(), torch.tensor([0.1, 0], dtype=D), solver, tolerance_change=1e-4)
    assert result.success
    assert result.fun == pytest.approx(-0.25, abs=1e-3)


@EACH
@pytest.mark.parametrize("f", [lambda x: x.abs().sum(), lambda x: x.norm()], ids=["abs", "norm"])
def test_kinks_end_with_a_result(solver, f):
    x0 = torch.tensor([1.0, 0.3], dtype=D)
    assert minimize(f, Euclidean(), x0, solver, max_iter=200).fun < f(x0)


@SECOND
def test_a_hessian_that_is_not_finite_is_named(solver):
    def f(x):
        return (x.abs() ** 1.5).sum()

    x0 = torch.tensor([1.0, 0.0], dtype=D)
    result = minimize(f, Euclidean(), x0, solver)
    assert not result.success
    assert "second derivative of the cost is not finite" in result.message


def test_arguments_of_another_kind():
    with pytest.raises(TypeError, match=r"floating point or complex, got torch\.int64"):
        minimize(lambda x: ((x - 3.0) ** 2).sum(), Euclidean(), torch.tensor([1, 2]), LBFGS())
    with pytest.raises(TypeError, match=r"manifold must be one such as Stiefel\(\)"):
        minimize(trace, Stiefel, start(), LBFGS())
    for make in (GradientDescent, ConjugateGradient, LBFGS):
        for bad in (0.1, Armijo):
            with pytest.raises(TypeError, match="line_search must be one such as"):
                make(line_search=bad)
    with pytest.raises(ValueError, match="history must be an integer"):
        LBFGS(history=1.5)


def test_tolerance_of_mixed_precision_is_the_coarser_one():
    space, points = Product(Euclidean(), Euclidean()), (torch.ones(3, dtype=D), torch.ones(3))

    def f(a, b):
        return ((a - 2) ** 2).sum() + ((b - 3) ** 2).sum()

    for x0 in (points, points[::-1]):
        assert "tolerance_grad = 0.001" in minimize(f, space, x0, LBFGS()).message


def test_an_empty_batch_beside_another_factor():
    space = Product(Stiefel(retraction="newton_schulz"), Euclidean())
    empty = torch.zeros(0, 3, 2, dtype=D), torch.zeros(2, dtype=D)
    for solver in SOLVERS:
        result = minimize(lambda a, b: a.sum() + ((b - 1) ** 2).sum(), space, empty, solver)
        assert result.fun == pytest.approx(0, abs=1e-10)


def test_a_module_that_the_loss_does_not_use():
    model, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    with pytest.raises(ValueError, match="does not depend on the parameters of this model"):
        minimize_module(model, lambda: other(torch.ones(1, 3, dtype=D)).square().sum(), LBFGS())


def test_a_closure_in_the_style_of_torch():
    model = nn.Linear(2, 1)

    def closure():
        model.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="only return the loss"):
        minimize_module(model, closure, LBFGS())
    assert torch.equal(model.weight, before)


def test_buffers_are_as_they_were_if_it_raises():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(8, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def stop(result):
        raise KeyError("stop")

    with pytest.raises(KeyError):
        minimize_module(model, lambda: (model(x) - 1).square().mean(), LBFGS(), callback=stop)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
