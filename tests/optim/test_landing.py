"""Landing: its iteration in NumPy, the safe step, and where it ends."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from manopt_torch import SPD, Euclidean, ManifoldParameter, Stiefel, Unitary, View
from manopt_torch.optim import Landing, RiemannianSGD

PLACES = [
    (Stiefel(), (5, 3), torch.float64),
    (Stiefel(), (2, 5, 3), torch.complex128),
    (Unitary(), (4, 4), torch.complex128),
    (Stiefel("canonical"), (4, 4), torch.float64),
    (View(Stiefel(), "transpose"), (3, 5), torch.float64),
]


def numpy_step(X, b, lr, pull, safe):
    """One matrix, with the n×n matrix skew(b Xᴴ) formed."""
    A = (b @ X.conj().T - X @ b.conj().T) / 2
    Delta = X.conj().T @ X - np.eye(X.shape[1])
    off = np.linalg.norm(Delta)
    F = A @ X + pull * X @ Delta
    a, c = np.linalg.norm(F.conj().T @ F), pull * off * (1 - off)
    eta = min(lr, 0.5 / pull, (c + np.sqrt(c * c + a * (safe - off))) / a)
    return X - eta * F


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_iteration_is_the_formula(dtype, momentum):
    generator = torch.Generator().manual_seed(0)
    p = ManifoldParameter(Stiefel().random(6, 3, dtype=dtype, generator=generator), Stiefel())
    optimizer = Landing([p], lr=0.3, momentum=momentum, attraction=0.7, safe=0.4)
    X, b = p.detach().numpy().copy(), 0
    for _ in range(8):
        p.grad = torch.randn(6, 3, dtype=dtype, generator=generator)
        b = momentum * b + p.grad.numpy()
        X = numpy_step(X, b, 0.3, 0.7, 0.4)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), X, rtol=0, atol=1e-13)
    assert Stiefel().residual(p) > 1e-3  # the steps were long enough to leave it


@pytest.mark.parametrize(("M", "shape", "dtype"), PLACES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_residual_stays_below_safe(M, shape, dtype, momentum):
    """CASES 71: random linear costs, lr 1, momentum 0.9, 300 steps."""
    generator = torch.Generator().manual_seed(1)
    p = ManifoldParameter(M.random(*shape, dtype=dtype, generator=generator), M)
    optimizer = Landing([p], lr=1.0, momentum=momentum, safe=0.5)
    A, worst = torch.randn(shape, dtype=dtype, generator=generator), 0.0
    for _ in range(300):
        p.grad = A * (1 + torch.rand((), generator=generator))
        optimizer.step()
        worst = max(worst, M.residual(p.detach()).max().item())
    assert 0.05 < worst <= 0.5 + 1e-12


def test_zero_gradient_leaves_a_point_alone():
    """CASES 70."""
    p = ManifoldParameter(torch.eye(5, 3), Stiefel())
    p.grad = torch.zeros(5, 3)
    Landing([p], lr=1.0, momentum=0.9).step()
    assert torch.equal(p.detach(), torch.eye(5, 3))


@pytest.mark.parametrize(("M", "shape", "dtype"), PLACES[:3], ids=str)
def test_it_lands_on_the_optimum(M, shape, dtype):
    """Procrustes, near enough for the component of O(n): the polar factor, and on the manifold."""
    generator = torch.Generator().manual_seed(2)
    start = M.random(*shape, dtype=dtype, generator=generator)
    A = start + 0.5 * torch.randn(shape, dtype=dtype, generator=generator)
    p = ManifoldParameter(start, M)
    optimizer = Landing([p], lr=0.2, momentum=0.5)
    for _ in range(400):
        p.grad = p.detach() - A
        optimizer.step()
    u, _, vh = torch.linalg.svd(A, full_matrices=False)
    assert M.residual(p.detach()).max() < 1e-6
    torch.testing.assert_close(p.detach(), u @ vh, rtol=0, atol=1e-6)


def test_first_order_agreement_with_sgd():
    generator = torch.Generator().manual_seed(3)
    x = Stiefel().random(5, 3, dtype=torch.float64, generator=generator)
    g = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    gaps = []
    for lr in (1e-2, 1e-3):
        a = ManifoldParameter(x.clone(), Stiefel("canonical"))
        b = ManifoldParameter(x.clone(), Stiefel("canonical"))
        a.grad, b.grad = g.clone(), g.clone()
        Landing([a], lr=lr).step()
        RiemannianSGD([b], lr=lr / 2).step()
        gaps.append((a - b).norm().item())
    assert gaps[1] < 0.02 * gaps[0]  # O(lr²)


def test_a_run_goes_on_from_a_checkpoint_off_the_manifold():
    generator = torch.Generator().manual_seed(4)
    p = ManifoldParameter(Stiefel().random(5, 3, generator=generator), Stiefel())
    A = torch.randn(5, 3, generator=generator)

    def steps(optimizer, q, n):
        for _ in range(n):
            q.grad = A.clone()
            optimizer.step()

    optimizer = Landing([p], lr=0.5, momentum=0.9)
    steps(optimizer, p, 3)
    assert Stiefel().residual(p.detach()) > 1e-2
    q = nn.Parameter(p.detach().clone())
    other = Landing([{"params": [q], "manifold": Stiefel()}], lr=0.5, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, p, 3)
    steps(other, q, 3)
    assert torch.equal(p.detach(), q.detach())
    with pytest.raises(ValueError, match="residual"):
        Landing([{"params": [nn.Parameter(2 * q.detach())], "manifold": Stiefel()}])


@pytest.mark.parametrize("scale", [1e20, 1e-30])
def test_gradients_of_any_size(scale):
    generator = torch.Generator().manual_seed(5)
    p = ManifoldParameter(Stiefel().random(5, 3, generator=generator), Stiefel())
    optimizer = Landing([p], lr=0.1, momentum=0.5)
    for _ in range(20):
        p.grad = scale * torch.randn(5, 3, generator=generator)
        optimizer.step()
        assert Stiefel().residual(p.detach()) <= 0.5 + 1e-5


@pytest.mark.parametrize(
    "settings", [{"attraction": 0.0}, {"safe": 1.0}, {"safe": 0.0}, {"lr": -1.0}, {"momentum": -0.1}]
)
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Landing([ManifoldParameter(torch.eye(3), Stiefel())], **settings)


@pytest.mark.parametrize("M", [Euclidean(), SPD()], ids=repr)
def test_other_manifolds_are_refused(M):
    with pytest.raises(ValueError, match=r"take RiemannianAdam|no matrices as points"):
        Landing([{"params": [nn.Parameter(torch.eye(3))], "manifold": M}])
