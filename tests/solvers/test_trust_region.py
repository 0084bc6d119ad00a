"""Second derivatives on every manifold, and ``TrustRegion``: orders, saddles, what it refuses."""

import itertools
import math

import pytest
import scipy.linalg
import torch

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary, View
from manopt_torch.manifolds.product import Product
from manopt_torch.solvers import GradientDescent, Problem, TrustRegion, minimize
from manopt_torch.solvers.curvature import lanczos
from manopt_torch.solvers.expansion import Expansion
from manopt_torch.solvers.problem import combine
from manopt_torch.testing import SOLVER_LAWS, check_solver

both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
modes = pytest.mark.parametrize("hessian", ["exact", "difference"])
MANIFOLDS = [
    (Euclidean(), (4,)),
    (Sphere(), (2, 4)),
    *(
        (Stiefel(metric, retraction), (2, 5, 2))
        for metric in ("euclidean", "canonical")
        for retraction in ("cayley", "qr")
    ),
    (Stiefel(), (2, 3, 3)),
    *((Stiefel(retraction=retraction), (5, 2)) for retraction in ("polar", "exp", "newton_schulz")),
    *((Unitary(retraction), (2, 3, 3)) for retraction in ("cayley", "exp")),
    *((SPD(retraction=retraction), (2, 3, 3)) for retraction in ("exp", "second_order", "cayley")),
    (View(Stiefel(), "transpose"), (2, 2, 5)),
]


def smooth(M, *shape, dtype):
    """A cost with no symmetry, of the fourth degree."""
    a, b = torch.randn(3, *shape, dtype=dtype), torch.randn(3)

    def cost(x):
        s = (a.conj() * x).sum(tuple(range(1, a.ndim)))
        s = s.real if s.is_complex() else s
        return (b * s).sum() + s.square().sum() + (s**4).sum() / 10 + (x.abs() ** 4).sum()

    return cost


def tangent(M, x):
    return M.project(x, tuple(torch.randn_like(t) for t in x))


def unit(M, x):
    u = tangent(M, x)
    return combine((1 / M.norm(x, u), u))


# ---------------------------------------------------------------------- second derivatives
@both
@modes
@pytest.mark.parametrize(("manifold", "shape"), MANIFOLDS, ids=str)
def test_second_derivatives_through_every_retraction(manifold, shape, dtype, hessian):
    """⟨H u, v⟩ is the mixed second derivative of f∘R_x at 0, by central differences of first derivatives."""
    M = Product(manifold)
    x = M.random(shape, dtype=dtype)
    u, v = unit(M, x), unit(M, x)
    cost = smooth(manifold, *shape, dtype=dtype)

    def slope(t):
        s = torch.zeros((), dtype=torch.float64, requires_grad=True)
        f = cost(*M.retract(x, tuple(t * a + s * b for a, b in zip(u, v, strict=True))))
        return torch.autograd.grad(f, s)[0]

    h = 1e-5
    expected = (slope(h) - slope(-h)) / (2 * h)
    there = Expansion(Problem(cost, M), x, exact=hessian == "exact")
    hu = there.product(u)
    scale = M.norm(x, hu).item()
    assert scale > 1e-3
    tolerance = (1e-6 if hessian == "difference" else 1e-8) * max(1.0, scale)
    assert abs(M.inner(x, hu, v) - expected) < 100 * tolerance
    assert all(torch.linalg.vector_norm(a - b) < 1e-10 * scale for a, b in zip(hu, M.project(x, hu), strict=True))
    assert (
        abs(M.inner(x, hu, v) - M.inner(x, u, there.product(v))) < (1e-5 if hessian == "difference" else 1e-12) * scale
    )


