"""Product: tuples of points, a weighted sum of metrics, a batch as one point."""

import copy
import math
import pickle

import pytest
import torch

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary
from manopt_torch.manifolds import Product

SHAPES = ((2, 5, 3), (4, 4), (3,), (3, 3))
FACTORS = (Stiefel("canonical"), Unitary(), Euclidean(), SPD())


@pytest.fixture
def space():
    return Product(*FACTORS, weights=(1.0, 0.5, 3.0, 2.0))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def tangent(space, x, generator):
    return space.project(x, tuple(torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in x))


def test_gradient_represents_the_differential_in_the_weighted_metric(space, generator):
    x = space.random(*SHAPES, dtype=torch.complex128, generator=generator)
    g = tuple(torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in x)
    u = tangent(space, x, generator)
    slope = sum((a.conj() * b).real.sum() for a, b in zip(g, u, strict=True))
    assert torch.allclose(space.inner(x, space.rgrad(x, g), u), slope, rtol=1e-12)


def test_inner_is_the_weighted_sum_of_the_metrics_of_all_points(space, generator):
    x = space.random(*SHAPES, dtype=torch.float64, generator=generator)
    u, v = tangent(space, x, generator), tangent(space, x, generator)
    stiefel = sum(
        torch.trace(a.mT @ (torch.eye(5) - y @ y.mT / 2) @ b) for y, a, b in zip(x[0], u[0], v[0], strict=True)
    )
    inverse = torch.linalg.inv(x[3])
    spd = torch.trace(inverse @ u[3] @ inverse @ v[3])
    expected = stiefel + 0.5 * (u[1] * v[1]).sum() + 3 * (u[2] * v[2]).sum() + 2 * spd
    assert torch.allclose(space.inner(x, u, v), expected, rtol=1e-12)
    assert torch.allclose(space.norm(x, u) ** 2, space.inner(x, u, u), rtol=1e-12)


def test_distance_is_the_length_of_the_logarithm(generator):
    space = Product(Sphere(), SPD(), weights=(4.0, 1.0))
    x, y = (space.random((3,), (2, 2), dtype=torch.float64, generator=generator) for _ in range(2))
    sphere = math.acos(float(x[0] @ y[0]))
    spd = torch.linalg.eigvals(torch.linalg.solve(x[1], y[1])).real.log().norm().item()
    assert space.dist(x, y).item() == pytest.approx(math.sqrt(4 * sphere**2 + spd**2), rel=1e-9)
    assert torch.allclose(space.dist(x, y), space.norm(x, space.log(x, y)), rtol=1e-9)
    for a, b in zip(space.exp(x, space.log(x, y)), y, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_move_is_that_of_the_factors(space, generator):
    x = space.random(*SHAPES, dtype=torch.float64, generator=generator)
    u, v, w = (tangent(space, x, generator) for _ in range(3))
    y, carried, other = space.move(x, u, v, w)
    for i, M in enumerate(FACTORS):
        for got, expected in zip((y[i], carried[i], other[i]), M.move(x[i], u[i], v[i], w[i]), strict=True):
            assert torch.equal(got, expected)
    assert all(map(torch.equal, space.retract(x, u), y))
    assert space.residual(y) < 1e-10
    off = (y[0], 2 * y[1], y[2], y[3])
    assert space.residual(off).item() == pytest.approx(Unitary().residual(2 * y[1]).item())
    back = space.nearest(off)
    assert torch.allclose(back[1], y[1])
    assert space.dim(*SHAPES) == 2 * Stiefel().dim(5, 3) + 6 + 3 + 6


def test_is_a_value(space):
    assert space == copy.deepcopy(space) == pickle.loads(pickle.dumps(space))
    assert hash(space) == hash(copy.deepcopy(space))
    assert space != Product(*FACTORS)
    assert repr(Product(Stiefel(), SPD(), weights=(1, 2))) == "Product(Stiefel(), SPD(), weights=(1.0, 2.0))"
    with pytest.raises(AttributeError):
        space.weights = (1.0,)


@pytest.mark.parametrize(
    ("factors", "weights", "error"),
    [
        ((), None, ValueError),
        ((Stiefel(),), (1.0, 2.0), ValueError),
        ((Stiefel(),), (0.0,), ValueError),
        ((Stiefel(),), (math.nan,), ValueError),
        ((Stiefel,), None, TypeError),
        (((Stiefel(), SPD()),), None, TypeError),
    ],
)
def test_refuses(factors, weights, error):
    with pytest.raises(error):
        Product(*factors, weights=weights)
