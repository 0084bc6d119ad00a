"""Problems whose answers are known from elsewhere: a factorization, a closed form, a certificate, a measured number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from sklearn.mixture import GaussianMixture

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary
from manopt_torch.manifolds import Product
from manopt_torch.solvers import LBFGS, AdaptiveRegularization, ConjugateGradient, TrustRegion, minimize

REAL, COMPLEX = torch.float64, torch.complex128
SOLVERS = [ConjugateGradient(), LBFGS(), TrustRegion(), AdaptiveRegularization()]
EACH = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
SECOND = pytest.mark.parametrize("solver", SOLVERS[2:], ids=lambda s: type(s).__name__)
BOTH = pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=["real", "complex"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def hermitian(n, dtype=REAL, *batch):
    a = torch.randn(*batch, n, n, dtype=dtype)
    return (a + a.mH) / 2


def definite(n, condition, *batch, dtype=REAL):
    q = Unitary().random(*batch, n, n, dtype=dtype)
    return (q * torch.logspace(0, math.log10(condition), n, dtype=REAL)) @ q.mH / math.sqrt(condition)


def function(a, f):
    """f of Hermitian matrices, by SciPy's and NumPy's eigenvectors alone."""
    w, v = np.linalg.eigh(a.numpy())
    return torch.from_numpy((v * f(w)[..., None, :]) @ v.conj().swapaxes(-1, -2))


def solved(cost, manifold, start, solver, optimum, **settings):
    """Solve; the cost is within 1e-8 of the optimum, relatively."""
    result = minimize(cost, manifold, start, solver, **{"tolerance_grad": 1e-7, **settings})
    assert result.fun - optimum <= 1e-8 * max(1.0, abs(optimum)), result
    assert result.fun - optimum >= -1e-9 * max(1.0, abs(optimum)), result
    return result


@EACH
@BOTH
def test_brockett(solver, dtype):
    a, weights = hermitian(9, dtype), torch.tensor([3.0, 2.0, 1.0], dtype=REAL)
    optimum = (torch.linalg.eigvalsh(a)[:3] * weights).sum().item()
    start = Stiefel().random(9, 3, dtype=dtype)
    solved(lambda x: ((x.conj() * (a @ x)).real * weights).sum(), Stiefel(), start, solver, optimum)


@EACH
@BOTH
def test_orthogonal_and_unitary_procrustes(solver, dtype):
    a, b = torch.randn(20, 5, dtype=dtype), torch.randn(20, 5, dtype=dtype)
    optimum = (a.abs().square().sum() + b.abs().square().sum() - 2 * torch.linalg.svdvals(a.mH @ b).sum()).item()
    start = Unitary().random(5, 5, dtype=dtype)
    if dtype == REAL and torch.linalg.det(start) * torch.linalg.det(a.mH @ b) < 0:
        start = torch.cat([-start[:, :1], start[:, 1:]], 1)  # into the component of O(5) that holds the answer
    solved(lambda x: (a @ x - b).abs().square().sum(), Unitary(), start, solver, optimum)


@EACH
@BOTH
def test_mean_of_two_definite_matrices(solver, dtype):
    """The midpoint a ♯ b = a^½ (a^-½ b a^-½)^½ a^½, at half the distance from both."""
    a, b = definite(4, 1e2, dtype=dtype), definite(4, 1e2, dtype=dtype)
    root, inverse = function(a, np.sqrt), function(a, lambda w: w**-0.5)
    middle = root @ function(inverse @ b @ inverse, np.sqrt) @ root
    M = SPD()
    optimum = (M.dist(a, b).square() / 2).item()
    result = solved(lambda x: M.dist(x, a).square() + M.dist(x, b).square(), M, a.clone(), solver, optimum)
    torch.testing.assert_close(result.x, middle, rtol=1e-5, atol=1e-5)


@SECOND
@pytest.mark.parametrize("n", [10, 20])
def test_mean_of_ill_conditioned_definite_matrices(solver, n):
    """Condition 1e6: at the mean the logarithms of x^-½ pᵢ x^-½ add up to zero."""
    points, M = definite(n, 1e6, 5), SPD()
    result = minimize(lambda x: M.dist(x, points).square().sum() / 2, M, points.mean(0), solver, max_iter=100)
    inverse = function(result.x, lambda w: w**-0.5)
    total = function(inverse @ points @ inverse, np.log).sum(0)
    assert total.norm() < 1e-5 * M.dist(result.x, points).sum()


@EACH
def test_mean_of_commuting_definite_matrices(solver):
    q, w = Unitary().random(4, 4, dtype=REAL), torch.rand(6, 4, dtype=REAL) + 0.1
    points, M = (q * w.unsqueeze(-2)) @ q.mH, SPD()
    mean = (q * w.log().mean(0).exp()) @ q.mH
    optimum = (w.log() - w.log().mean(0)).square().sum().item()
    result = solved(lambda x: M.dist(x, points).square().sum(), M, points[0], solver, optimum)
    torch.testing.assert_close(result.x, mean, rtol=1e-5, atol=1e-5)


@SECOND
def test_max_cut_relaxation(solver):
    """min ⟨C, V Vᵀ⟩ over unit rows. With Λ = diag(C V Vᵀ), C − Λ is positive semidefinite: weak duality proves it."""
    n, rank = 12, 6
    c = hermitian(n)
    result = minimize(lambda v: ((c @ v) * v).sum(), Sphere(), Sphere().random(n, rank, dtype=REAL), solver)
    assert result.success
    bound = ((c @ result.x) * result.x).sum(1)
    assert torch.linalg.eigvalsh(c - torch.diag(bound))[0] > -1e-6
    assert result.fun == pytest.approx(bound.sum().item())


@SECOND
@BOTH
def test_joint_diagonalization(solver, dtype):
    """Matrices with common eigenvectors: off-diagonal entries vanish together, at a permutation of them with phases."""
    q, w = Unitary().random(4, 4, dtype=dtype), torch.randn(5, 1, 4, dtype=REAL)
    matrices = (q * w) @ q.mH

    def off(x):
        d = x.mH @ matrices @ x
        return (d - torch.diag_embed(torch.diagonal(d, dim1=-2, dim2=-1))).abs().square().sum()

    start = Unitary().retract(q, Unitary().project(q, 0.3 * torch.randn(4, 4, dtype=dtype)))
    result = minimize(off, Unitary(), start, solver)
    assert result.fun < 1e-10
    overlap = (q.mH @ result.x).abs()
    torch.testing.assert_close(overlap.amax(0), torch.ones(4, dtype=REAL), rtol=1e-6, atol=1e-6)


@EACH
def test_independent_components(solver):
    """Σ κ⁻¹|E (wᵀz)⁴ − 3| of z = A s with orthogonal A and independent s of kurtosis κ_k is Σ_k κ_k (wᵀa_k)⁴ for one w:
    on orthogonal W the sum over its columns is largest at columns ±a_k."""
    mixing, kurtosis = Unitary().random(4, 4, dtype=REAL), torch.tensor([1.0, 2.0, 3.0, 1.5], dtype=REAL)
    start = Unitary().retract(mixing, Unitary().project(mixing, 0.3 * torch.randn(4, 4, dtype=REAL)))
    result = solved(
        lambda w: -((mixing.mH @ w) ** 4 * kurtosis[:, None]).sum(), Unitary(), start, solver, -kurtosis.sum().item()
    )
    gain = (mixing.mH @ result.x).abs()
    amari = (gain.sum(1) / gain.amax(1) - 1).sum() + (gain.sum(0) / gain.amax(0) - 1).sum()
    assert amari < 1e-2  # of 24 for a matrix of ones: errors of first order in the angle, where the cost is of second


@EACH
@BOTH
def test_low_rank_approximation(solver, dtype):
    """Eckart and Young: ‖A − U S Vᴴ‖² of rank 2 leaves the squares of the other singular values."""
    a = torch.randn(8, 6, dtype=dtype)
    s = torch.linalg.svdvals(a)
    space = Product(Stiefel(), Euclidean(), Stiefel())
    begin = a + 0.3 * torch.randn(8, 6, dtype=dtype)
    left, _, right = torch.linalg.svd(begin, full_matrices=False)
    start = left[:, :2].contiguous(), torch.zeros(2, 2, dtype=dtype), right[:2].mH.contiguous()
    solved(lambda u, m, v: (a - u @ m @ v.mH).abs().square().sum(), space, start, solver, s[2:].square().sum().item())


@EACH
@pytest.mark.parametrize("n", [2, 3, 5])
def test_rosenbrock_on_the_sphere(solver, n):
    """Beside SciPy, which moves the same point in the flat space of directions."""

    def rosenbrock(x):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    starts = Sphere().random(12, n, dtype=REAL)
    results = [minimize(rosenbrock, Sphere(), x, solver, max_iter=3000).fun for x in starts]
    flat = [
        scipy.optimize.minimize(
            lambda z: scipy.optimize.rosen(z / np.linalg.norm(z)), x.numpy(), tol=1e-12, method="BFGS"
        ).fun
        for x in starts
    ]
    assert min(results) == pytest.approx(min(flat), abs=1e-8)


THOMSON = {4: 3.674234614, 6: 9.985281374, 12: 49.165253058}  # published energies, in units of charge²/radius


@EACH
@pytest.mark.parametrize("points", THOMSON)
def test_electrons_on_a_sphere(solver, points):
    """Thomson's problem: tetrahedron, octahedron, icosahedron."""
    i, j = torch.triu_indices(points, points, 1)

    def energy(x):
        return (x[i] - x[j]).norm(dim=-1).reciprocal().sum()

    best = min(minimize(energy, Sphere(), Sphere().random(points, 3, dtype=REAL), solver).fun for _ in range(3))
    assert best == pytest.approx(THOMSON[points], abs=2e-8)