@modes
@both
def test_case_80_hessian_of_a_product(dtype, hessian):
    """⟨d, H d⟩ is the second derivative of the cost along the geodesic; weights are part of the metric."""
    M = Product(Euclidean(), Unitary("exp"), weights=(3.0, 0.5))
    x = M.random((3, 3), (3, 3), dtype=dtype)
    a = torch.randn(3, 3, dtype=dtype)

    def cost(b, q):
        return (b @ q - a).abs().square().sum() + (q @ a @ q.mH @ b).sum().abs().square()

    d, h = unit(M, x), 1e-3
    values = [cost(*M.exp(x, combine((t * h, d)))).item() for t in (-2, -1, 0, 1, 2)]
    second = sum(w * f for w, f in zip((-1, 16, -30, 16, -1), values, strict=True)) / (12 * h**2)
    found = M.inner(x, d, Expansion(Problem(cost, M), x, exact=hessian == "exact").product(d)).item()
    assert abs(found - second) < 1e-5 * max(1.0, abs(second))


def test_a_product_runs_the_cost_no_more():
    calls = []

    def cost(x):
        calls.append(1)
        return (x**4).sum()

    problem = Problem(cost, Product(Euclidean()))
    x = (torch.randn(3, dtype=torch.float64),)
    there = Expansion(problem, x)
    for _ in range(3):
        torch.testing.assert_close(there.product(x)[0], 12 * x[0] ** 3)
    assert (len(calls), problem.nfev, problem.njev, problem.nhev) == (1, 1, 1, 3)


def test_costs_without_curvature():
    """Linear, and independent of a factor: H is zero there."""
    M = Product(Euclidean(), Euclidean())
    x = (torch.randn(3), torch.randn(2))
    for cost in (lambda x, y: x.sum(), lambda x, y: torch.ones(()), lambda x, y: x.sum() + y.square().sum()):
        hx, hy = Expansion(Problem(cost, M), x).product(x)
        assert not hx.any()
        assert hy.any() == (cost(*x) == cost(x[0], x[1] + 0) and cost(x[0], x[1]) != cost(x[0], 2 * x[1]))


# ---------------------------------------------------------------------- orders and optima
def norms(cost, manifold, x0, solver=None, **settings):
    seen, solver = [], solver or TrustRegion()
    result = minimize(cost, manifold, x0, solver, callback=lambda r: seen.append(r.grad_norm), **settings)
    assert result.success, result.message
    return result, seen


@both
def test_order_on_a_rayleigh_quotient(dtype):
    """eₖ₊₁ ≤ eₖ^1.8 in the last step, from an eₖ of at most 1e-3, or rounding."""
    values = torch.linspace(1, 4, 12, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(12, 12, dtype=dtype))[0]
    a = (q * values) @ q.mH
    x0 = Sphere().random(12, dtype=dtype)
    result, seen = norms(lambda x: (x.conj() * (a @ x)).sum().real, Sphere(), x0, tolerance_grad=1e-12)
    assert abs(result.fun - 1) < 1e-10
    assert seen[-1] < max(1e-14, seen[-2] ** 1.8)
    assert seen[-2] < 1e-3


@both
@pytest.mark.parametrize("theta", [0.0, 1.0])
def test_order_on_brocketts_cost(dtype, theta):
    """tr(XᴴAX N) with N = diag(3, 2, 1): 3·1 + 2·2 + 1·3. With θ = 0 it is linear, with θ = 1 quadratic."""
    q = torch.linalg.qr(torch.randn(10, 10, dtype=dtype))[0]
    a = (q * torch.arange(1, 11)) @ q.mH
    n = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    x0 = Stiefel().random(10, 3, dtype=dtype)
    solver = TrustRegion(theta=theta)
    cost = lambda x: (n * (x.conj() * (a @ x)).sum(-2).real).sum()  # noqa: E731
    result, seen = norms(cost, Stiefel(), x0, solver, tolerance_grad=1e-11)
    assert abs(result.fun - 10) < 1e-10
    steps = itertools.pairwise([e for e in seen if e < 1])
    orders = [math.log(after) / math.log(before) for before, after in steps if before < 0.3 and after > 1e-12]
    assert (orders[-1] >= 1.8) == (theta == 1)


