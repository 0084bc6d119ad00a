"""POGO: its formula in NumPy, and the iterates of its authors' package."""

import numpy as np
import pytest
import torch
from torch import nn

from manopt_torch import SPD, ManifoldParameter, Stiefel, View
from manopt_torch.optim import POGO


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"betas": (0.9, 0.99)}, {}], ids=str)
def test_the_iteration_is_the_formula(dtype, settings):
    generator = torch.Generator().manual_seed(0)
    p = ManifoldParameter(Stiefel().random(6, 3, dtype=dtype, generator=generator), Stiefel())
    optimizer = POGO([p], lr=0.1, eps=1e-3, **settings)
    X, buffer, second = p.detach().numpy().copy(), 0, 0
    for t in range(1, 6):
        p.grad = torch.randn(6, 3, dtype=dtype, generator=generator)
        g = p.grad.numpy()
        if "betas" in settings:
            buffer, second = 0.9 * buffer + 0.1 * g, 0.99 * second + 0.01 * np.linalg.norm(g) ** 2
            b = buffer / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.99**t)) + 1e-3)
        else:
            b = buffer = settings.get("momentum", 0) * buffer + g
        Y = X - 0.1 * (b @ X.conj().T - X @ b.conj().T) / 2 @ X
        X = Y + 0.5 * Y @ (np.eye(3) - Y.conj().T @ Y)
        optimizer.step()
        np.testing.assert_allclose(p.detach().numpy(), X, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(4, 5, 3), (2, 4, 4)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("betas", [None, (0.9, 0.99)])
def test_iterates_of_pogo_torch(shape, rows, betas):
    peer, rules = pytest.importorskip("pogo"), pytest.importorskip("pogo.base")
    generator = torch.Generator().manual_seed(1)
    x = Stiefel().random(*shape, dtype=torch.float64, generator=generator)
    M = View(Stiefel(), "transpose") if rows else Stiefel()
    x = x.mT.contiguous() if rows else x
    p, q = nn.Parameter(x.clone()), nn.Parameter(x.clone())
    ours = POGO([{"params": [p], "manifold": M}], lr=0.05, betas=betas)
    base = rules.SGD() if betas is None else rules.VectorAdam(betas)
    theirs = peer.POGO([q], base, lr=0.05, rows=rows, check_size=False)
    for _ in range(10):
        p.grad = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-12)
    assert (p - x).norm() > 0.1


def test_zero_gradient_leaves_a_point_alone():
    x = Stiefel().random(5, 3)
    p = ManifoldParameter(x.clone(), Stiefel())
    p.grad = torch.zeros(5, 3)
    POGO([p], lr=1.0).step()
    assert torch.equal(p.detach(), x)


@pytest.mark.parametrize("settings", [{"betas": (0.9, 1.0)}, {"betas": (0.9, 0.9), "momentum": 0.9}, {"lr": -1.0}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        POGO([ManifoldParameter(torch.eye(3), Stiefel())], **settings)


def test_other_manifolds_are_refused():
    with pytest.raises(ValueError, match="is for Stiefel, Unitary"):
        POGO([ManifoldParameter(torch.eye(3), SPD())])
