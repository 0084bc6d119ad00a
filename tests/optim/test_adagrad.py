"""RiemannianAdagrad: its formula on a sphere, and the state of torch's."""

import pytest
import torch
from torch import nn

from manopt_torch import Sphere, Stiefel
from manopt_torch.optim import RiemannianAdagrad


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_steps_by_the_formula(dtype):
    """One sum of ‖r‖² per point, and a rate lr/(1 + lr_decay t)."""
    M = Sphere()
    p = nn.Parameter(M.random(2, 4, dtype=dtype))
    optimizer = RiemannianAdagrad(
        [{"params": [p], "manifold": M}], lr=0.1, lr_decay=0.5, initial_accumulator_value=0.3, eps=1e-3
    )
    total = torch.full((2,), 0.3, dtype=torch.float64)
    for t in range(3):
        x, g = p.detach().clone(), torch.randn(2, 4, dtype=dtype)
        r = g - (x.conj() * g).real.sum(-1, keepdim=True) * x
        total = total + r.abs().square().sum(-1)
        p.grad = g
        optimizer.step()
        expected = M.retract(x, -0.1 / (1 + 0.5 * t) * r / (total.sqrt() + 1e-3)[:, None])
        torch.testing.assert_close(p.detach(), expected)


def test_the_state_of_torch_is_summed_over_each_point():
    x = nn.Parameter(Stiefel().random(2, 5, 3))
    theirs = torch.optim.Adagrad([x], lr=0.01)
    x.grad = torch.randn_like(x)
    theirs.step()
    with torch.no_grad():
        x.copy_(Stiefel().nearest(x))
    ours = RiemannianAdagrad([{"params": [x], "manifold": Stiefel()}])
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.state[x]["sum"], x.grad.square().sum((-2, -1)))
    assert ours.state[x]["step"] == 1


@pytest.mark.parametrize("name", ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=name):
        RiemannianAdagrad([{"params": [nn.Parameter(torch.eye(3))], "manifold": Stiefel()}], **{name: -1.0})
