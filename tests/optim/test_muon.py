"""RiemannianMuon: the square case is a polar factor, the tall one reaches the optimum that the dual certifies."""

import numpy as np
import pytest
import torch
from torch import nn

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary, View
from manopt_torch.optim import RiemannianMuon

both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


def direction(optimizer, M, x, g, steps, state=None):
    """The direction after ``steps`` evaluations at the same point with the same gradient, for lr = 1."""
    s = {} if state is None else state
    (group,) = optimizer.param_groups
    for _ in range(steps):
        u = optimizer.direction(M, x, M.rgrad(x, g), s, group)
    return u


def muon(M, x, **settings):
    return RiemannianMuon([{"params": [nn.Parameter(x.clone())], "manifold": M}], lr=1.0, momentum=0.0, **settings)


def product(a, b):
    return (a.conj() * b).real.sum((-2, -1))


@both
@pytest.mark.parametrize("M", [Unitary(), Stiefel(), Stiefel(metric="canonical")], ids=repr)
@pytest.mark.parametrize("n", [4, 5])
def test_square_it_is_the_polar_factor(M, n, dtype):
    """Against the SVD of numpy; a real skew matrix of odd order is singular, and its null vector does not move."""
    x, g = M.random(3, n, n, dtype=dtype), torch.randn(3, n, n, dtype=dtype)
    u = direction(muon(M, x), M, x, g, 1)
    for x_k, g_k, u_k in zip(x.numpy(), g.numpy(), u.numpy(), strict=True):
        s = x_k.conj().T @ g_k
        left, values, right = np.linalg.svd((s - s.conj().T) / 2)
        kept = values > 1e-12
        assert kept.sum() == (n if dtype.is_complex else n - n % 2)
        np.testing.assert_allclose(u_k, -x_k @ left[:, kept] @ right[kept], atol=1e-6)


@both
@pytest.mark.parametrize(("shape", "gap"), [((6, 3), 1e-4), ((9, 2), 1e-4), ((5, 4), 1e-2), ((7, 1), 1e-4)])
def test_tall_the_duality_gap_closes(shape, gap, dtype):
    """−‖g + xΛ‖_* ≤ ⟨g, u⟩ for all Hermitian Λ and feasible u; with a fixed gradient both meet.

    Slowly where n < 2p: the optimal g + xΛ is then often singular. The bound is evaluated at
    the Λ of the state with the nuclear norm of numpy: it certifies u whatever made it.
    """
    M = Stiefel()
    x, g = M.random(2, *shape, dtype=dtype), torch.randn(2, *shape, dtype=dtype)
    optimizer, s = muon(M, x), {}
    r = M.rgrad(x, g)
    costs, bounds = [], []
    for _ in range(60):
        u = direction(optimizer, M, x, g, 1, s)
        torch.testing.assert_close(M.project(x, u), u, rtol=0, atol=1e-12)
        assert torch.linalg.matrix_norm(u, 2).max() <= 1 + 1e-12
        size = torch.linalg.matrix_norm(r, keepdim=True)
        torch.testing.assert_close(s["dual"], s["dual"].mH)
        bound = [-np.linalg.norm(a, "nuc") for a in (r + size * (x @ s["dual"])).numpy()]
        costs.append(product(g, u))
        bounds.append(torch.tensor(bound, dtype=torch.float64))
        assert (bounds[-1] <= costs[-1] + 1e-12).all()
    first, last = bounds[0], bounds[-1]
    assert (last >= first - 1e-12).all()
    torch.testing.assert_close(costs[-1], last, rtol=gap, atol=0)
    sampled = M.project(x, torch.randn(200, 2, *shape, dtype=dtype))
    sampled = sampled / torch.linalg.matrix_norm(sampled, 2, keepdim=True)
    assert (product(g, sampled) > costs[-1]).all()


@both
def test_a_view_and_the_canonical_metric_see_the_same_problem(dtype):
    x, g = Stiefel().random(2, 6, 3, dtype=dtype), torch.randn(2, 6, 3, dtype=dtype)
    expected = direction(muon(Stiefel(), x), Stiefel(), x, g, 5)
    canonical = Stiefel(metric="canonical")
    torch.testing.assert_close(direction(muon(canonical, x), canonical, x, g, 5), expected)
    view = View(Stiefel(), "transpose")
    torch.testing.assert_close(direction(muon(view, x.mT), view, x.mT, g.mT, 5), expected.mT)


def test_the_size_of_the_gradient_does_not_matter():
    M = Stiefel()
    x, g = M.random(1, 6, 3, dtype=torch.float64), torch.randn(1, 6, 3, dtype=torch.float64)
    small = direction(muon(M, x), M, x, 1e-6 * g, 4)
    torch.testing.assert_close(small, direction(muon(M, x), M, x, 1e6 * g, 4))
    assert direction(muon(M, x), M, x, 0 * g, 2).abs().max() == 0


@pytest.mark.parametrize("M", [Euclidean(), Sphere(), SPD(), View(SPD(), "transpose")], ids=repr)
def test_other_manifolds_are_refused(M):
    with pytest.raises(ValueError, match=r"RiemannianAdam"):
        RiemannianMuon([{"params": [nn.Parameter(M.random(3, 3))], "manifold": M}])


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"momentum": 1.0}, {"eps": -1.0}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RiemannianMuon([{"params": [nn.Parameter(torch.eye(3))], "manifold": Unitary()}], **settings)
