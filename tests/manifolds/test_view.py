"""View and view_for: the same manifold in another layout, and which layout fits which weight."""

import copy
import pickle

import pytest
import torch
from torch import nn

from manopt_torch.manifolds import SPD, Euclidean, Sphere, Stiefel, Unitary, View, view_for

WIDE = View(Stiefel(), "transpose")
KERNEL = View(Stiefel(), "flatten", ndim=4)
WIDE_KERNEL = View(WIDE, "flatten", ndim=4)
DOUBLE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
LAYOUTS = pytest.mark.parametrize(
    ("view", "shape", "matrix"),
    [
        pytest.param(WIDE, (3, 5), lambda t: t.mT, id="wide"),
        pytest.param(KERNEL, (30, 2, 3, 2), lambda t: t.flatten(-3), id="kernel"),
        pytest.param(WIDE_KERNEL, (4, 2, 3, 2), lambda t: t.flatten(-3).mT, id="wide kernel"),
        pytest.param(View(Stiefel("canonical", "qr"), "flatten", ndim=3), (7, 2, 3), lambda t: t.flatten(-2), id="qr"),
        pytest.param(View(Sphere(), "flatten", ndim=3), (2, 3, 2), lambda t: t.flatten(-3), id="sphere"),
        pytest.param(View(Sphere("projection"), "flatten", ndim=2), (4, 3), lambda t: t.flatten(-2), id="frobenius"),
    ],
)


