"""Means, distances and geodesics: closed forms, first-order conditions, exact derivatives."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary
from manopt_torch.manifolds import Manifold
from manopt_torch.means import frechet_mean, geodesic, pairwise_dist

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def herm(a):
    return (a + a.mH) / 2


def gradient(manifold, x, points, weights=None):
    """Norm of the weighted mean of log_x(p): zero at the mean, and only there."""
    logs = manifold.log(x.expand_as(points), points)
    weights = torch.full(points.shape[:1], 1 / len(points)) if weights is None else weights
    return manifold.norm(x, torch.tensordot(weights.to(logs.dtype), logs, 1))


def sample(manifold, k, *shape, spread=0.3, dtype=torch.float64):
    """k points around one, at a distance of about ``spread`` times the root of the dimension."""
    x = manifold.random(*shape, dtype=dtype).expand(k, *shape)
    return manifold.exp(x, spread * manifold.project(x, torch.randn(k, *shape, dtype=dtype)))


# ------------------------------------------------------------ values
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_mean_of_two_matrices_is_their_geometric_mean(dtype):
    """X # Y = X^½ (X^-½ Y X^-½)^½ X^½, by SciPy."""
    x, y = SPD().random(2, 4, 4, dtype=dtype).numpy()
    root = scipy.linalg.sqrtm(x)
    inverse = np.linalg.inv(root)
    expected = torch.from_numpy(root @ scipy.linalg.sqrtm(inverse @ y @ inverse) @ root)
    points = torch.stack([torch.from_numpy(x), torch.from_numpy(y)])
    assert torch.allclose(frechet_mean(SPD(), points), expected, rtol=0, atol=1e-12)
    assert torch.allclose(geodesic(SPD(), *points, 0.5), expected, rtol=0, atol=1e-12)
    assert (expected - points.mean(0)).norm() > 0.05


def test_mean_of_commuting_matrices_is_the_exponential_of_the_mean_logarithm():
    values = torch.rand(5, 4, dtype=torch.float64) * 4 + 0.1
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.complex128))[0]
    weights = torch.tensor([1.0, 2, 0, 3, 1], dtype=torch.float64)
    points = q @ torch.diag_embed(values).to(q.dtype) @ q.mH
    expected = torch.exp((weights[:, None] * values.log()).sum(0) / weights.sum())
    found = q.mH @ frechet_mean(SPD(), points, weights) @ q
    assert torch.allclose(found, torch.diag(expected).to(q.dtype), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_condition_of_the_mean(dtype):
    points = SPD().random(9, 2, 4, 4, dtype=dtype)
    mean = frechet_mean(SPD(), points)
    assert mean.dtype == dtype
    assert SPD().residual(mean).max() < 1e-6
    assert gradient(SPD(), mean, points).max() < 1e3 * torch.finfo(dtype).eps
    assert gradient(SPD(), points.mean(0), points).min() > 1e-2


@pytest.mark.parametrize(
    ("manifold", "shape"),
    [(Sphere(), (4,)), (Unitary(), (3, 3)), (Stiefel(), (4, 2)), (Stiefel("canonical"), (4, 2)), (Euclidean(), (3,))],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_every_manifold_with_exp_and_log(manifold, shape, dtype):
    points = sample(manifold, 6, *shape, spread=0.15, dtype=dtype)
    mean = frechet_mean(manifold, points)
    assert manifold.residual(mean).max() < 1e-12
    assert gradient(manifold, mean, points).max() < 1e-12
    assert gradient(manifold, points[0], points).max() > 1e-2


def test_mean_on_the_euclidean_space_and_on_the_circle():
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    assert torch.allclose(frechet_mean(Euclidean(), x, w), (w * x).sum(0) / w.sum(0), atol=1e-14)
    angles = torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64)
    mean = frechet_mean(Sphere(), torch.stack([angles.cos(), angles.sin()], -1))
    assert torch.atan2(mean[1], mean[0]).item() == pytest.approx(0.2, abs=1e-14)


def test_far_apart_points_need_no_line_search():
    """Eigenvalues from 1e-6 to 1e6: a step of length 1 diverges there, see the last line."""
    q = torch.linalg.qr(torch.randn(6, 3, 3, dtype=torch.float64))[0]
    points = herm(q @ torch.diag(torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)) @ q.mH)
    mean = frechet_mean(SPD(), points, tol=1e-8)
    assert gradient(SPD(), mean, points) < 1e-6
    x = points[0]
    for _ in range(30):
        x = SPD().exp(x, SPD().log(x.expand_as(points), points).mean(0))
    assert not gradient(SPD(), x, points) < 1e-2


