"""RiemannianASA by its formula, and the state entries of its own shapes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from manopt_torch import Euclidean, ManifoldParameter, Sphere, Stiefel, View
from manopt_torch.optim import RiemannianAdam, RiemannianASA, RiemannianMatrixAdam, RiemannianSGD


def stepped(kind, shape, M, **settings):
    p = nn.Parameter(M.random(*shape))
    optimizer = kind([{"params": [p], "manifold": M}], **settings)
    p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_two_steps_by_the_formula(dtype):
    """The second gradient is small, so that the running maxima, and not the means, decide."""
    M = Stiefel()
    p = nn.Parameter(M.random(5, 3, dtype=dtype))
    optimizer = RiemannianASA([{"params": [p], "manifold": M}], lr=0.1, beta=0.5, eps=1e-3)
    rows, columns, largest_row, largest_column = np.zeros(5), np.zeros(3), np.zeros(5), np.zeros(3)
    for size in (1.0, 0.1):
        x, g = p.detach().clone(), size * torch.randn(5, 3, dtype=dtype)
        r = M.rgrad(x, g).numpy()
        rows = 0.5 * rows + 0.5 * np.diag(r @ r.conj().T).real / 3
        columns = 0.5 * columns + 0.5 * np.diag(r.conj().T @ r).real / 5
        largest_row, largest_column = np.maximum(largest_row, rows), np.maximum(largest_column, columns)
        scaled = np.diag((largest_row + 1e-3) ** -0.25) @ r @ np.diag((largest_column + 1e-3) ** -0.25)
        p.grad = g
        optimizer.step()
        torch.testing.assert_close(p.detach(), M.retract(x, -0.1 * M.project(x, torch.from_numpy(scaled))))


@pytest.mark.parametrize("kind", [RiemannianASA, RiemannianMatrixAdam])
@pytest.mark.parametrize(
    ("M", "shape", "other"),
    [
        (Stiefel(), (2, 5, 3), (2, 5, 2)),
        (Stiefel(), (4, 4), (5, 5)),
        (View(Stiefel(), "transpose"), (3, 5), (2, 5)),
        (View(View(Stiefel(), "transpose"), "flatten", ndim=4), (3, 2, 2, 2), (2, 2, 2, 2)),
    ],
)
def test_its_state_is_loaded_bit_for_bit_and_that_of_another_shape_refused(kind, M, shape, other):
    optimizer = stepped(kind, shape, M)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = stepped(kind, shape, M)
    resumed.load_state_dict(saved)
    torch.testing.assert_close(resumed.state_dict()["state"], saved["state"], rtol=0, atol=0)
    with pytest.raises(ValueError, match="does not fit"):
        stepped(kind, other, M).load_state_dict(saved)


@pytest.mark.parametrize("live", [RiemannianSGD, RiemannianASA, RiemannianMatrixAdam])
def test_the_state_of_another_kind_is_refused_by_name(live):
    saved = stepped(RiemannianAdam, (5, 3), Stiefel()).state_dict()
    with pytest.raises(ValueError, match=rf"{live.__name__} has no state 'exp_avg|{live.__name__} has no state 'step"):
        stepped(live, (5, 3), Stiefel()).load_state_dict(saved)


@pytest.mark.parametrize("M", [Euclidean(), Sphere()], ids=repr)
def test_points_that_are_no_matrices_are_refused(M):
    with pytest.raises(ValueError, match="no matrices as points"):
        RiemannianASA([{"params": [nn.Parameter(M.random(3))], "manifold": M}])


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"beta": 1.0}, {"eps": -1.0}, {"weight_decay": -1.0}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RiemannianASA([{"params": [nn.Parameter(torch.eye(3))], "manifold": Stiefel()}], **settings)


def test_a_gradient_whose_square_overflows_does_no_harm():
    p = ManifoldParameter(Stiefel().random(5, 3), Stiefel())
    optimizer = RiemannianASA([p], lr=0.1)
    for _ in range(3):
        p.grad = 1e20 * torch.randn(5, 3)
        optimizer.step()
    assert Stiefel().residual(p.detach()) < 1e-5