@LAYOUTS
@DOUBLE
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_every_method_is_the_one_of_the_base(view, shape, matrix, batch, dtype):
    base = view.base if view is not WIDE_KERNEL else view.base.base
    x, g = view.random(*batch, *shape, dtype=dtype), torch.randn(*batch, *shape, dtype=dtype)
    assert x.shape == (*batch, *shape)
    assert x.is_contiguous()
    u, v = view.project(x, 0.3 * g), view.rgrad(x, g.flip(0))
    y = view.retract(x, u)
    seen = matrix(x)
    for actual, expected in (
        (view.residual(x), base.residual(seen)),
        (view.inner(x, u, v), base.inner(seen, matrix(u), matrix(v))),
        (view.norm(x, u), base.norm(seen, matrix(u))),
        (view.dist(x, y), base.dist(seen, matrix(y))),
        (matrix(u), base.project(seen, matrix(0.3 * g))),
        (matrix(v), base.rgrad(seen, matrix(g.flip(0)))),
        (matrix(y), base.retract(seen, matrix(u))),
        (matrix(view.exp(x, u)), base.exp(seen, matrix(u))),
        (matrix(view.log(x, y)), base.log(seen, matrix(y))),
        (matrix(view.nearest(g)), base.nearest(matrix(g))),
        (matrix(view.move(x, u, v, g)[1]), base.move(seen, matrix(u), matrix(v), matrix(g))[1]),
        (matrix(view.move(x, u, v, g)[2]), base.move(seen, matrix(u), matrix(v), matrix(g))[2]),
        (matrix(view.transport(x, u, v)), base.transport(seen, matrix(u), matrix(v))),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert view.residual(x).max() < 1e-14
    assert view.nearest(g).is_contiguous()
    assert view.event_dim == len(shape)
    assert view.dim(*batch, *shape, dtype=dtype) == base.dim(*seen.shape, dtype=dtype)
    for name in ("constant_norm", "isometric", "second_order", "step_limit"):
        assert getattr(view, name) == getattr(base, name)


@DOUBLE
def test_rows_of_a_wide_weight_are_orthonormal(dtype):
    w = WIDE.random(3, 5, dtype=dtype)
    torch.testing.assert_close(w @ w.mH, torch.eye(3, dtype=dtype))
    k = WIDE_KERNEL.random(4, 2, 3, 2, dtype=dtype).flatten(1)
    torch.testing.assert_close(k @ k.mH, torch.eye(4, dtype=dtype))


def test_broadcasting_and_half_precision():
    x = WIDE.random(3, 5)
    u = WIDE.project(x, torch.randn(7, 3, 5))
    assert [t.shape for t in WIDE.move(x, u, x)] == [(7, 3, 5)] * 2
    x = KERNEL.random(20, 2, 2, 2)
    u = KERNEL.project(x, torch.randn(7, 20, 2, 2, 2))
    y, v = KERNEL.move(x, u, x)
    assert y.shape == v.shape == KERNEL.log(x, y).shape == (7, 20, 2, 2, 2)
    half = KERNEL.random(20, 2, 2, 2, dtype=torch.bfloat16)
    y = KERNEL.retract(half, KERNEL.project(half, torch.randn_like(half)))
    assert y.dtype == half.dtype
    assert y.isfinite().all()


# ------------------------------------------------------------ view_for
@pytest.mark.parametrize(
    ("manifold", "layer", "expected"),
    [
        (Stiefel(), nn.Linear(3, 5), Stiefel()),
        (Stiefel(), nn.Linear(4, 4), Stiefel()),
        (Stiefel(), nn.Linear(5, 3), WIDE),
        (Stiefel("canonical"), nn.Linear(5, 3), View(Stiefel("canonical"), "transpose")),
        (Stiefel(), nn.Conv1d(2, 3, 5), View(WIDE, "flatten", ndim=3)),
        (Stiefel(), nn.Conv1d(2, 30, 5), View(Stiefel(), "flatten", ndim=3)),
        (Stiefel(), nn.Conv2d(3, 8, 3), WIDE_KERNEL),
        (Stiefel(), nn.Conv2d(3, 64, 3), KERNEL),
        (Stiefel(), nn.Conv2d(4, 36, 3, groups=4), KERNEL),
        (Stiefel(), nn.Conv3d(2, 8, 3), View(WIDE, "flatten", ndim=5)),
        (Stiefel(), nn.ConvTranspose2d(3, 8, 3), WIDE_KERNEL),
        (Unitary(), nn.Linear(4, 4), Unitary()),
        (Unitary(), nn.Conv2d(1, 9, 3), View(Unitary(), "flatten", ndim=4)),
        (SPD(), nn.Linear(4, 4), SPD()),
        (Sphere(), nn.Linear(5, 3), Sphere()),
        (Euclidean(), nn.Conv2d(3, 8, 3), Euclidean()),
    ],
    ids=str,
)
def test_view_for_the_weights_of_layers(manifold, layer, expected):
    view = view_for(manifold, layer.weight.shape)
    assert view == expected
    view.check_shape(tuple(layer.weight.shape))
    assert view.residual(view.random(*layer.weight.shape)).max() < 1e-5


def test_view_for_batches():
    assert view_for(Stiefel(), (6, 5, 3), batch_dims=1) == Stiefel()
    assert view_for(Stiefel(), (6, 3, 5), batch_dims=1) == WIDE
    assert view_for(Stiefel(), (2, 6, 3, 5), batch_dims=2) == WIDE
    assert view_for(Stiefel(), (6, 4, 2, 3, 3), batch_dims=1) == WIDE_KERNEL
    assert view_for(Stiefel(), (6, 3, 5)) == View(WIDE, "flatten", ndim=3)
    assert view_for(Sphere(), (6, 3, 5)) == Sphere()


@pytest.mark.parametrize(
    ("manifold", "shape"),
    [
        (Stiefel(), (3,)),
        (Stiefel(), ()),
        (Unitary(), (3, 4)),
        (Unitary(), (4, 3, 3, 3)),
        (SPD(), (2, 3)),
        (Sphere(), ()),
    ],
)
def test_view_for_says_what_does_not_fit(manifold, shape):
    with pytest.raises(ValueError, match="no view of") as caught:
        view_for(manifold, shape)
    assert repr(manifold) in str(caught.value)
    assert str(shape) in str(caught.value)


# ------------------------------------------------------------ as a value
def test_impossible_views_are_refused():
    for arguments in (
        (Sphere(), "transpose"),
        (Euclidean(), "flatten", 2),
        (Stiefel(), "flatten", 1),
        (Stiefel(), "flatten"),
        (Stiefel(), "transpose", 2),
        (Stiefel(), "reverse"),
    ):
        with pytest.raises(ValueError, match=r"flatten|fit|must be one of"):
            View(*arguments)
    with pytest.raises(ValueError, match="Stiefel"):
        WIDE.check_shape((5, 3))
    with pytest.raises(ValueError, match="Stiefel"):
        WIDE.random(5, 3)
    with pytest.raises(ValueError, match="at least 4"):
        KERNEL.check_shape((5, 3))


def test_value_semantics():
    assert repr(WIDE) == "View(base=Stiefel(), op='transpose')"
    assert repr(WIDE_KERNEL) == "View(base=View(base=Stiefel(), op='transpose'), op='flatten', ndim=4)"
    for view in (WIDE, KERNEL, WIDE_KERNEL, View(Sphere("projection"), "flatten", 2)):
        assert pickle.loads(pickle.dumps(view)) == copy.deepcopy(view) == eval(repr(view)) == view
    assert len({WIDE, View(Stiefel(), "transpose"), KERNEL, View(Stiefel("canonical"), "transpose")}) == 3


def test_event_shapes_are_points():
    for view in (WIDE, KERNEL, WIDE_KERNEL, View(Sphere(), "flatten", ndim=3)):
        for shape in view.event_shapes:
            assert len(shape) == view.event_dim
            view.check_shape(shape)
