"""Directions of conjugate gradients and L-BFGS against their formulas, written out with dense matrices."""

import dataclasses
import itertools
import math
import typing

import pytest
import torch

from manopt_torch import SPD, Euclidean, Sphere, Stiefel
from manopt_torch.manifolds.product import Product
from manopt_torch.solvers import LBFGS, ConjugateGradient, HagerZhang, Problem, StrongWolfe, minimize
from manopt_torch.solvers.conjugate_gradient import Rule

rules = pytest.mark.parametrize("rule", typing.get_args(Rule))


def quadratic(n=6):
    """½ xᵀAx − bᵀx with eigenvalues 1, …, 10."""
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    a, b = q @ torch.diag(torch.linspace(1, 10, n, dtype=torch.float64)) @ q.mH, torch.randn(n, dtype=torch.float64)
    return lambda x: x @ a @ x / 2 - b @ x


def states(solver, cost, manifold, x, steps):
    problem = Problem(cost, manifold)
    found = [solver.init(problem, x)]
    for _ in range(steps):
        found.append(solver.step(problem, found[-1]))
    return found


@rules
def test_with_exact_searches_it_is_the_linear_method(rule):
    """On a quadratic of n numbers the minimum is reached in n steps, whatever the rule."""
    solver = ConjugateGradient(rule, line_search=StrongWolfe(decrease=1e-9, curvature=1e-8))
    x0 = torch.zeros(6, dtype=torch.float64)
    result = minimize(quadratic(), Euclidean(), x0, solver, max_iter=6, tolerance_grad=1e-6)
    assert result.success, result.message
    steepest = dataclasses.replace(solver, powell=1e-300)
    assert not minimize(quadratic(), Euclidean(), x0, steepest, max_iter=6, tolerance_grad=1e-2).success


@rules
def test_rules_are_their_formulas(rule):
    """d = −g + β d', with β from the gradients and the direction before, where carrying changes nothing."""
    solver = ConjugateGradient(rule, powell=math.inf, line_search=HagerZhang(curvature=0.3))
    x = torch.randn(12, dtype=torch.float64)
    cost = quadratic(12)
    checked = 0
    pairs = states(solver, lambda x: cost(x) + (x**4).sum() / 10, Product(Euclidean()), (x,), 8)
    for before, after in itertools.pairwise(pairs):
        old, d, g = before.g[0], before.d[0], after.g[0]
        y = g - old
        beta = {
            "fletcher-reeves": g @ g / (old @ old),
            "polak-ribiere": (g @ y / (old @ old)).clamp(min=0),
            "hestenes-stiefel": (g @ y / (d @ y)).clamp(min=0),
            "dai-yuan": g @ g / (d @ y),
            "liu-storey": (g @ y / -(old @ d)).clamp(min=0),
            "hager-zhang": ((y - 2 * d * (y @ y) / (d @ y)) @ g / (d @ y)).clamp(
                min=-1 / (d.norm() * old.norm().clamp(max=0.01))
            ),
        }[rule]
        expected = -g + beta * d
        if after.age:
            torch.testing.assert_close(after.d[0], expected, rtol=1e-9, atol=1e-12)
            checked += beta.item() != 0
        else:
            assert expected @ g > -1e-9
    assert checked >= 2


@rules
def test_powell_restarts_where_gradients_are_not_orthogonal(rule):
    cost, x = quadratic(), (torch.ones(6, dtype=torch.float64),)
    always = states(ConjugateGradient(rule, powell=1e-300), cost, Product(Euclidean()), x, 4)
    assert all(torch.equal(state.d[0], -state.g[0]) and state.age == 0 for state in always)
    never = states(ConjugateGradient(rule, powell=math.inf), cost, Product(Euclidean()), x, 4)
    assert [state.age for state in never] == [0, 1, 2, 3, 4]


def test_a_restart_after_as_many_steps_as_there_are_numbers():
    found = states(ConjugateGradient(powell=math.inf), quadratic(3), Product(Euclidean()), (torch.ones(3).double(),), 4)
    assert [state.age for state in found] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("solver", [ConjugateGradient(), LBFGS()], ids=repr)
