"""Faults that users of comparable libraries met, at the level of modules and optimizers; geometry's own are with it.

Numbers are those of the collection of cases: each is a small input on which another library goes wrong.
"""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manopt_torch import (
    SPD,
    Euclidean,
    ManifoldParameter,
    Sphere,
    Stiefel,
    Unitary,
    View,
    constrain,
    linalg,
    named_manifolds,
    param_groups,
)
from manopt_torch.nn.init import haar_
from manopt_torch.optim import RiemannianAdam, RiemannianSGD, riemannian

#: every kind of optimizer, by name
OPTIMIZERS = {
    "SGD": lambda params: RiemannianSGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: RiemannianAdam(params, lr=0.1),
    **{
        f"wrapped {kind.__name__}": lambda params, kind=kind: riemannian(kind(params, lr=0.1))
        for kind in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.RMSprop,
            torch.optim.Rprop,
        )
    },
}
every_optimizer = pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)


def on(manifold, *params):
    return [{"params": list(params), "manifold": manifold}]


def off(x):
    """‖XᴴX − I‖_F in double precision."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float64))
    return torch.linalg.matrix_norm(x.mH @ x - torch.eye(x.shape[-1], dtype=x.dtype)).max().item()


def test_case_16_unitary_procrustes():
    """min ‖X − A‖² over U(3) is Σ(σ − 1)², at the polar factor of A."""
    a = torch.randn(3, 3, dtype=torch.complex128)
    u, s, vh = torch.linalg.svd(a)
    x = nn.Parameter(Unitary().random(3, 3, dtype=a.dtype))
    optimizer = RiemannianSGD(on(Unitary(), x), lr=0.1, momentum=0.8)
    for _ in range(400):
        x.grad = 2 * (x.detach() - a)
        optimizer.step()
    assert math.isclose((x - a).abs().square().sum().item(), (s - 1).square().sum().item(), rel_tol=1e-9)
    torch.testing.assert_close(x.detach(), u @ vh, rtol=0, atol=1e-4)


@pytest.mark.parametrize("build", [RiemannianAdam, lambda groups, lr: riemannian(torch.optim.Adam(groups, lr=lr))])
def test_case_23_complex_adam_has_a_moment_for_each_part(build):
    z = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    z.grad = torch.tensor([3 + 4j])
    build(on(Euclidean(), z), lr=0.1).step()
    torch.testing.assert_close(z.detach(), torch.tensor([-0.1 - 0.1j]))


def test_case_25_weight_decay_does_not_collapse_a_constrained_weight():
    layer = constrain(nn.Linear(3, 6, dtype=torch.float64), "weight", Stiefel())
    optimizer = RiemannianAdam(layer, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True)
    layer(torch.randn(2, 3, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    assert off(layer.weight) < 1e-14


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.float16, torch.float32])
def test_cases_28_and_29_orthogonal_initialisation_of_every_dtype(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for draw in (
        lambda g, dtype: haar_(torch.empty(4, 4, dtype=dtype), generator=g),
        lambda g, dtype: Stiefel().random(4, 3, dtype=dtype, generator=g),
        lambda g, dtype: Unitary().random(4, 4, dtype=dtype, generator=g),
    ):
        x = draw(torch.Generator().manual_seed(1), dtype)
        assert x.dtype == dtype
        assert off(x) < 16 * torch.finfo(dtype).eps
        assert torch.equal(x, draw(torch.Generator().manual_seed(1), wide).to(dtype))  # computed wide, rounded once


def test_case_28_unitary_matrices_are_haar_distributed():
    """E|tr X|² = 1, E|tr X|⁴ = 2 and E X = 0 on U(4): five standard errors of 20 000 samples."""
    x = haar_(torch.empty(4, 4, 1, dtype=torch.complex64))[..., 0]
    assert x.imag.abs().max() > 0.01
    x = Unitary().random(20_000, 4, 4, dtype=torch.complex64)
    trace = x.diagonal(dim1=-2, dim2=-1).sum(-1).abs().square()
    assert abs(trace.mean().item() - 1) < 5 * math.sqrt(1 / 20_000)
    assert abs(trace.square().mean().item() - 2) < 5 * math.sqrt(20 / 20_000)  # E|tr|⁸ = 24
    assert x.mean(0).abs().max() < 5 * math.sqrt(0.25 / 20_000)


def test_case_31_exponentials_of_long_vectors_stay_orthogonal():
    b = torch.randn(64, 64)
    a = 100 * (b - b.mT)
    assert off(linalg.expm_skew(a)) < 1e-4
    assert off(Unitary(retraction="exp").retract(torch.eye(64), a)) < 1e-4
    assert off(Unitary().retract(torch.eye(64), a)) < 1e-4


@every_optimizer
def test_cases_40_maximize_increases(factory):
    a = torch.randn(5, 3, dtype=torch.float64)
    x = nn.Parameter(Stiefel().random(5, 3, dtype=torch.float64))
    optimizer = factory(on(Stiefel(), x))
    for group in optimizer.param_groups:
        group["maximize"], group["lr"] = True, 0.05
    values = []
    for _ in range(50):
        x.grad = a.clone()
        values.append((a * x.detach()).sum().item())
        optimizer.step()
    final, best = (a * x.detach()).sum().item(), torch.linalg.matrix_norm(a, "nuc").item()
    assert values[0] < values[5] < final <= best + 1e-12
    if "Adadelta" not in type(optimizer).__name__:  # starts slowly, here as on flat space
        assert best - final < 0.3 * (best - values[0])


@pytest.mark.parametrize("manifold", [Euclidean(), SPD(), Sphere()], ids=repr)
def test_case_41_weight_decay_leaves_the_gradient_alone(manifold):
    x = nn.Parameter(manifold.random(3, 3) if manifold.event_dim else torch.ones(3, 3))
    for build in (RiemannianSGD, RiemannianAdam):
        x.grad = torch.zeros(3, 3)
        build(on(manifold, x), lr=0.1, weight_decay=0.5).step()
        assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_case_43_a_torch_adam_state_resumes(dtype):
    """On flat space the steps go on as torch's; on Stiefel the first moment is tangent and points stay feasible."""
    gradients = torch.randn(8, 5, 3, dtype=dtype)
    theirs = nn.Parameter(Stiefel().random(5, 3, dtype=dtype))
    adam = torch.optim.Adam([theirs], lr=0.01)
    for g in gradients[:4]:
        theirs.grad = g.clone()
        adam.step()
    flat, round_ = nn.Parameter(theirs.detach().clone()), nn.Parameter(Stiefel().nearest(theirs.detach()))
    optimizers = [RiemannianAdam(on(Euclidean(), flat)), RiemannianAdam(on(Stiefel(), round_))]
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
        assert optimizer.param_groups[0]["lr"] == 0.01
    for g in gradients[4:]:
        for p, optimizer in ((theirs, adam), (flat, optimizers[0]), (round_, optimizers[1])):
            p.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(flat.detach(), theirs.detach(), rtol=0, atol=1e-15)
    assert off(round_) < 1e-14
    moment = optimizers[1].state[round_]["exp_avg"]
    torch.testing.assert_close(Stiefel().project(round_.detach(), moment), moment, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["SGD", "wrapped Adam"])
