"""Blocks: several matrices in one tensor, each a point of the base, and free rows below them."""

import math

import pytest
import torch
from torch.func import vmap

from manopt_torch.manifolds import SPD, Blocks, Euclidean, Sphere, Stiefel, Unitary, View, view_for

WIDE = View(Stiefel(), "transpose")
DOUBLE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


@DOUBLE
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    ("base", "rows", "p"), [(Stiefel(), 5, 3), (WIDE, 2, 5), (SPD(), 3, 3), (Stiefel("canonical", "qr"), 4, 4)]
)
def test_every_method_is_the_one_of_the_base_on_each_block(base, rows, p, batch, dtype):
    """Two blocks on the base, and a third that is flat."""
    M, flat = Blocks(base, 2, of=3), Euclidean()
    x = M.random(*batch, 3 * rows, p, dtype=dtype)
    g, h = (torch.randn(x.shape, dtype=dtype) for _ in "gh")
    u, v = M.project(x, 0.3 * g), M.project(x, h)
    y = M.retract(x, u)
    on = [base] * 2 + [flat]

    def parts(t):
        return t.split(rows, -2)

    for name, args in {
        "project": (x, g), "rgrad": (x, g), "retract": (x, u), "nearest": (g,), "exp": (x, u), "log": (x, y),
        "weingarten": (x, u, g),
    }.items():  # fmt: skip
        expected = [getattr(m, name)(*map(torch.clone, own)) for m, *own in zip(on, *map(parts, args), strict=True)]
        torch.testing.assert_close(getattr(M, name)(*args), torch.cat(expected, -2), rtol=0, atol=1e-9)
    moved = zip(*(m.move(*own) for m, *own in zip(on, *map(parts, (x, u, v, u)), strict=True)), strict=True)
    for actual, expected in zip(M.move(x, u, v, u), moved, strict=True):
        torch.testing.assert_close(actual, torch.cat(expected, -2), rtol=0, atol=1e-9)
    inner = sum(base.inner(*own) for own in list(zip(*map(parts, (x, u, v)), strict=True))[:2])
    inner = inner + (parts(u)[2].conj() * parts(v)[2]).real.sum((-2, -1))
    torch.testing.assert_close(M.inner(x, u, v), inner)
    squares = [base.dist(a, b).square() for a, b in zip(parts(x)[:2], parts(y)[:2], strict=True)]
    squares.append((parts(y)[2] - parts(x)[2]).abs().square().sum((-2, -1)))
    torch.testing.assert_close(M.dist(x, y), sum(squares).sqrt(), rtol=1e-6, atol=1e-9)
    dims = [m.dim(*batch, rows, p, dtype=dtype) for m in on]
    assert M.dim(*batch, 3 * rows, p, dtype=dtype) == sum(dims)


@DOUBLE
def test_the_residual_sees_every_block_and_no_free_row(dtype):
    M = Blocks(Stiefel(), 2, of=3)
    x = M.random(12, 4, dtype=dtype)
    assert M.residual(x) < 1e-13
    x[8:] = 1e3
    assert M.residual(x) < 1e-13
    for block in (slice(0, 4), slice(4, 8)):
        y = x.clone()
        y[block] *= 2  # ‖4 I − I‖_F = 3 √4
        assert M.residual(y).item() == pytest.approx(6)
    assert M.residual(torch.cat([2 * x[:8], x[8:]])).item() == pytest.approx(6 * math.sqrt(2))
    assert not torch.allclose(x[:4], x[4:8])  # independent


def test_free_rows_of_a_random_point_have_length_one_on_average():
    free = Blocks(Stiefel(), 1, of=2).random(400, 200, 8)[:, 100:]
    assert free.square().sum(-1).mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / 8 / 40_000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_batch_of_blocks_under_vmap(dtype):
    M = Blocks(Stiefel(), 2, of=3)
    x = M.random(7, 9, 3, dtype=dtype)
    u = M.project(x, torch.randn(x.shape, dtype=dtype))
    torch.testing.assert_close(vmap(M.retract)(x, u), M.retract(x, u))


def test_constant_norm():
    assert Blocks(Stiefel(), 2).constant_norm
    assert not Blocks(Stiefel(), 2, of=3).constant_norm
    assert not Blocks(SPD(), 2).constant_norm


def test_repr_shows_the_numbers():
    assert repr(Blocks(Stiefel(), 2)) == "Blocks(base=Stiefel(), blocks=2)"
    assert repr(Blocks(WIDE, 4, of=6)) == f"Blocks(base={WIDE!r}, blocks=4, of=6)"


@pytest.mark.parametrize("arguments", [(Stiefel(), 0), (Stiefel(), 3, 2), (Sphere(), 2), (Euclidean(), 2)])
def test_impossible_blocks_are_refused(arguments):
    with pytest.raises(ValueError, match=r"base of matrices and 1 <= blocks <= of|must be"):
        Blocks(*arguments)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"rows in a multiple of 3, got shape \(4, 2\)"):
        Blocks(Stiefel(), 3).check_shape((4, 2))
    with pytest.raises(ValueError, match="view_for"):
        Blocks(Stiefel(), 2).check_shape((4, 3))


def test_view_for_blocks():
    assert view_for(Stiefel(), (6, 3), blocks=2, of=2) == Blocks(Stiefel(), 2)
    assert view_for(Stiefel(), (6, 4), blocks=1, of=2) == Blocks(WIDE, 1, of=2)
    assert view_for(Stiefel(), (4, 2, 3, 3), blocks=2, of=2) == View(Blocks(WIDE, 2), "flatten", ndim=4)
    assert view_for(Unitary(), (9, 3), blocks=3, of=3) == Blocks(Unitary(), 3)
    assert view_for(Sphere(), (6, 3), blocks=2, of=2) == Sphere()
    with pytest.raises(ValueError, match=r"no view of .* multiple of 4"):
        view_for(Stiefel(), (6, 3), blocks=4, of=4)
