"""``clip_grad_norm_``: torch's where nothing is constrained, the Riemannian norm elsewhere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from manopt_torch import SPD, Euclidean, ManifoldParameter, Sphere, Stiefel, Unitary, constrain, param_groups
from manopt_torch.optim import RiemannianSGD, clip_grad_norm_


def give_gradients(module: nn.Module, scale: float = 1.0) -> list[torch.Tensor]:
    for p in module.parameters():
        p.grad = scale * torch.randn_like(p)
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_without_constraints_it_is_torch_to_the_bit(max_norm, norm_type, foreach):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, dtype=torch.complex64), nn.Linear(2, 2, dtype=torch.float64))
    net[0].weight.requires_grad_(False)
    twin = copy.deepcopy(net)
    give_gradients(net)
    net[0].weight.grad = None
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    theirs = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type, foreach=foreach)
    ours = clip_grad_norm_(net, max_norm, norm_type, foreach=foreach)
    assert torch.equal(ours, theirs)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def spd_norm(x, g):
    """‖x herm(g) x‖ in the metric tr(x⁻¹ u x⁻¹ v), that is ‖x^½ herm(g) x^½‖_F, by a Cholesky factor: xg is similar."""
    a = (g + g.mH) / 2 @ x
    return torch.einsum("ij,ji->", a, a).real.sqrt()


NORMS = {
    Stiefel(): lambda x, g: torch.linalg.matrix_norm(g - x @ (x.mH @ g + g.mH @ x) / 2),
    Unitary(): lambda x, g: torch.linalg.matrix_norm((x.mH @ g - g.mH @ x) / 2),
    Sphere(): lambda x, g: torch.linalg.vector_norm(g - (x.conj() @ g).real * x),
    SPD(): spd_norm,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("M", NORMS)
def test_the_norm_is_that_of_the_riemannian_gradient(M, dtype):
    torch.manual_seed(1)
    shape = (3,) if M.event_dim == 1 else (3, 3)
    net = nn.ParameterList([ManifoldParameter(M.random(*shape, dtype=dtype), M) for _ in range(3)])
    net.append(nn.Parameter(torch.randn(5, dtype=dtype)))
    grads = give_gradients(net)
    expected = [NORMS[M](p.detach(), g) for p, g in zip(net[:3], grads, strict=False)] + [
        grads[3].abs().pow(2).sum().sqrt()
    ]
    for norm_type in (2.0, math.inf, 1.0):
        parts = [*expected[:3], *(grads[3].abs() if norm_type != 2.0 else expected[3:])]
        total = torch.linalg.vector_norm(torch.stack(list(parts)), norm_type)
        torch.testing.assert_close(clip_grad_norm_(net, math.inf, norm_type), total, rtol=1e-12, atol=0)
        max_norm = 0.3 * total.item()
        torch.testing.assert_close(clip_grad_norm_(net, max_norm, norm_type), total, rtol=1e-12, atol=0)
        for p, g in zip(net, grads, strict=True):
            torch.testing.assert_close(p.grad, 0.3 * g, rtol=1e-5, atol=0)
        torch.testing.assert_close(clip_grad_norm_(net, math.inf, norm_type).item(), max_norm, rtol=1e-5, atol=0)
        for p, g in zip(net, grads, strict=True):
            p.grad = g.clone()


def test_every_point_of_a_batch_counts():
    M = Stiefel()
    table = ManifoldParameter(M.random(4, 3, 2, dtype=torch.float64), M)
    table.grad = torch.randn_like(table)
    parts = torch.stack([NORMS[M](x, g) for x, g in zip(table.detach(), table.grad, strict=True)])
    torch.testing.assert_close(clip_grad_norm_(table, 1e9), torch.linalg.vector_norm(parts))
    torch.testing.assert_close(clip_grad_norm_([table], 1e9, math.inf), parts.max())


def test_a_normal_gradient_clips_nothing():
    x = ManifoldParameter(Sphere().random(4, dtype=torch.float64), Sphere())
    x.grad = 100 * x.detach()
    assert clip_grad_norm_(x, 1.0) < 1e-12
    assert torch.equal(x.grad, 100 * x.detach())


def test_every_way_to_say_what_is_meant():
    net = constrain(nn.Linear(3, 5), "weight", Stiefel())
    grads = give_gradients(net)
    optimizer = RiemannianSGD(net, lr=0.1)
    forms = [
        net, net.parameters(), list(net.parameters()), param_groups(net), optimizer.param_groups,
        [{"params": net.weight, "manifold": Stiefel()}, {"params": [("bias", net.bias)], "manifold": Euclidean()}],
        list(net.named_parameters()),
    ]  # fmt: skip
    (first, *others) = [clip_grad_norm_(form, 1e9) for form in forms]
    assert all(torch.equal(first, other) for other in others)
    assert first < torch.nn.utils.get_total_norm(grads)


def test_what_is_not_finite_raises_on_request_and_scales_nothing():
    net = constrain(nn.Linear(3, 5), "weight", Stiefel())
    give_gradients(net)
    net.weight.grad[0, 0] = math.nan
    kept = net.bias.grad.clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(net, 1.0, error_if_nonfinite=True)
    assert torch.equal(net.bias.grad, kept)
    assert clip_grad_norm_(net, 1.0).isnan()


def test_nothing_to_clip():
    assert clip_grad_norm_(constrain(nn.Linear(3, 5), "weight", Stiefel()), 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0