def test_a_direction_that_leads_uphill_is_given_up(solver):
    """Within the same step, for the negative gradient; the state at which that fails too is halted."""
    a, x = torch.randn(4, 2, dtype=torch.float64), Stiefel().random(4, 2, dtype=torch.float64)
    problem = Problem(lambda x: (a * x).sum(), Product(Stiefel()))
    state = solver.step(problem, solver.step(problem, solver.init(problem, (x,))))
    if isinstance(solver, LBFGS):
        state = dataclasses.replace(state, vectors=tuple(torch.cat((v[1:2], v[1:])) for v in state.vectors))
    else:
        state = dataclasses.replace(state, d=state.g, age=2)
    after = solver.step(problem, state)
    assert after.f < state.f
    assert not after.halted


# ---------------------------------------------------------------------- L-BFGS
def dense(gram, pairs, g):
    """−H g with H₀ = ⟨s, y⟩/⟨y, y⟩, H ← (1 − s yᵀ/yᵀs) H (1 − y sᵀ/yᵀs) + s sᵀ/yᵀs, adjoints by the matrix ``gram``."""
    eye = torch.eye(len(g), dtype=g.dtype)
    s, y = pairs[-1]
    h = eye * (s @ gram @ y) / (y @ gram @ y)
    for s, y in pairs:
        rho = 1 / (y @ gram @ s)
        h = (eye - rho * torch.outer(s, y @ gram)) @ h @ (eye - rho * torch.outer(y, s @ gram))
        h = h + rho * torch.outer(s, s @ gram)
    return -h @ g


@pytest.mark.parametrize("history", [1, 3, 10])
def test_the_direction_is_that_of_the_dense_formula(history):
    """In a weighted metric; the history holds the newest pairs, s the steps and y the differences of gradients."""
    weights, n = (5.0, 0.2), 4
    manifold = Product(Euclidean(), Euclidean(), weights=weights)
    gram = torch.diag(torch.tensor(weights, dtype=torch.float64).repeat_interleave(n))
    cost = quadratic(2 * n)
    x0 = tuple(torch.randn(2, n, dtype=torch.float64))
    found = states(LBFGS(history), lambda x, z: cost(torch.cat((x, z))), manifold, x0, 7)
    for k, state in enumerate(found[1:], 1):
        assert len(state.vectors[0]) == 2 + 2 * min(k, history)
        recent = found[max(0, k - history) : k + 1]
        pairs = [
            (torch.cat(b.x) - torch.cat(a.x), torch.cat(b.g) - torch.cat(a.g)) for a, b in itertools.pairwise(recent)
        ]
        d = torch.cat([v[0] for v in state.vectors])
        torch.testing.assert_close(d, dense(gram, pairs, torch.cat(state.g)), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("manifold", "shape"),
    [
        (SPD(), (3, 3)),
        (Sphere(), (5,)),
        (Stiefel(), (5, 2)),
        (Stiefel(retraction="qr"), (5, 2)),
        (Stiefel("canonical"), (4, 4)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_inner_products_are_kept_as_pairs_are_carried(manifold, shape, dtype):
    """``gram`` is that of the vectors, after many steps, whether or not carrying is an isometry."""
    a = torch.randn(shape, dtype=dtype)
    x = manifold.random(*shape, dtype=dtype)
    state = states(LBFGS(3), lambda x: (x - a).abs().square().sum(), Product(manifold), (x,), 6)[-1]
    vectors = state.vectors[0][1:]
    expected = torch.stack([manifold.inner(state.x[0], u, vectors) for u in vectors])
    torch.testing.assert_close(state.gram, expected, rtol=1e-8, atol=1e-10)


def test_pairs_without_curvature_are_left_out():
    """A concave cost: its pairs have ⟨s, y⟩ < 0, none is kept, and it goes down nevertheless."""
    x = torch.full((3,), 0.1, dtype=torch.float64)
    found = states(LBFGS(), lambda x: -x.square().sum(), Product(Euclidean()), (x,), 3)
    assert [len(state.vectors[0]) for state in found] == [2] * 4
    assert found[3].f < found[2].f < found[1].f < found[0].f