def test_batches_and_order_do_not_matter():
    points, weights = SPD().random(5, 2, 3, 3, 3, dtype=torch.float64), torch.rand(5, 2, 3, dtype=torch.float64)
    mean = frechet_mean(SPD(), points, weights)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.allclose(mean, frechet_mean(SPD(), points[order], weights[order]), atol=1e-12)
    one = frechet_mean(SPD(), points[:, 1, 2], weights[:, 1, 2])
    assert torch.allclose(mean[1, 2], one, atol=1e-12)
    assert torch.equal(frechet_mean(SPD(), points[:1, 0, 0]), points[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_congruence_equivariance(dtype):
    points, m = SPD().random(5, 3, 3, dtype=dtype), torch.randn(3, 3, dtype=dtype)
    moved = herm(m @ points @ m.mH)
    assert torch.allclose(frechet_mean(SPD(), moved), m @ frechet_mean(SPD(), points) @ m.mH, atol=1e-11)


def test_half_precision_is_rounded_once():
    points = SPD().random(4, 3, 3, dtype=torch.float32).bfloat16()
    mean = frechet_mean(SPD(), points)
    assert torch.equal(mean, frechet_mean(SPD(), points.float()).bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = frechet_mean(SPD(), points.float())
    assert torch.equal(inside, frechet_mean(SPD(), points.float()))


# ------------------------------------------------------------ derivatives
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives_of_the_mean_are_exact(dtype):
    """First and second, by finite differences; also where all points are I, and the iteration has nothing to do."""
    points = SPD().random(3, 2, 2, dtype=dtype)
    points[1] = torch.eye(2)
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)

    def mean(p, w):
        return frechet_mean(SPD(), herm(p), w)

    assert torch.autograd.gradcheck(mean, (points.requires_grad_(), weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(mean, (points, weights), fast_mode=True)
    same = torch.eye(2, dtype=dtype).repeat(3, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(mean, (same, weights), fast_mode=True)


def test_derivative_does_not_know_which_point_came_first():
    """When the first point is the mean already, it has no more than its share of the derivative."""
    x = SPD().random(3, 3, dtype=torch.float64)
    u = herm(torch.randn(3, 3, dtype=torch.float64))
    points = torch.stack([x, SPD().exp(x, u), SPD().exp(x, -u)])
    sides = []
    for order in ([0, 1, 2], [1, 2, 0]):
        p = points[order].clone().requires_grad_()
        (frechet_mean(SPD(), p) * u).sum().backward()
        sides.append(p.grad[order.index(0)])
    assert torch.allclose(*sides, atol=1e-10)
    p = points.clone().requires_grad_()
    (frechet_mean(SPD(), p, start=x) * u).sum().backward()
    assert torch.allclose(p.grad[0], sides[0], atol=1e-10)
    assert sides[0].norm() > 0.05


def test_derivative_on_the_sphere():
    """By finite differences."""
    points = sample(Sphere(), 4, 3, spread=0.2).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: frechet_mean(Sphere(), Sphere().nearest(p)), points)


# ------------------------------------------------------------ distances, geodesics
def test_pairwise_distances_are_those_of_generalized_eigenvalues():
    x, y = SPD().random(3, 4, 4, dtype=torch.complex128), SPD().random(2, 4, 4, dtype=torch.complex128)
    ratios = [[scipy.linalg.eigh(b, a, eigvals_only=True) for b in y.numpy()] for a in x.numpy()]
    expected = torch.tensor(np.array(ratios)).log().norm(dim=-1)
    assert torch.allclose(pairwise_dist(SPD(), x, y), expected, atol=1e-12)
    x.requires_grad_()
    pairwise_dist(SPD(), x, x).sum().backward()  # zero distances too
    assert x.grad.isfinite().all()


def test_pairwise_distances_by_batch():
    x, y = Sphere().random(3, 2, 4), Sphere().random(5, 2, 4)
    found = pairwise_dist(Sphere(), x, y)
    assert found.shape == (3, 5, 2)
    assert found[1, 4, 1].item() == pytest.approx(math.acos(float(x[1, 1] @ y[4, 1])), abs=1e-5)


@pytest.mark.parametrize(("manifold", "shape"), [(SPD(), (3, 3)), (Sphere(), (4,)), (Unitary(), (3, 3))])
def test_geodesic_has_constant_speed(manifold, shape):
    x, y = sample(manifold, 2, *shape, spread=0.2, dtype=torch.complex128)
    whole = manifold.dist(x, y)
    assert torch.allclose(geodesic(manifold, x, y, 1.0), y, atol=1e-12)
    assert torch.allclose(geodesic(manifold, x, y, 0.0), x, atol=1e-14)
    for t in (0.25, 0.8):
        z = geodesic(manifold, x, y, t)
        assert torch.allclose(manifold.dist(x, z), t * whole, atol=1e-12)
        assert torch.allclose(manifold.dist(z, y), (1 - t) * whole, atol=1e-12)
    both = geodesic(manifold, x.expand(2, *shape), y.expand(2, *shape), torch.tensor([0.25, 0.8], dtype=torch.float64))
    assert torch.allclose(both[1], z, atol=1e-13)


def test_derivatives_of_a_geodesic():
    x, y = SPD().random(2, 2, 2, dtype=torch.complex128)
    t = torch.tensor(0.3, dtype=torch.float64)
    inputs = [z.requires_grad_() for z in (x, y, t)]
    assert torch.autograd.gradcheck(lambda x, y, t: geodesic(SPD(), herm(x), herm(y), t), inputs)


# ------------------------------------------------------------ errors
@dataclasses.dataclass(frozen=True)
class Ray(Manifold):
    """Positive numbers, of which it says nothing more than it must."""

    event_dim = 0
    event_shapes = ((),)

    def project(self, x, v):
        return v

    def retract(self, x, u):
        return x * torch.exp(u / x)

    def residual(self, x):
        return (x <= 0).to(x.dtype)

    def random(self, *shape, dtype=None, device=None, generator=None):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).exp()


def test_errors():
    points = SPD().random(3, 2, 2)
    with pytest.raises(ValueError, match=r"must have shape \(K, \*B, \*S\)"):
        frechet_mean(SPD(), points[0])
    with pytest.raises(ValueError, match="K >= 1"):
        frechet_mean(SPD(), points[:0])
    with pytest.raises(ValueError, match="square"):
        frechet_mean(SPD(), torch.zeros(3, 2, 1))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        frechet_mean(SPD(), points, torch.ones(2))
    with pytest.raises(ValueError, match="weights must be real"):
        frechet_mean(SPD(), points, torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"start must have the shape \(2, 2\)"):
        frechet_mean(SPD(), points, start=points)
    with pytest.raises(ValueError, match="max_iter"):
        frechet_mean(SPD(), points, max_iter=0)
    with pytest.raises(ValueError, match="y must be a sample"):
        pairwise_dist(SPD(), points, points[0])
    with pytest.raises(NotImplementedError, match="has no log"):
        frechet_mean(Ray(), points[:, 0, 0])