def test_case_16_unitary_procrustes():
    """The nearest unitary matrix is the polar factor."""
    a = torch.randn(3, 3, dtype=torch.complex128)
    nearest = torch.from_numpy(scipy.linalg.polar(a.numpy())[0])
    result, _ = norms(lambda x: (x - a).abs().square().sum(), Unitary(), torch.eye(3, dtype=torch.complex128))
    assert abs(result.fun - (nearest - a).abs().square().sum()) < 1e-10
    torch.testing.assert_close(result.x, nearest, atol=1e-7, rtol=0)


@both
@modes
def test_logarithmic_mean_of_two(dtype, hessian):
    """The midpoint of a geodesic, A^½ (A^-½ B A^-½)^½ A^½, from I."""
    a, b = SPD().random(2, 4, 4, dtype=dtype)
    middle = SPD().exp(a, SPD().log(a, b) / 2)
    cost = lambda x: SPD().dist(x, a).square() + SPD().dist(x, b).square()  # noqa: E731
    result, _ = norms(cost, SPD(), torch.eye(4, dtype=dtype), TrustRegion(hessian=hessian))
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


@modes
def test_dtypes_may_differ_between_factors(hessian):
    x0 = (Sphere().random(3), torch.tensor(4.0, dtype=torch.float64), Unitary().random(2, 2, dtype=torch.complex128))
    a = torch.randn(2, 2, dtype=torch.complex128)
    cost = lambda x, b, w: x[0].double() + (b - 1).square() + (w - a).abs().square().sum()  # noqa: E731
    result, _ = norms(
        cost, Product(Sphere(), Euclidean(), Unitary()), x0, TrustRegion(hessian=hessian), tolerance_grad=1e-3
    )
    assert [t.dtype for t in result.x] == [t.dtype for t in x0]
    assert abs(result.fun - (-1 + ((torch.linalg.svdvals(a) - 1) ** 2).sum())) < 1e-5


def test_frames_that_can_be_turned_take_few_products():
    """tr(XᵀAX) is constant along X Q, where f∘R_x has small curvature of either sign: 3 steps per eigenvalue or so."""
    b = torch.randn(200, 60, dtype=torch.float64)
    a = b.mH @ b / 200
    best = -torch.linalg.eigvalsh(a)[-6:].sum().item()
    result, _ = norms(lambda x: -(x * (a @ x)).sum(), Stiefel(), Stiefel().random(60, 6, dtype=torch.float64))
    assert abs(result.fun - best) < 1e-10
    assert result.nhev < 300


# ---------------------------------------------------------------------- saddles
def rayleigh(n):
    a = torch.arange(1, n + 1)
    return lambda x: (a * (x.conj() * x).real).sum()  # x.abs().square() has no second derivative at 0 in torch


@both
@modes
@pytest.mark.parametrize("i", [1, 2, 4])
def test_a_start_at_a_saddle_is_left(i, dtype, hessian):
    """The i-th eigenvector: the gradient is zero, bit for bit."""
    x0 = torch.eye(5, dtype=dtype)[i]
    cost = rayleigh(5)
    assert minimize(cost, Sphere(), x0, GradientDescent()).fun == i + 1  # a first-order method stays
    result, _ = norms(cost, Sphere(), x0, TrustRegion(hessian=hessian))
    assert abs(result.fun - 1) < 1e-10
    stays = minimize(cost, Sphere(), x0, TrustRegion(hessian=hessian, probes=0))
    assert (stays.nit, stays.nhev) == (0, 0)


@pytest.mark.parametrize("columns", [[1, 2], [3, 1], [5, 4]])
def test_saddles_of_frames_are_left(columns):
    """Coordinate frames of the wrong columns, minima and saddles of a cost that is symmetric in each coordinate."""
    x0 = torch.eye(6, dtype=torch.float64)[:, columns]
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    a = torch.arange(1, 7, dtype=torch.float64)[:, None]
    result, _ = norms(lambda x: (weights * a * x.square()).sum(), Stiefel(), x0)
    assert abs(result.fun - 4) < 1e-10


