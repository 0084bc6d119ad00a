"""Sphere: closed forms, mpmath at extreme angles, moments, and cases that users of comparable libraries met."""

import copy
import math
import pickle

import mpmath
import pytest
import torch
from torch.func import jvp

from manopt_torch.manifolds import Sphere

M = Sphere()
BOTH = pytest.mark.parametrize("sphere", [Sphere("exp"), Sphere("projection")], ids=repr)
DOUBLE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


def tangent(x, length=None):
    u = M.project(x, torch.randn_like(x))
    return u if length is None else u * (length / M.norm(x, u))[..., None]


# ------------------------------------------------------------ cases
def test_case_01_distance_of_close_and_opposite_points():
    for angle in (0.0, 1e-3):
        x = torch.tensor([1.0, 0.0, 0.0])
        y = torch.tensor([math.cos(angle), math.sin(angle), 0.0])
        assert M.dist(x, y).item() == pytest.approx(angle, rel=1e-4, abs=0)
        assert M.dist(x, -x).item() == pytest.approx(math.pi, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_case_02_log_of_antipodes_has_length_pi(n, dtype):
    x = torch.cat([M.random(20, n, dtype=dtype), torch.eye(n, dtype=dtype)])
    u = M.log(x, -x)
    if n == 1 and not dtype.is_complex:  # two points, no direction
        assert u.isnan().all()
        return
    tol = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(M.norm(x, u), torch.full_like(x[:, 0].real, math.pi), rtol=tol, atol=tol)
    torch.testing.assert_close(M.exp(x, u), -x, rtol=0, atol=tol)
    torch.testing.assert_close(M.project(x, u), u, rtol=0, atol=tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_case_04_derivative_of_log_at_coincident_points(dtype):
    x = torch.tensor([1.0, 0.0, 0.0], dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    gx, gy = torch.autograd.grad(M.log(x, y).sum(), (x, y))
    assert gx.tolist() == [0, -1, -1]
    assert gy.tolist() == [0, 1, 1]


# ------------------------------------------------------------ closed forms
@pytest.mark.parametrize("angle", [1e-12, 1e-8, 1e-3, 0.4, 0.5, 0.51, 1.0, 1.6, 3.0, math.pi - 1e-6, 3.5, 20.0])
def test_exp_and_transport_along_a_great_circle(angle):
    x, e2, e3 = torch.eye(3, dtype=torch.float64)
    y, velocity, across = Sphere("exp").move(x, angle * e2, e2, e3)
    with mpmath.workdps(40):
        s, c = float(mpmath.sin(angle)), float(mpmath.cos(angle))
    torch.testing.assert_close(y, c * x + s * e2, rtol=0, atol=1e-15)
    torch.testing.assert_close(velocity, c * e2 - s * x, rtol=0, atol=1e-15)
    torch.testing.assert_close(across, e3, rtol=0, atol=0)


@pytest.mark.parametrize("length", [1e-9, 1e-3, 1.0, 1e3])
def test_projection_turns_by_arctan(length):
    x, e2, e3 = torch.eye(3, dtype=torch.float64)
    y, velocity, across = Sphere("projection").move(x, length * e2, e2, e3)
    r = math.hypot(1, length)
    torch.testing.assert_close(y, (x + length * e2) / r, rtol=0, atol=1e-15)
    torch.testing.assert_close(velocity, (e2 - length * x) / r, rtol=0, atol=1e-15)
    torch.testing.assert_close(across, e3, rtol=0, atol=0)


@DOUBLE
@pytest.mark.parametrize("angle", [1e-10, 1e-5, 0.3, 1.5, 1.6, 3.0, math.pi - 1e-5, math.pi - 1e-9])
def test_log_and_dist_at_every_angle(angle, dtype):
    x = M.random(50, 4, dtype=dtype)
    u = tangent(x, angle)
    y = M.exp(x, u)
    torch.testing.assert_close(M.dist(x, y), torch.full((50,), angle, dtype=torch.float64), rtol=0, atol=4e-15)
    w = M.log(x, y)
    torch.testing.assert_close(M.norm(x, w), M.dist(x, y), rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(M.exp(x, w), y, rtol=0, atol=4e-15)
    torch.testing.assert_close(w, u, rtol=0, atol=4e-15 * angle / math.sin(angle))  # rounding of y, times the condition


def test_dist_against_mpmath():
    x, y = M.random(20, 5, dtype=torch.float64), M.random(20, 5, dtype=torch.float64)
    with mpmath.workdps(40):
        for a, b, d in zip(x.tolist(), y.tolist(), M.dist(x, y).tolist(), strict=True):
            a, b = mpmath.matrix(a), mpmath.matrix(b)
            cosine = (a.T * b)[0] / (mpmath.norm(a) * mpmath.norm(b))
            assert d == pytest.approx(float(mpmath.acos(cosine)), rel=1e-14)


@BOTH
def test_complex_sphere_is_the_real_one_of_twice_the_dimension(sphere):
    def real(t):
        return torch.view_as_real(t).flatten(-2)

    x, y = sphere.random(6, 3, dtype=torch.complex128), sphere.random(6, 3, dtype=torch.complex128)
    u, v = tangent(x), tangent(x)
    for a, b in zip(sphere.move(x, u, v), sphere.move(real(x), real(u), real(v)), strict=True):
        torch.testing.assert_close(real(a), b)
    torch.testing.assert_close(real(sphere.log(x, y)), sphere.log(real(x), real(y)))
    torch.testing.assert_close(real(sphere.project(x, y)), sphere.project(real(x), real(y)))
    torch.testing.assert_close(sphere.dist(x, y), sphere.dist(real(x), real(y)))
    torch.testing.assert_close(sphere.inner(x, u, v), sphere.inner(real(x), real(u), real(v)))


def test_residual_is_the_distance_from_the_sphere():
    torch.testing.assert_close(M.residual(torch.tensor([[3.0, 4.0], [0.0, 0.5]])), torch.tensor([4.0, 0.5]))


# ------------------------------------------------------------ derivatives
@DOUBLE
@pytest.mark.parametrize("angle", [0.0, 1e-4, 0.7, 1.5, 1.6, 2.9])
def test_derivatives_of_log_first_and_second(angle, dtype):
    x = M.random(3, dtype=dtype)
    y = M.exp(x, tangent(x, angle))

    def log(x, y):
        return M.log(M.nearest(x), M.nearest(y))

    points = (x.requires_grad_(), y.detach().requires_grad_())
    assert torch.autograd.gradcheck(log, points, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(log, points, rtol=1e-5)


@DOUBLE
def test_gradient_of_dist_is_the_unit_vector_away(dtype):
    x, y = M.random(10, 4, dtype=dtype).requires_grad_(), M.random(10, 4, dtype=dtype)
    (g,) = torch.autograd.grad(M.dist(x, y).sum(), x)
    x = x.detach()
    torch.testing.assert_close(M.rgrad(x, g), -M.log(x, y) / M.dist(x, y)[:, None])


@BOTH
@DOUBLE
def test_derivatives_of_move_at_zero(sphere, dtype):
    """R(tv) = x + tv − t²‖v‖²x/2 + O(t³), and v is carried to v − t‖v‖²x + O(t²)."""
    x = sphere.random(5, 4, dtype=dtype)
    v = tangent(x)

    def velocity(u):
        return jvp(lambda u: sphere.move(x, u, v), (u,), (v,))[1]

    first, second = jvp(velocity, (torch.zeros_like(x),), (v,))
    square = (v.abs() ** 2).sum(-1, keepdim=True)
    torch.testing.assert_close(first[0], v)
    torch.testing.assert_close(first[1], -square * x)
    torch.testing.assert_close(second[0], -square * x)


# ------------------------------------------------------------ uniform distribution
@pytest.mark.parametrize(("dtype", "fourth"), [(torch.float64, 3 / (4 * 6)), (torch.complex128, 2 / (4 * 5))])
def test_moments_of_random_points(dtype, fourth):
    x = M.random(40_000, 4, dtype=dtype)
    assert M.residual(x).max() < 1e-15
    for sample, mean in ((x, 0), (x.abs() ** 2, 1 / 4), (x.abs() ** 4, fourth)):
        error = (sample.mean(0) - mean).abs()
        assert (error < 5 * sample.std(0).abs() / 200).all()  # five standard errors
    assert M.dim(7, 4, dtype=dtype) == 7 * (7 if dtype.is_complex else 3)


# ------------------------------------------------------------ numbers at the edge
def test_nearest_of_zero_tiny_and_huge_vectors():
    z = torch.tensor([[0.0, 0.0, 0.0], [3e-30, 0.0, -4e-30], [3e30, 0.0, 4e30], [1e-45, 0.0, 0.0]], requires_grad=True)
    y = M.nearest(z)
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.0, -0.8], [0.6, 0.0, 0.8], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(y, expected)
    (g,) = torch.autograd.grad(y[0].sum(), z)
    assert torch.equal(g[0], torch.zeros(3))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_no_drift(sphere, dtype):
    x = sphere.random(8, 5, dtype=dtype)
    direction = torch.randn_like(x)
    for _ in range(1000):
        x = sphere.retract(x, sphere.project(x, direction) * 0.1)
    assert sphere.residual(x).max() < 5e-7


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(sphere, dtype):
    x = sphere.random(20, 6, dtype=dtype)
    assert x.dtype == dtype
    y, v = sphere.move(x, sphere.project(x, torch.randn_like(x)), sphere.project(x, torch.randn_like(x)))
    assert y.dtype == v.dtype == sphere.dist(x, y).dtype == dtype
    for t in (y, v, sphere.log(x, y), sphere.dist(x, y), sphere.exp(x, v), sphere.nearest(v)):
        assert t.isfinite().all()
    assert sphere.residual(y.double()).max() < 2 * torch.finfo(dtype).eps


@BOTH
def test_nan_stays_in_its_batch_element(sphere):
    x = sphere.random(3, 4)
    u = tangent(x, 0.5)
    v = u.clone()
    v[1] = math.nan
    for f in (
        lambda t: sphere.move(x, t, u)[0],
        lambda t: sphere.move(x, t, u)[1],
        lambda t: sphere.exp(x, t),
        lambda t: sphere.log(x, t),
        lambda t: sphere.dist(x, t),
        lambda t: sphere.norm(x, t),
        sphere.nearest,
        sphere.residual,
    ):
        good, bad = f(u), f(v)
        assert torch.equal(good[[0, 2]], bad[[0, 2]])
        assert bad[1].isnan().any()


@BOTH
def test_empty_batches_and_broadcasting(sphere):
    x = sphere.random(0, 3)
    assert sphere.move(x, x, x)[1].shape == sphere.log(x, x).shape == sphere.nearest(x).shape == (0, 3)
    assert sphere.dist(x, x).shape == sphere.residual(x).shape == (0,)
    x = sphere.random(3)
    u = sphere.project(x, torch.randn(7, 3))
    y, v = sphere.move(x, u, x.flip(0))
    assert y.shape == v.shape == sphere.log(x, y).shape == (7, 3)
    assert sphere.dist(x, y).shape == sphere.inner(x, u, u[0]).shape == (7,)
    torch.testing.assert_close(y[3], sphere.retract(x, u[3]))


def test_value_semantics():
    assert repr(Sphere()) == "Sphere()"
    assert repr(Sphere("projection")) == "Sphere(retraction='projection')"
    assert Sphere("exp") == Sphere() != Sphere("projection")
    assert len({Sphere(), Sphere("exp"), Sphere("projection")}) == 2
    assert pickle.loads(pickle.dumps(Sphere("projection"))) == copy.deepcopy(Sphere("projection"))
    with pytest.raises(ValueError, match="retraction of Sphere must be one of"):
        Sphere("exponential")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize("length", [1e8, 1e19, 1e20, 1e30])
def test_a_step_whose_square_overflows_stays_on_the_sphere(sphere, dtype, length):
    x = sphere.random(20, 5, dtype=dtype)
    y = sphere.retract(x, sphere.project(x, torch.randn_like(x) * length))
    assert sphere.residual(y).max() < 1e-6
    assert sphere.residual(sphere.retract(x, torch.full_like(x, torch.nan))).isnan().all()
