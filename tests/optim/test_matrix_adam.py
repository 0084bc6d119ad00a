"""RiemannianMatrixAdam: its formula, and what it is for one column."""

import pytest
import torch
from torch import nn

from manopt_torch import SPD, Euclidean, ManifoldParameter, Sphere, Stiefel, View
from manopt_torch.optim import RiemannianAdam, RiemannianMatrixAdam

both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


def trained(kind, x, gradients, manifold=None, **settings):
    p = nn.Parameter(x.clone())
    optimizer = kind([{"params": [p], "manifold": manifold or Stiefel()}], lr=0.1, **settings)
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    return p.detach(), optimizer.state[p]


@both
def test_of_one_column_it_is_adam(dtype):
    x, gradients = Stiefel().random(3, 5, 1, dtype=dtype), torch.randn(10, 3, 5, 1, dtype=dtype)
    ours, adam = (trained(kind, x, gradients, eps=1e-12)[0] for kind in (RiemannianMatrixAdam, RiemannianAdam))
    torch.testing.assert_close(ours, adam)


@both
def test_rotations_from_both_sides(dtype):
    """X → Q X V has C → Vᴴ C V."""
    M = Stiefel()
    q, v = M.random(6, 6, dtype=dtype), M.random(3, 3, dtype=dtype)
    x, gradients = M.random(6, 3, dtype=dtype), torch.randn(8, 6, 3, dtype=dtype)
    y, s = trained(RiemannianMatrixAdam, x, gradients)
    z, t = trained(RiemannianMatrixAdam, q @ x @ v, q @ gradients @ v)
    torch.testing.assert_close(z, q @ y @ v)
    torch.testing.assert_close(t["exp_avg_gram"], v.mH @ s["exp_avg_gram"] @ v)


@both
def test_the_first_step_is_the_polar_factor(dtype):
    """m̂ = r and Ĉ = rᴴr, so that m̂ Ĉ^-½ is the polar factor of r."""
    M = Stiefel()
    x, g = M.random(6, 3, dtype=dtype), torch.randn(6, 3, dtype=dtype)
    left, _, right = torch.linalg.svd(M.rgrad(x, g), full_matrices=False)
    y, _ = trained(RiemannianMatrixAdam, x, [g])
    torch.testing.assert_close(y, M.retract(x, -0.1 * M.project(x, left @ right)))


def test_a_view_is_its_base():
    x, gradients = Stiefel().random(6, 3), torch.randn(4, 6, 3)
    y, _ = trained(RiemannianMatrixAdam, x, gradients)
    z, _ = trained(RiemannianMatrixAdam, x.mT, gradients.mT, View(Stiefel(), "transpose"))
    torch.testing.assert_close(z, y.mT)


@pytest.mark.parametrize("M", [Euclidean(), Sphere()], ids=repr)
def test_points_that_are_no_matrices_are_refused(M):
    with pytest.raises(ValueError, match="no matrices as points"):
        RiemannianMatrixAdam([{"params": [nn.Parameter(M.random(3))], "manifold": M}])
    with pytest.raises(ValueError, match="is for Stiefel, Unitary"):
        RiemannianMatrixAdam([ManifoldParameter(torch.eye(3), SPD())])


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -1.0}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RiemannianMatrixAdam([{"params": [nn.Parameter(torch.eye(3))], "manifold": Stiefel()}], **settings)
