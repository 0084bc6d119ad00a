"""Buckets: what is stacked, what is written back, and who owns the state."""

from __future__ import annotations

import pytest
import torch

from manopt_torch import storage
from manopt_torch.manifolds import Euclidean, Stiefel
from manopt_torch.storage import Bucket, Buckets, partition, stack, write

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def parameters(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(shape, dtype=dtype)
    return params


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3])
def test_stack_and_write_are_inverse(count, dtype):
    params = parameters(count, 4, 2, dtype=dtype)
    before = [p.clone() for p in params]
    stacked = stack(params).clone()
    assert stacked.shape == (count, 4, 2)
    write(params, torch.zeros_like(stacked))
    assert all((p == 0).all() for p in params)
    write(params, stacked)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("count", [1, 2])
def test_lazily_conjugated_and_strided_tensors(count):
    tensors = [torch.randn(3, 4, dtype=torch.complex64).mH for _ in range(count)]
    assert tensors[0].is_conj()
    torch.testing.assert_close(stack(tensors), torch.stack([t.resolve_conj() for t in tensors]))
    torch.view_as_real(stack(tensors))
    targets = [torch.zeros(5, 4, dtype=torch.complex64).mT for _ in range(count)]
    values = torch.randn(count, 5, 4, dtype=torch.complex64).mH
    write(targets, values)
    torch.testing.assert_close(torch.stack(targets), values.resolve_conj())


def test_half_precision_is_computed_in_float32():
    params = parameters(2, 3, 3, dtype=torch.bfloat16)
    x, g, _ = Bucket(Stiefel(), params, [{}, {}]).gather()
    assert x.dtype == g.dtype == torch.float32


def test_complex_numbers_of_a_manifold_of_numbers_are_pairs_of_reals():
    params = parameters(2, 3, dtype=torch.complex64)
    states = [{"exp_avg": torch.randn(3, dtype=torch.complex64), "step": torch.tensor(1.0)} for _ in params]
    bucket = Bucket(Euclidean(), params, states)
    x, g, s = bucket.gather()
    assert x.shape == g.shape == s["exp_avg"].shape == (2, 3, 2)
    assert s["step"].shape == (2,)
    bucket.scatter(x + 1, {"exp_avg": s["exp_avg"] * 2, "step": s["step"] + 1})
    assert states[0]["exp_avg"].dtype == torch.complex64
    assert states[1]["step"] == 2


def test_state_is_rows_of_one_stack_written_in_place():
    params = parameters(3, 4, 2)
    states: list[dict] = [{}, {}, {}]
    bucket = Bucket(Stiefel(), params, states)
    x, _, s = bucket.gather()
    assert s == {}
    first = torch.randn(3, 4, 2)
    bucket.scatter(x, {"m": first})
    row = states[1]["m"]
    assert all(state["m"]._base is states[0]["m"]._base for state in states)
    first.zero_()
    assert (row != 0).any(), "the stack must not be the caller's memory"
    bucket.scatter(x, {"m": torch.ones(3, 4, 2)})
    assert states[1]["m"] is row
    assert (row == 1).all()


@pytest.mark.parametrize("count", [1, 2])
def test_a_replaced_row_is_taken_over_and_its_owner_keeps_it(count):
    params = parameters(count, 4, 2)
    states: list[dict] = [{} for _ in params]
    bucket = Bucket(Stiefel(), params, states)
    bucket.scatter(bucket.gather()[0], {"m": torch.zeros(count, 4, 2)})
    mine = torch.full((4, 2), 5.0)
    states[0]["m"] = mine
    x, _, s = bucket.gather()
    assert (s["m"][0] == 5).all()
    bucket.scatter(x, {"m": torch.ones(count, 4, 2)})
    assert (mine == 5).all()
    assert (states[0]["m"] == 1).all()


def test_membership_follows_gradients_shapes_and_dtypes():
    params = parameters(3, 4, 2) + parameters(2, 3, 3) + parameters(1, 4, 2, dtype=torch.float64)
    state: dict = {p: {} for p in params}
    group = {"params": params, "manifold": Stiefel()}
    buckets = Buckets()
    assert [len(b.params) for b in buckets.of(group, state)] == [3, 2, 1]
    plan = buckets.of(group, state)
    assert buckets.of(group, state) is plan, "the plan is kept"
    params[0].grad = None
    assert [len(b.params) for b in buckets.of(group, state)] == [2, 2, 1]
    state[params[1]]["m"] = torch.zeros(4, 2)
    assert [len(b.params) for b in buckets.of(group, state)] == [1, 1, 2, 1], "one at its first step, one not"


def test_another_manifold_of_the_group_is_taken_up():
    params = parameters(2, 4, 2)
    state: dict = {p: {} for p in params}
    group = {"params": params, "manifold": Stiefel()}
    buckets = Buckets()
    plan = buckets.of(group, state)
    group["manifold"] = Stiefel()
    assert buckets.of(group, state) is plan, "an equal one changes nothing"
    group["manifold"] = Stiefel(retraction="qr")
    assert [b.manifold for b in buckets.of(group, state)] == [Stiefel(retraction="qr")]


def test_chunks_are_bounded(monkeypatch):
    params = parameters(5, 4, 2)
    monkeypatch.setattr(storage, "CHUNK_BYTES", 2 * 4 * 2 * 4)
    assert [len(chunk) for chunk in partition(Stiefel(), params)] == [2, 2, 1]
    monkeypatch.setattr(storage, "CHUNK_BYTES", 1)
    assert [len(chunk) for chunk in partition(Stiefel(), params)] == [1] * 5


def test_sparse_gradients_and_wrong_shapes_are_refused():
    p = torch.nn.Parameter(torch.randn(4, 2))
    p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(ValueError, match="sparse=False"):
        Bucket(Stiefel(), [p], [{}]).gather()
    params = [*parameters(1, 4, 2), p, *parameters(1, 4, 2)]
    assert [len(chunk) for chunk in partition(Stiefel(), params)] == [2, 1], "dense and sparse are not stacked"
    with pytest.raises(ValueError, match="sparse=False"):
        [bucket.gather() for bucket in Buckets().of({"params": params, "manifold": Stiefel()}, {q: {} for q in params})]
    with pytest.raises(ValueError, match="view_for"):
        partition(Stiefel(), [torch.nn.Parameter(torch.randn(2, 4))])
