"""``error_if_nonfinite``: NaN and inf in a gradient are named, and reach neither a parameter nor a state."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

import manopt_torch.optim
from manopt_torch import SPD, Euclidean, ManifoldParameter, Sphere, Stiefel, Unitary, param_groups
from manopt_torch.optim import (
    POGO,
    RiemannianAdam,
    RiemannianMatrixAdam,
    RiemannianMuon,
    RiemannianOptimizer,
    RiemannianSGD,
    riemannian,
)

CLASSES = [
    c
    for c in map(vars(manopt_torch.optim).get, manopt_torch.optim.__all__)
    if inspect.isclass(c) and issubclass(c, RiemannianOptimizer) and c is not RiemannianOptimizer
]


def model(M=None, dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Module()
    for i in range(3):
        setattr(net, f"W{i}", ManifoldParameter((M or Stiefel()).random(3, 3, dtype=dtype), M or Stiefel()))
    net.b = nn.Parameter(torch.randn(4, dtype=dtype))
    return net


def backward(net):
    for p in net.parameters():
        p.grad = torch.randn_like(p)


def everything(net, optimizer):
    state = {f"{i}.{k}": v for i, p in enumerate(net.parameters()) for k, v in optimizer.state[p].items()}
    return {k: v.detach().clone() for k, v in {**dict(net.named_parameters()), **state}.items()}


def assert_raises_and_changes_nothing(net, optimizer, match):
    before = everything(net, optimizer)
    grads = {k: p.grad for k, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    after = everything(net, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[k], after[k], rtol=0, atol=0, equal_nan=True) for k in before)
    assert all(p.grad is grads[k] for k, p in net.named_parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_bad_gradient_is_named_and_changes_nothing(kind, dtype, value):
    net = model(dtype=dtype)
    net.b = ManifoldParameter(Unitary().random(4, 4, dtype=dtype), Unitary())  # some classes take matrices only
    optimizer = kind(param_groups(net), lr=0.01, error_if_nonfinite=True)
    for _ in range(2):
        backward(net)
        optimizer.step()
    net.W1.grad[2, 0] = value if dtype == torch.float64 else complex(0, value)
    assert_raises_and_changes_nothing(net, optimizer, r"parameter 1 of group 0, a ManifoldParameter of shape \(3, 3\)")
    backward(net)
    net.b.grad[3, 3] = value
    assert_raises_and_changes_nothing(net, optimizer, r"parameter 0 of group 1, a ManifoldParameter of shape \(4, 4\)")
    backward(net)
    before = everything(net, optimizer)
    optimizer.step()
    assert not torch.equal(net.W1, before["W1"])


@pytest.mark.parametrize("M", [Unitary(), SPD(), Sphere(), Stiefel("canonical")])
def test_every_manifold(M):
    net = model(M)
    optimizer = RiemannianAdam(net, error_if_nonfinite=True)
    backward(net)
    net.W2.grad[0, 0] = math.nan
    assert_raises_and_changes_nothing(net, optimizer, "parameter 2 of group 0")
    assert not any(optimizer.state.values())


def test_names_are_those_that_torch_keeps():
    net = model()
    named = dict(net.named_parameters())
    groups = [
        {"params": [(k, p) for k, p in named.items() if k != "b"], "manifold": Stiefel()},
        {"params": [("the.bias", net.b)], "manifold": Euclidean()},
    ]
    optimizer = RiemannianSGD(groups, lr=0.1, momentum=0.9, error_if_nonfinite=True)
    backward(net)
    net.W2.grad[0, 0] = math.nan
    assert_raises_and_changes_nothing(net, optimizer, "the gradient of 'W2'")
    backward(net)
    net.b.grad[0] = math.inf
    assert_raises_and_changes_nothing(net, optimizer, "the gradient of 'the.bias'")


def test_it_is_a_setting_of_a_group_and_off_by_default():
    net = model()
    optimizer = RiemannianSGD(param_groups(net), lr=0.1)
    assert not any(group["error_if_nonfinite"] for group in optimizer.param_groups)
    backward(net)
    net.b.grad[0] = math.nan
    optimizer.step()
    assert net.b[0].isnan()
    net.b.data.zero_()
    optimizer.param_groups[0]["error_if_nonfinite"] = True
    optimizer.step()  # the group of b does not ask
    net.W0.grad[0, 0] = math.nan
    assert_raises_and_changes_nothing(net, optimizer, "parameter 0 of group 0")
    del optimizer.param_groups[0]["error_if_nonfinite"]  # a checkpoint from elsewhere
    optimizer.load_state_dict(optimizer.state_dict())
    net.W0.grad[0, 0] = 0
    optimizer.step()


def test_half_precision_is_looked_at_as_it_is_stored():
    """65504 is the largest number of float16, and finite."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    p.grad = torch.full_like(p, 65504.0)
    optimizer = RiemannianSGD([{"params": [p], "manifold": Euclidean()}], lr=1e-4, error_if_nonfinite=True)
    optimizer.step()
    p.grad = p.grad * 2
    with pytest.raises(RuntimeError, match="holds NaN or inf"):
        optimizer.step()