def test_case_50_fully_shard_keeps_the_manifold(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = constrain(nn.Linear(4, 6, bias=False), "weight", Stiefel())
        fully_shard(layer)
        before = layer.weight.full_tensor().detach().clone()
        optimizer = OPTIMIZERS[name](param_groups(layer))
        layer(torch.randn(2, 4))[:, :3].square().sum().backward()
        optimizer.step()
        after = layer.weight.full_tensor().detach()
        assert dict(named_manifolds(layer)) == {"weight": Stiefel()}
        assert off(after) < 1e-6
        assert (after - before).norm() > 1e-3
    finally:
        dist.destroy_process_group()


def test_case_52_still_declared_after_a_move():
    layer = constrain(nn.Linear(3, 5), "weight", Stiefel()).to("meta")
    assert dict(named_manifolds(layer)) == {"weight": Stiefel()}
    assert param_groups(layer)[0]["manifold"] == Stiefel()


def test_case_55_a_parameter_is_saved_and_loaded():
    p = ManifoldParameter(Stiefel(metric="canonical"), (4, 2))
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    q = torch.load(file, weights_only=False)
    assert (type(q), q.manifold) == (ManifoldParameter, p.manifold)
    assert torch.equal(q, p)
    file = io.BytesIO()
    torch.save({"weight": p.detach()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], p)


def test_case_56_constraining_keeps_a_value_that_is_a_point():
    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    assert torch.equal(constrain(layer, "weight", Unitary()).weight, torch.eye(4))


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@every_optimizer
def test_case_58_tall_weights_take_memory_of_their_own_size(factory):
    """A 2000 × 2 weight: state and whatever a step makes on the way hold O(np) numbers, not n²."""
    layer = constrain(nn.Linear(2, 2000, bias=False), "weight", Stiefel())
    optimizer = factory(param_groups(layer))
    layer(torch.randn(1, 2))[:, ::3].square().sum().backward()
    with Largest() as largest:
        optimizer.step()
    n, p = layer.weight.shape
    assert n * p <= largest.numel <= 8 * n * p
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() for t in state) <= 3 * n * p
    assert off(layer.weight) < 1e-5


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_case_67_accumulated_gradients_are_summed_before_they_are_projected(factory, dtype):
    a, b = torch.randn(2, 5, 3, dtype=dtype)
    once, twice = (nn.Parameter(x) for x in Stiefel().random(5, 3, dtype=dtype).repeat(2, 1, 1))
    for p, costs in ((once, [a + b]), (twice, [a, b])):
        optimizer = factory(on(Stiefel(), p))
        for cost in costs:
            (cost.conj() * p).sum().real.backward()
        optimizer.step()
    torch.testing.assert_close(once.detach(), twice.detach())


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_cases_68_and_74_copies_keep_values_and_constraint(copying):
    layer = constrain(nn.Linear(3, 5), "weight", Stiefel())
    twin = copying(layer)
    assert torch.equal(twin.weight, layer.weight)
    assert list(named_manifolds(twin)) == list(named_manifolds(layer)) == [("weight", Stiefel())]
    optimizer = RiemannianSGD(twin, lr=0.1)
    before = layer.weight.detach().clone()
    twin(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    assert off(twin.weight) < 1e-6
    assert not torch.equal(twin.weight, before)
    assert torch.equal(layer.weight, before)
    p = ManifoldParameter(Stiefel(), (4, 2))
    q = copying(p)
    assert (type(q), q.manifold, q.requires_grad) == (ManifoldParameter, Stiefel(), True)
    assert torch.equal(p, q)


@every_optimizer
@pytest.mark.parametrize(
    "manifold", [Stiefel(), Stiefel(retraction="qr"), Stiefel(retraction="newton_schulz")], ids=repr
)
def test_case_70_a_zero_gradient_keeps_the_point(factory, manifold):
    x = nn.Parameter(torch.eye(5, 3))
    optimizer = factory(on(manifold, x))
    for _ in range(3):
        x.grad = torch.zeros(5, 3)
        optimizer.step()
        assert torch.equal(x.detach(), torch.eye(5, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "Adam", "wrapped SGD"])
def test_case_76_half_precision_steps_are_rounded_single_precision_steps(name, dtype):
    x = nn.Parameter(Stiefel().random(5, 3, dtype=dtype))
    wide = nn.Parameter(x.detach().float())
    g = torch.randn(5, 3, dtype=dtype)
    for p in (x, wide):
        p.grad = g.to(p.dtype)
        OPTIMIZERS[name](on(Stiefel(), p)).step()
    if name.startswith("wrapped"):  # torch's own step is in half precision; what follows is not
        torch.testing.assert_close(x.detach(), wide.detach().to(dtype), rtol=0, atol=torch.finfo(dtype).eps)
    else:
        assert torch.equal(x.detach(), wide.detach().to(dtype))
    assert off(x) < 16 * torch.finfo(dtype).eps
    assert x.grad.dtype == dtype


def test_case_77_everything_has_a_repr():
    layer = constrain(nn.Linear(3, 5), "weight", Stiefel(metric="canonical"))
    assert repr(nn.Sequential(layer)).startswith("Sequential")
    for manifold in (SPD(), Euclidean(), Sphere(), Stiefel(retraction="qr"), Unitary(), View(Stiefel(), "transpose")):
        assert eval(repr(manifold)) == manifold
    assert "retraction" not in repr(Stiefel(metric="canonical"))
    p = ManifoldParameter(Stiefel(), (3, 2))
    assert "Stiefel()" in repr(p)
    for factory in OPTIMIZERS.values():
        text = repr(factory(param_groups(layer)))
        assert "Stiefel(metric='canonical')" in text
        assert "lr: 0.1" in text


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}])
def test_case_79_constrained_and_plain_groups_take_their_own_steps(options):
    """A group on Euclidean() beside one on Stiefel() steps as torch.optim.SGD; the other as if it were alone."""
    flat, twin = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    x, alone = (nn.Parameter(x) for x in Stiefel().random(4, 2).repeat(2, 1, 1))
    both = RiemannianSGD(on(Euclidean(), flat) + on(Stiefel(), x), lr=0.1, **options)
    others = torch.optim.SGD([twin], lr=0.1, **options), RiemannianSGD(on(Stiefel(), alone), lr=0.1, **options)
    for _ in range(4):
        g, h = torch.randn(3), torch.randn(4, 2)
        flat.grad, twin.grad, x.grad, alone.grad = g, g.clone(), h, h.clone()
        for optimizer in (both, *others):
            optimizer.step()
    torch.testing.assert_close(flat, twin)
    assert torch.equal(x, alone)


def test_case_22_a_complex_layer_stays_unitary():
    layer = constrain(nn.Linear(4, 4, dtype=torch.complex64), "weight", Unitary())
    optimizer = RiemannianSGD(layer, lr=0.1)
    before = layer.weight.detach().clone()
    layer(torch.randn(2, 4, dtype=torch.complex64)).abs().square().sum().backward()
    optimizer.step()
    assert off(layer.weight) < 1e-6
    assert not torch.equal(layer.weight, before)
