"""Every law on every solver: class × options × manifold × dtype, each a test; known optima.

Classes are found by walking ``manopt_torch.solvers.__all__``: a new one is under the laws, with its defaults, once it
is exported, and with other options when they are added to ``OPTIONS``.
"""

import typing

import numpy as np
import pytest
import scipy.linalg
import torch

import manopt_torch.solvers
from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary, View
from manopt_torch.manifolds.product import Product
from manopt_torch.solvers import Armijo, HagerZhang, Solver, StrongWolfe, minimize
from manopt_torch.solvers.conjugate_gradient import Rule
from manopt_torch.testing import SOLVER_LAWS, check_solver, exemption

CLASSES = [
    c
    for c in map(vars(manopt_torch.solvers).get, manopt_torch.solvers.__all__)
    if isinstance(c, type) and issubclass(c, Solver) and c is not Solver
]
#: settings of each class beside its defaults
OPTIONS = {
    "GradientDescent": [{"line_search": HagerZhang()}],
    "ConjugateGradient": [
        *({"rule": rule} for rule in typing.get_args(Rule)),
        {"powell": 10.0, "line_search": StrongWolfe(curvature=0.1)},
    ],
    "LBFGS": [{"history": 1}, {"history": 3, "line_search": Armijo()}, {"line_search": StrongWolfe()}],
    "TrustRegion": [
        {"radius": 0.1, "theta": 0.5, "kappa": 0.5, "max_inner": 3, "probes": 0},
    ],
}
FIRST = [c() for c in CLASSES]
SOLVERS = [*FIRST, *(c(**options) for c in CLASSES for options in OPTIONS.get(c.__name__, []))]
BOTH = [torch.float64, torch.complex64]
#: the first sees every setting
PLACES = [
    (Stiefel(), (5, 3), BOTH),
    (SPD(), (2, 2), BOTH),
    (Euclidean(), (), [torch.float64]),
    (Sphere(), (4,), [torch.complex64]),
    (Stiefel(metric="canonical", retraction="qr"), (4, 2), [torch.complex128]),
    (Stiefel(retraction="newton_schulz"), (4, 2), [torch.complex64]),  # has a step_limit
    (Unitary(), (3, 3), [torch.complex128]),
    (View(Stiefel(), "transpose"), (2, 4), [torch.float32]),
]


def cases():
    for solver in SOLVERS:
        for manifold, shape, kinds in PLACES if solver in FIRST else PLACES[:1]:
            for law in SOLVER_LAWS:
                for dtypes in [kinds] if exemption(law, solver) else [[d] for d in kinds]:
                    label = f"{solver!r}-{manifold!r}-{law}-{'-'.join(map(str, dtypes))}"
                    yield pytest.param(solver, manifold, shape, law, dtypes, id=label)


@pytest.mark.parametrize(("solver", "manifold", "shape", "law", "dtypes"), list(cases()))
def test_law(solver, manifold, shape, law, dtypes):
    if not check_solver(solver, manifold, shape, dtypes=dtypes, laws=[law]):
        pytest.skip("the law does not apply")


def test_every_class_is_found():
    assert {"LBFGS", "TrustRegion", "AdaptiveRegularization"} <= {c.__name__ for c in CLASSES}


# ---------------------------------------------------------------------- known optima
both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
every = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
defaults = pytest.mark.parametrize("solver", FIRST, ids=repr)


def reaches(best, cost, manifold, x0, solver, **settings):
    """The result of minimizing, whose cost is ``best`` to 1e-8."""
    result = minimize(cost, manifold, x0, solver, **settings)
    assert result.success, result.message
    assert abs(result.fun - best) <= 1e-8 * max(1.0, abs(best))
    return result


@both
@every
def test_principal_components(solver, dtype):
    """max tr(XᴴAX) over frames of k columns is the sum of the k largest eigenvalues; their eigenvectors span X."""
    b = torch.randn(12, 30, dtype=dtype)
    a = b @ b.mH / 30
    values, vectors = np.linalg.eigh(a.numpy())
    x0 = Stiefel().random(12, 3, dtype=dtype)
    result = reaches(-values[-3:].sum(), lambda x: -(x.conj() * (a @ x)).sum().real, Stiefel(), x0, solver)
    span = torch.from_numpy(vectors[:, -3:])
    assert torch.linalg.matrix_norm(result.x - span @ (span.mH @ result.x)) < 1e-5


@defaults
def test_orthogonal_procrustes(solver):
    """The nearest rotation is the polar factor."""
    a = torch.randn(6, 6, dtype=torch.float64)
    a = a if torch.linalg.det(a) > 0 else a[[1, 0, 2, 3, 4, 5]]
    nearest, _ = scipy.linalg.polar(a.numpy())
    x0 = torch.eye(6, dtype=torch.float64)
    best = np.linalg.norm(nearest - a.numpy()) ** 2
    result = reaches(best, lambda x: (x - a).square().sum(), Unitary(), x0, solver)
    torch.testing.assert_close(result.x, torch.from_numpy(nearest), atol=1e-5, rtol=0)