@EACH
def test_phase_synchronization(solver):
    """Noiseless H = z zᴴ: every maximum of zᴴ H z over unit phases is z but for a common phase."""
    n = 10
    z = torch.polar(torch.ones(n, dtype=REAL), 2 * math.pi * torch.rand(n, dtype=REAL)).unsqueeze(-1)
    h = z @ z.mH
    start = Sphere().random(n, 1, dtype=COMPLEX)
    result = solved(lambda x: -(x.conj() * (h @ x)).real.sum(), Sphere(), start, solver, -float(n**2))
    assert (z.mH @ result.x).abs().item() == pytest.approx(n, rel=1e-6)


@EACH
def test_covariance_of_one_gaussian(solver):
    """Maximum likelihood is the sample covariance."""
    data = torch.randn(50, 3, dtype=REAL) @ torch.randn(3, 3, dtype=REAL)
    sample = data.mH @ data / 50
    optimum = (torch.logdet(sample) + 3).item()
    result = solved(
        lambda s: torch.logdet(s) + torch.linalg.solve(s, sample).diagonal().sum(),
        SPD(),
        torch.eye(3, dtype=REAL),
        solver,
        optimum,
    )
    torch.testing.assert_close(result.x, sample, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", [LBFGS(), TrustRegion()], ids=lambda s: type(s).__name__)
def test_covariances_of_a_mixture(solver):
    """Where scikit-learn's expectation maximization ends; means, covariances and weights are all unknown."""
    centers = torch.tensor([[-3.0, 0.0], [3.0, 1.0]], dtype=REAL)
    factors = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.3, 0.2], [0.0, 1.0]]], dtype=REAL)
    data = torch.cat([c + torch.randn(80, 2, dtype=REAL) @ f for c, f in zip(centers, factors, strict=True)])
    peer = GaussianMixture(2, tol=1e-13, max_iter=5000, reg_covar=0, means_init=centers.numpy()).fit(data.numpy())

    def loss(means, covariances, logits):
        gaps = data - means[:, None]
        squares = (gaps * torch.linalg.solve(covariances, gaps.mH).mH).sum(-1)
        logs = logits.log_softmax(0)[:, None] - (squares + torch.logdet(covariances)[:, None]) / 2
        return math.log(2 * math.pi) - logs.logsumexp(0).mean()

    start = centers.clone(), torch.eye(2, dtype=REAL).repeat(2, 1, 1), torch.zeros(2, dtype=REAL)
    space = Product(Euclidean(), SPD(), Euclidean())
    result = solved(loss, space, start, solver, -peer.score(data.numpy()))
    torch.testing.assert_close(result.x[1], torch.from_numpy(peer.covariances_), rtol=1e-4, atol=1e-4)


@EACH
def test_metric_learning(solver):
    """GMML (Zadeh, Hosseini and Sra, 2016): tr(MS) + tr(M⁻¹D) is least at the midpoint S⁻¹ ♯ D of the geodesic."""
    s, d = definite(5, 10.0), definite(5, 10.0)
    root, inverse = function(s, np.sqrt), function(s, lambda w: w**-0.5)
    middle = inverse @ function(root @ d @ root, np.sqrt) @ inverse
    optimum = 2 * np.trace(scipy.linalg.sqrtm((root @ d @ root).numpy())).real
    result = solved(
        lambda m: (m * s).sum() + torch.linalg.solve(m, d).diagonal().sum(),
        SPD(),
        torch.eye(5, dtype=REAL),
        solver,
        optimum,
    )
    torch.testing.assert_close(result.x, middle, rtol=1e-5, atol=1e-5)
