"""O10: sparse gradients of tables of points: the dense step on the touched rows, and nothing elsewhere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from manopt_torch import SPD, Euclidean, ManifoldParameter, Sphere, Stiefel, Unitary, constrain, max_residual
from manopt_torch.optim import RiemannianAdam, RiemannianRMSprop, RiemannianSGD

TABLES = [
    (Sphere(), (7, 4)),
    (Euclidean(), (7, 3)),
    (Stiefel(), (7, 4, 2)),
    (Unitary(), (7, 2, 3, 3)),
    (SPD(), (7, 2, 2)),
]
SETTINGS = {
    "SGD": lambda groups: RiemannianSGD(groups, lr=0.1),
    "momentum": lambda groups: RiemannianSGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda groups: RiemannianAdam(groups, lr=0.1),
    "AMSGrad": lambda groups: RiemannianAdam(groups, lr=0.1, amsgrad=True, maximize=True),
}
both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
everywhere = pytest.mark.parametrize(("M", "shape"), TABLES)


def table(M, shape, dtype) -> nn.Parameter:
    torch.manual_seed(0)
    return ManifoldParameter(M.random(*shape, dtype=dtype), M)


def optimizer_of(name, p, M):
    return SETTINGS[name]([{"params": [p], "manifold": M}])


def sparse_gradient(p, rows):
    """A gradient as an embedding gives it, not coalesced: a row that was looked up twice stands there twice."""
    index = torch.tensor(rows)
    values = torch.randn(len(rows), *p.shape[1:], dtype=p.dtype)
    return torch.sparse_coo_tensor(index[None], values, p.shape, check_invariants=True)


@both
@everywhere
def test_plain_descent_is_the_dense_one_throughout(M, shape, dtype):
    p = table(M, shape, dtype)
    q = copy.deepcopy(p)
    sparse, dense = optimizer_of("SGD", p, M), optimizer_of("SGD", q, M)
    for rows in ([3, 1, 3], [0], [6, 5, 1], []):
        p.grad = sparse_gradient(p, rows) if rows else sparse_gradient(p, [0]) * 0
        q.grad = p.grad.to_dense()
        sparse.step()
        dense.step()
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-12)


@both
@everywhere
@pytest.mark.parametrize("name", SETTINGS)
def test_touched_rows_are_stepped_as_a_small_dense_table_and_the_others_stay(name, M, shape, dtype):
    p = table(M, shape, dtype)
    optimizer = optimizer_of(name, p, M)
    rows = [1, 2, 5]
    q = ManifoldParameter(p.detach()[rows].clone(), M)
    dense = optimizer_of(name, q, M)
    start = p.detach().clone()
    for _ in range(4):
        p.grad = sparse_gradient(p, [5, 1, 2, 5])
        q.grad = p.grad.to_dense()[rows]
        kept = p.grad
        optimizer.step()
        dense.step()
        assert p.grad is kept
    torch.testing.assert_close(p.detach()[rows], q.detach(), rtol=1e-12, atol=1e-12)
    others = [0, 3, 4, 6]
    assert torch.equal(p.detach()[others], start[others])
    assert optimizer.state[p].keys() == dense.state[q].keys()
    for key, value in optimizer.state[p].items():
        expected = dense.state[q][key]
        if value.dim():
            assert value.shape[0] == 7
            assert not value[others].any()
            value = value[rows]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert float(M.residual(p.detach()).max()) < 1e-12


@everywhere
def test_moments_of_rows_that_rest_stay_bit_for_bit(M, shape):
    p = table(M, shape, torch.float64)
    optimizer = optimizer_of("Adam", p, M)
    p.grad = sparse_gradient(p, [0, 1, 2])
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[p].items()} | {"x": p.detach().clone()}
    p.grad = sparse_gradient(p, [2, 3])
    optimizer.step()
    after = {**optimizer.state[p], "x": p.detach()}
    for key in ("exp_avg", "exp_avg_sq", "x"):
        assert torch.equal(before[key][[0, 1, 4, 5, 6]], after[key][[0, 1, 4, 5, 6]])
        assert not torch.equal(before[key][2], after[key][2])
    assert after["step"] == 2


def test_on_euclidean_it_is_sparse_adam():
    layers = [nn.Embedding(9, 4, sparse=True, dtype=torch.float64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = RiemannianAdam([{"params": list(layers[0].parameters()), "manifold": Euclidean()}], lr=0.1, eps=1e-30)
    theirs = torch.optim.SparseAdam(layers[1].parameters(), lr=0.1, eps=1e-30)  # which it adds elsewhere
    for words in ([1, 1, 3], [3, 4], [8], [1, 2, 3, 4, 5]):
        for layer, optimizer in zip(layers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            layer(torch.tensor(words)).pow(3).sum().backward()
            optimizer.step()
        torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [RiemannianSGD, RiemannianAdam])
def test_an_embedding_on_the_sphere_learns_beside_dense_layers(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Linear(3, 2))
    constrain(net, {"0.weight": Sphere(), "1.weight": Stiefel()})
    optimizer = kind(net, lr=0.1)
    words = torch.tensor([3, 7, 7, 11])
    targets = torch.randn(4, 2)
    start = net[0].weight.detach().clone()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (net(words) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert max_residual(net) < 1e-6
    rest = sorted(set(range(20)) - {3, 7, 11})
    assert torch.equal(net[0].weight[rest], start[rest])


def test_dense_and_sparse_may_alternate_and_checkpoints_resume():
    p = table(Sphere(), (7, 4), torch.float64)
    optimizer = optimizer_of("Adam", p, Sphere())
    other = nn.Parameter(Sphere().random(7, 4, dtype=torch.float64))
    optimizer.add_param_group({"params": [other], "manifold": Sphere()})
    twin, resumed = copy.deepcopy((p, optimizer)), None
    for t in range(4):
        if t == 2:
            q = copy.deepcopy(p)
            second = nn.Parameter(other.detach().clone())
            resumed = optimizer_of("Adam", q, Sphere())
            resumed.add_param_group({"params": [second], "manifold": Sphere()})
            resumed.load_state_dict(optimizer.state_dict())
            twin = (q, resumed)
        gradient = sparse_gradient(p, [1, 4]) if t % 2 else torch.randn_like(p)
        for x, opt in ((p, optimizer), twin):
            x.grad = gradient.clone()
            opt.step()
        assert torch.equal(p, twin[0])
    assert resumed is not None
    assert resumed.state[twin[0]]["step"] == 4


def test_half_precision_rows():
    p = ManifoldParameter(Sphere().random(7, 4).to(torch.bfloat16), Sphere())
    optimizer = optimizer_of("Adam", p, Sphere())
    before = p.detach().clone()
    p.grad = torch.sparse_coo_tensor([[2]], torch.ones(1, 4, dtype=torch.bfloat16), p.shape, check_invariants=True)
    optimizer.step()
    assert not torch.equal(p[2], before[2])
    assert torch.equal(p[[0, 1, 3]], before[[0, 1, 3]])
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_a_row_that_is_not_finite_is_named():
    p = table(Sphere(), (7, 4), torch.float64)
    optimizer = RiemannianAdam([p], error_if_nonfinite=True)
    p.grad = torch.sparse_coo_tensor([[2]], torch.full((1, 4), math.nan).double(), p.shape, check_invariants=True)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0"):
        optimizer.step()
    assert torch.equal(p, before)
    assert not optimizer.state[p]


def test_what_is_not_a_table_of_points_is_refused():
    p = table(Stiefel(), (5, 3), torch.float64)  # its rows are no points
    p.grad = sparse_gradient(p, [1])
    with pytest.raises(ValueError, match="rows are points"):
        optimizer_of("SGD", p, Stiefel()).step()
    q = table(Sphere(), (7, 4), torch.float64)
    q.grad = sparse_gradient(q, [1])
    with pytest.raises(ValueError, match="sparse=False"):
        RiemannianRMSprop([q]).step()
