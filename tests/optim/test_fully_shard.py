"""A module under ``fully_shard`` takes the same steps as without it, on one process and on two."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from manopt_torch import constrain, max_residual, param_groups
from manopt_torch.manifolds import Stiefel
from manopt_torch.optim import RiemannianAdam, RiemannianSGD, riemannian

FACTORIES = {
    "sgd": lambda model: RiemannianSGD(model, lr=0.1, momentum=0.9),
    "adam": lambda model: RiemannianAdam(model, lr=0.1),
    "wrapped": lambda model: riemannian(torch.optim.Adam(param_groups(model), lr=0.1)),
}


def compare(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    constrain(net, {"*.weight": Stiefel()})  # one tall, one wide
    sharded = copy.deepcopy(net)
    fully_shard(sharded)
    plain, other = FACTORIES[name](net), FACTORIES[name](sharded)
    data = torch.randn(16, 4)
    for _ in range(5):
        for model, optimizer in ((net, plain), (sharded, other)):
            optimizer.zero_grad()
            model(data).square().sum().backward()
            optimizer.step()
    assert max_residual(sharded) < 1e-5
    for p, q in zip(net.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor().detach(), p.detach(), rtol=0, atol=1e-5)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", FACTORIES)
def test_one_process(name):
    compare(name)


def worker(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for name in FACTORIES:
        compare(name)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(worker, args=(str(tmp_path / "store"),), nprocs=2)
