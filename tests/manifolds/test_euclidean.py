"""Euclidean: torch's own arithmetic, number by number."""

import copy
import pickle

import pytest
import torch

from manopt_torch.manifolds import Euclidean

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
M = Euclidean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_a_point(dtype):
    x, u, v = (torch.randn(4, 5, dtype=dtype) for _ in range(3))
    y, carried = M.move(x, u, v)
    assert torch.equal(y, x + u)
    assert torch.equal(carried, v)
    assert torch.equal(M.retract(x, u), x + u)
    assert torch.equal(M.exp(x, u), x + u)
    assert torch.equal(M.log(x, y), y - x)
    assert torch.equal(M.dist(x, y), (y - x).abs())
    assert torch.equal(M.project(x, v), v)
    assert torch.equal(M.rgrad(x, v), v)
    assert torch.equal(M.nearest(x), x)
    assert torch.equal(M.retract(x, torch.zeros_like(x)), x)
    expected = u.real * v.real + u.imag * v.imag if dtype.is_complex else u * v
    torch.testing.assert_close(M.inner(x, u, v), expected)
    torch.testing.assert_close(M.norm(x, u), u.abs())


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_zero_and_real(dtype):
    r = M.residual(torch.randn(2, 3, dtype=dtype))
    assert torch.equal(r, torch.zeros(2, 3, dtype=dtype.to_real()))


def test_dim_counts_numbers():
    assert M.dim() == 1
    assert M.dim(3, 4) == 12
    assert M.dim(3, 4, dtype=torch.complex64) == 24
    assert M.dim(0, 4) == 0


def test_broadcasting():
    x, u = torch.randn(3), torch.randn(5, 3)
    for t in (M.project(x, u), M.project(u, x), *M.move(x, u, x), M.inner(u, x, x), M.log(x, u)):
        assert t.shape == (5, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x, u = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    y = M.retract(x, u)
    assert y.dtype == dtype
    assert torch.equal(y, (x.float() + u.float()).to(dtype))


def test_random_is_standard_normal():
    z = M.random(100_000, dtype=torch.complex128)
    # standard errors: 1/√(2N) for each part of the mean, 1/√N for E|z|² (|z|² is exponential)
    assert abs(z.mean()) < 5 / 100_000**0.5
    assert abs(z.abs().square().mean() - 1) < 5 / 100_000**0.5
    assert torch.equal(
        M.random(3, generator=torch.Generator().manual_seed(1)), M.random(3, generator=torch.Generator().manual_seed(1))
    )


def test_derivative_of_dist_at_zero_is_zero():
    x = torch.zeros(3, dtype=torch.complex128, requires_grad=True)
    (g,) = torch.autograd.grad(M.dist(x, torch.zeros_like(x)).sum(), x)
    assert torch.equal(g, torch.zeros_like(g))


def test_value_semantics():
    assert Euclidean() == M
    assert hash(Euclidean()) == hash(M)
    assert repr(M) == "Euclidean()"
    assert pickle.loads(pickle.dumps(M)) == copy.deepcopy(M) == M
