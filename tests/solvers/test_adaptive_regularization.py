"""``AdaptiveRegularization``: the cubic model against its optimality conditions, order, optima, saddles."""

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import torch

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary
from manopt_torch.manifolds.product import Product
from manopt_torch.solvers import AdaptiveRegularization, minimize
from manopt_torch.solvers.adaptive_regularization import cubic_minimizer
from manopt_torch.testing import SOLVER_LAWS, check_solver

both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
modes = pytest.mark.parametrize("hessian", ["exact", "difference"])


# ---------------------------------------------------------------------- the model
@pytest.mark.parametrize("sigma", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_cubic_model_is_minimized(sigma, shift, scale):
    """(T + λI) y = −c e₁, λ = σ‖y‖ and T + λI ≥ 0 hold at the global minimum, and nowhere else."""
    rng = np.random.default_rng(0)
    beside = rng.uniform(0.5, 1, 5)
    t = scale * (np.diag(rng.normal(size=6) + shift) + np.diag(beside, 1) + np.diag(beside, -1))
    sigma, slope = scale * sigma, 0.7 * scale
    y = cubic_minimizer(t, slope, sigma)
    weight = sigma * np.linalg.norm(y)
    residual = t @ y + weight * y + slope * np.eye(6)[0]
    size = np.linalg.norm(t, 2) + weight
    assert np.linalg.norm(residual) < 1e-12 * (size * np.linalg.norm(y) + slope)
    assert np.linalg.eigvalsh(t)[0] + weight > -1e-12 * size


def test_one_dimension_by_hand():
    """2y + y²/2 + |y|³ is least where 2 + y − 3y² = 0 and y < 0: at (1 − √25)/6."""
    (y,) = cubic_minimizer(np.array([[1.0]]), 2.0, 3.0)
    assert math.isclose(y, (1 - math.sqrt(1 + 24)) / 6, rel_tol=1e-14)


# ---------------------------------------------------------------------- orders and optima
def norms(cost, manifold, x0, solver=None, **settings):
    seen, solver = [], solver or AdaptiveRegularization()
    result = minimize(cost, manifold, x0, solver, callback=lambda r: seen.append(r.grad_norm), **settings)
    assert result.success, result.message
    return result, seen


@both
def test_order_on_brocketts_cost(dtype):
    """tr(XᴴAX N) with N = diag(3, 2, 1): 3·1 + 2·2 + 1·3."""
    q = torch.linalg.qr(torch.randn(10, 10, dtype=dtype))[0]
    a = (q * torch.arange(1, 11)) @ q.mH
    n = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    x0 = Stiefel().random(10, 3, dtype=dtype)
    cost = lambda x: (n * (x.conj() * (a @ x)).sum(-2).real).sum()  # noqa: E731
    result, seen = norms(cost, Stiefel(), x0, tolerance_grad=1e-11)
    assert abs(result.fun - 10) < 1e-10
    steps = itertools.pairwise(e for e in seen if e < 0.3)
    orders = [math.log(after) / math.log(before) for before, after in steps if after > 1e-12]
    assert orders[-1] >= 1.8


def test_case_16_unitary_procrustes():
    """The nearest unitary matrix is the polar factor."""
    a = torch.randn(3, 3, dtype=torch.complex128)
    nearest = torch.from_numpy(scipy.linalg.polar(a.numpy())[0])
    result, _ = norms(lambda x: (x - a).abs().square().sum(), Unitary(), torch.eye(3, dtype=torch.complex128))
    assert abs(result.fun - (nearest - a).abs().square().sum()) < 1e-10
    torch.testing.assert_close(result.x, nearest, atol=1e-7, rtol=0)


@both
@modes
def test_mean_of_two_definite_matrices(dtype, hessian):
    """The midpoint of a geodesic, A^½ (A^-½ B A^-½)^½ A^½, in NumPy."""
    a, b = SPD().random(2, 4, 4, dtype=dtype)
    root = scipy.linalg.sqrtm(a.numpy())
    inverse = np.linalg.inv(root)
    middle = torch.from_numpy(root @ scipy.linalg.sqrtm(inverse @ b.numpy() @ inverse) @ root).to(dtype)
    cost = lambda x: SPD().dist(x, a).square() + SPD().dist(x, b).square()  # noqa: E731
    result, _ = norms(cost, SPD(), torch.eye(4, dtype=dtype), AdaptiveRegularization(hessian=hessian))
    assert abs(result.fun - SPD().dist(a, b).square() / 2) < 1e-10
    torch.testing.assert_close(result.x, middle, atol=1e-6, rtol=1e-6)


def test_a_product_in_single_precision():
    """min ‖X B − C‖², X a frame: what is left of C beyond its two largest singular values."""
    c = torch.randn(6, 5)
    M = Product(Stiefel(), Euclidean())
    result, _ = norms(lambda x, b: (x @ b - c).square().sum(), M, M.random((6, 2), (2, 5)))
    best = torch.linalg.svdvals(c)[2:].square().sum().item()
    assert abs(result.fun - best) < 1e-5 * best
    assert all(t.dtype == torch.float32 for t in result.x)


@both
@modes
@pytest.mark.parametrize("i", [1, 2, 4])
def test_a_start_at_a_saddle_is_left(i, dtype, hessian):
    """The i-th eigenvector: the gradient is zero, bit for bit."""
    a, x0 = torch.arange(1, 6), torch.eye(5, dtype=dtype)[i]
    cost = lambda x: (a * (x.conj() * x).real).sum()  # noqa: E731
    result, _ = norms(cost, Sphere(), x0, AdaptiveRegularization(hessian=hessian))
    assert abs(result.fun - 1) < 1e-10


def test_steps_that_are_not_taken_cost_no_products():
    """A σ that is far too small: the cost is asked again and again, the Hessian once in each dimension."""
    x0 = torch.tensor([3.0, -2.0], dtype=torch.float64)
    cost = lambda x: torch.log(torch.cosh(x)).sum()  # noqa: E731
    result = minimize(cost, Euclidean(), x0, AdaptiveRegularization(1e-6), max_iter=1)
    assert result.nfev > 4
    assert result.nhev <= 2


@pytest.mark.parametrize("law", [law for law in SOLVER_LAWS if not law.startswith("S9 ")])
def test_laws_with_differences(law):
    """Not S9: where the difference is taken is no isometry's business, and its error is seen in the iterates."""
    check_solver(AdaptiveRegularization(hessian="difference"), Stiefel(), (5, 3), laws=[law])


@pytest.mark.parametrize(
    ("settings", "match"), [({"sigma": 0.0}, "sigma"), ({"kappa": 1.0}, "kappa"), ({"theta": 0.0}, "theta")]
)
def test_refused_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        AdaptiveRegularization(**settings)