def test_a_minimum_is_kept():
    x0 = torch.eye(5, dtype=torch.float64)[0]
    result = minimize(rayleigh(5), Sphere(), x0, TrustRegion())
    assert torch.equal(result.x, x0)
    assert (result.nit, result.nfev, result.njev) == (0, 1, 1)
    assert 0 < result.nhev <= 5


def test_a_valley_that_is_flat_is_kept():
    """Frames of the two lowest eigenvectors can be turned: H has zero eigenvalues, and no descent."""
    q = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))[0]
    x0 = torch.eye(5, dtype=torch.float64)[:, :2] @ q
    a = torch.arange(1, 6, dtype=torch.float64)[:, None]
    result = minimize(lambda x: (a * x.square()).sum(), Stiefel(), x0, TrustRegion())
    assert (result.nit, result.nfev) == (0, 1)


@both
def test_lanczos_gives_eigenvalues(dtype):
    b = torch.randn(5, 5, dtype=dtype)
    a = b + b.mH
    start = (torch.randn(5, dtype=dtype),)
    found = list(lanczos(Product(Euclidean()), start, lambda u: (a @ u[0],), start))
    # the inner product is real, and so is the Krylov space: of 5 dimensions in 10 for complex a
    t = torch.diag(torch.tensor([f[1] for f in found], dtype=torch.float64))
    beside = torch.tensor([f[2] for f in found[:-1]], dtype=torch.float64)
    t = t + torch.diag(beside, 1) + torch.diag(beside, -1)
    torch.testing.assert_close(torch.linalg.eigvalsh(t), torch.linalg.eigvalsh(a))


# ---------------------------------------------------------------------- costs that cannot be differentiated twice
class Square(torch.autograd.Function):
    """x², whose backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_differences_for_costs_that_are_differentiable_once():
    a = torch.arange(1, 6, dtype=torch.float64)
    x0 = Sphere().random(5, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match='hessian="difference"'):
        minimize(lambda x: (a * Square.apply(x)).sum(), Sphere(), x0, TrustRegion())
    result, _ = norms(lambda x: (a * Square.apply(x)).sum(), Sphere(), x0, TrustRegion(hessian="difference"))
    assert abs(result.fun - 1) < 1e-10


def test_a_backward_in_numpy_is_told():
    """Its gradient has no graph at all."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return torch.from_numpy(3 * ctx.saved_tensors[0].detach().numpy() ** 2 * grad.detach().numpy())

    with pytest.raises(NotImplementedError, match='hessian="difference"'):
        minimize(lambda x: Cube.apply(x).sum(), Sphere(), Sphere().random(3), TrustRegion())


@pytest.mark.parametrize("law", [law for law in SOLVER_LAWS if not law.startswith("S9 ")])
def test_laws_with_differences(law):
    """Not S9: where the difference is taken is no isometry's business, and its error is seen in the iterates."""
    check_solver(TrustRegion(hessian="difference"), Stiefel(), (5, 3), laws=[law])


# ---------------------------------------------------------------------- the region
def test_steps_stay_in_the_region():
    cost = lambda x: ((x - 100) ** 2).sum()  # noqa: E731
    x0 = torch.zeros(3, dtype=torch.float64)
    seen = [x0]
    minimize(cost, Euclidean(), x0, TrustRegion(0.5, max_radius=4), callback=lambda r: seen.append(r.x))
    lengths = [(b - a).norm().item() for a, b in itertools.pairwise(seen)]
    assert lengths[:5] == pytest.approx([0.5, 1, 2, 4, 4])
    assert max(lengths) < 4 * (1 + 1e-12)
    torch.testing.assert_close(seen[-1], torch.full_like(x0, 100))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"radius": 0.0}, "radius"),
        ({"max_radius": -1.0}, "max_radius"),
        ({"kappa": 1.0}, "kappa"),
        ({"theta": -1.0}, "theta"),
        ({"max_inner": 0}, "max_inner"),
        ({"hessian": "forward"}, "hessian must be one of"),
        ({"probes": -1}, "probes"),
    ],
)
def test_refused_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        TrustRegion(**settings)