@defaults
def test_case_16_unitary_procrustes(solver):
    """The nearest unitary matrix is the polar factor; the complex part of the gradient matters."""
    a = torch.randn(3, 3, dtype=torch.complex128)
    best = float(((np.linalg.svd(a.numpy(), compute_uv=False) - 1) ** 2).sum())
    x0 = torch.eye(3, dtype=torch.complex128)
    reaches(best, lambda x: (x - a).abs().square().sum(), Unitary(), x0, solver)


def spectral(a, function):
    """A function of a Hermitian matrix."""
    values, vectors = np.linalg.eigh(a)
    return (vectors * function(values)) @ vectors.conj().T


def karcher(points):
    """The Fréchet mean of positive definite matrices by X ← X^½ exp(mean log(X^-½ P X^-½)) X^½, in NumPy."""
    x = points.mean(0)
    for _ in range(200):
        root, inverse = spectral(x, np.sqrt), spectral(x, lambda t: t**-0.5)
        mean = np.mean([spectral(inverse @ p @ inverse, np.log) for p in points], axis=0)
        x = root @ spectral(mean, np.exp) @ root
        if np.linalg.norm(mean) < 1e-13:
            return x
    raise AssertionError("the fixed-point iteration does not converge")


@both
@defaults
def test_mean_of_definite_matrices(solver, dtype):
    factors = torch.randn(5, 4, 6, dtype=dtype)
    points = factors @ factors.mH / 6 + torch.eye(4, dtype=dtype) / 10
    mean = torch.from_numpy(karcher(points.numpy())).to(dtype)

    def cost(x):
        return SPD().dist(x, points).square().mean()

    result = reaches(cost(mean).item(), cost, SPD(), torch.eye(4, dtype=dtype), solver, tolerance_grad=1e-7)
    torch.testing.assert_close(result.x, mean, atol=1e-6, rtol=0)


@both
@defaults
def test_linear_regression_through_a_frame(solver, dtype):
    """min ‖X B − C‖² over frames X and free B is what is left of C beyond its largest singular values."""
    c = torch.randn(8, 10, dtype=dtype)
    best = float((np.linalg.svd(c.numpy(), compute_uv=False)[2:] ** 2).sum())
    manifold = Product(Stiefel(), Euclidean())
    x0 = manifold.random((8, 2), (2, 10), dtype=dtype)
    result = reaches(best, lambda x, b: (x @ b - c).abs().square().sum(), manifold, x0, solver)
    assert isinstance(result.x, tuple)
    assert Stiefel().residual(result.x[0]) < 1e-13


@defaults
def test_a_batch_is_one_point_of_the_power_manifold(solver):
    """Three Rayleigh quotients at once, their sum the cost."""
    b = torch.randn(3, 6, 6, dtype=torch.float64)
    a = b + b.mH
    best = np.linalg.eigvalsh(a.numpy())[:, 0].sum()
    x0 = Sphere().random(3, 6, dtype=torch.float64)
    reaches(best, lambda x: torch.einsum("bi,bij,bj->", x, a, x), Sphere(), x0, solver)


@defaults
def test_case_49_single_precision_stays(solver):
    """min −tr(XᵀAX), A = diag(0, 1, 2, 3): −(2 + 3), in the dtype of the start."""
    a = torch.diag(torch.arange(4, dtype=torch.float32))
    x0 = Stiefel().random(4, 2, dtype=torch.float32)
    result = minimize(lambda x: -(x * (a @ x)).sum(), Stiefel(), x0, solver)
    assert result.success
    assert result.x.dtype == torch.float32
    assert abs(result.fun + 5) < 1e-5


@both
@every
def test_a_saddle_is_left(solver, dtype):
    """From a point 1e-6 beside the second eigenvector of three: to the least eigenvalue."""
    a = torch.diag(torch.tensor([-2.0, 1.0, 3.0], dtype=dtype))
    x0 = Sphere().nearest(torch.tensor([1e-6, 1.0, 1e-6], dtype=dtype))
    reaches(-2.0, lambda x: (x.conj() * (a @ x)).sum().real, Sphere(), x0, solver, tolerance_grad=1e-7)


@defaults
def test_an_ill_conditioned_valley(solver):
    """Rosenbrock's function in the plane: 0 at (1, 1)."""
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)

    def cost(x):
        return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2

    result = reaches(0.0, cost, Euclidean(), x0, solver, tolerance_grad=1e-8, max_iter=20000)
    torch.testing.assert_close(result.x, torch.ones(2, dtype=torch.float64), atol=1e-7, rtol=0)


@both
@defaults
def test_scale_does_not_matter(solver, dtype):
    """The iterates of 2¹⁰⁰ f are those of f, bit for bit: powers of two, and no constant with a unit."""
    a = torch.randn(6, 6, dtype=dtype)
    a, x0 = a + a.mH, Stiefel().random(6, 2, dtype=dtype)

    def run(scale):
        cost = lambda x: scale * (x.conj() * (a @ x)).sum().real  # noqa: E731
        return minimize(cost, Stiefel(), x0, solver, max_iter=5)

    assert torch.equal(run(1.0).x, run(2.0**100).x)