@pytest.mark.parametrize("frame", ["tangent", "ambient"])
def test_wrapped(frame):
    net = model()
    free = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    groups = [*param_groups(net), {"params": list(free.parameters())}]
    optimizer = riemannian(torch.optim.SGD(groups, lr=0.1), frame=frame, error_if_nonfinite=True)
    backward(net)
    free(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    net.W1.grad[0, 1] = math.nan
    assert_raises_and_changes_nothing(net, optimizer, "parameter 1 of group 0")
    backward(net)
    (free(torch.tensor([1, 3])) * math.inf).sum().backward()
    assert_raises_and_changes_nothing(net, optimizer, r"parameter 0 of group 2, a Parameter of shape \(5, 2\)")


@pytest.mark.parametrize(
    "kind", ["RiemannianSGD", "RiemannianAdam", "RiemannianASA", "RiemannianMuon", "Landing", "POGO"]
)
def test_a_gradient_whose_products_overflow(kind):
    p = ManifoldParameter(Stiefel().random(4, 2), Stiefel())
    optimizer = getattr(manopt_torch.optim, kind)([p], lr=0.1, error_if_nonfinite=True)
    p.grad = torch.full((4, 2), 3e38)
    p.grad[0, 0] = -3e38
    before = p.detach().clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "too large for torch.float32" in str(error)  # noqa: PT017  # a finite step is as good
        assert torch.equal(p, before)
        assert not optimizer.state.get(p)
    assert p.isfinite().all()


def test_riemannian_gradient_in_half_precision():
    p = nn.Parameter((SPD().random(3, 3) * 30).half())
    group = {"params": [p], "manifold": SPD()}
    optimizer = riemannian(torch.optim.SGD([group], lr=1e-6), error_if_nonfinite=True)
    p.grad = torch.full((3, 3), 100.0).half()
    with pytest.raises(RuntimeError, match=r"too large for torch\.float16"):
        optimizer.step()
    assert p.isfinite().all()


def test_one_large_gradient_is_forgotten():
    p = ManifoldParameter(Stiefel().random(5, 3), Stiefel())
    optimizer = POGO([p], lr=1e-3, betas=(0.9, 0.999), error_if_nonfinite=True)
    for scale in (1.0, 1e20, 1.0):
        p.grad = scale * torch.randn(5, 3)
        optimizer.step()
    assert p.isfinite().all()


def test_steps_of_muon_do_not_depend_on_the_size_of_gradients():
    for shape in ((5, 3), (4, 4)):
        direction, lengths = torch.randn(shape), []
        x = Stiefel().random(*shape)
        for scale in (1e-25, 1.0, 1e20):
            p = ManifoldParameter(x.clone(), Stiefel())
            optimizer = RiemannianMuon([p], lr=1e-2)
            p.grad = scale * direction
            optimizer.step()
            lengths.append((p - x).norm().item())
        assert lengths == pytest.approx([lengths[1]] * 3, rel=1e-3)


def test_matrix_adam_takes_a_large_gradient():
    p = ManifoldParameter(Stiefel().random(5, 3), Stiefel())
    optimizer = RiemannianMatrixAdam([p], lr=1e-2, error_if_nonfinite=True)
    for scale in (1.0, 1e20, 1.0):
        p.grad = scale * torch.randn(5, 3)
        optimizer.step()
    assert p.isfinite().all()


def test_expanded_parameters_are_refused():
    p = nn.Parameter(torch.tensor([0.6, 0.8]).expand(3, 2))
    with pytest.raises(ValueError, match="is expanded"):
        RiemannianSGD([{"params": [p], "manifold": Sphere()}], lr=0.1)
