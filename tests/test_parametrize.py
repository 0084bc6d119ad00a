"""Change of variables: the weight is on the manifold whatever an optimizer of torch does to the raw parameter."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, is_parametrized

import manopt_torch.nn as mnn
from manopt_torch import (
    SPD,
    Blocks,
    Manifold,
    Sphere,
    Stiefel,
    Unitary,
    View,
    constrain,
    named_manifolds,
    param_groups,
    parametrize,
    rebase,
    release,
    report,
)
from manopt_torch.parametrize import Trivialization

pytestmark = [
    pytest.mark.filterwarnings("ignore:Complex modules are a new feature"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # dynamo on a Function
]
WIDE = View(Stiefel(), "transpose")
# a torch layer, the manifold, and the manifold that W is on
CASES: dict[str, tuple[nn.Module, Manifold, Manifold]] = {
    "square": (nn.Linear(4, 4), Stiefel(), Stiefel()),
    "tall": (nn.Linear(3, 6), Stiefel(), Stiefel()),
    "wide": (nn.Linear(6, 3), Stiefel(), WIDE),
    "exp": (nn.Linear(3, 6), Stiefel(retraction="exp"), Stiefel(retraction="exp")),
    "canonical": (nn.Linear(3, 6), Stiefel("canonical"), Stiefel("canonical")),
    "polar": (nn.Linear(3, 6), Stiefel(retraction="polar"), Stiefel(retraction="polar")),
    "kernel": (nn.Conv2d(2, 3, 2), Stiefel(), View(WIDE, "flatten", ndim=4)),
    "groups": (nn.Conv1d(4, 6, 3, groups=2), Stiefel(), View(Blocks(WIDE, 2), "flatten", ndim=3)),
    "real unitary": (nn.Linear(4, 4), Unitary(), Unitary()),
    "unitary": (nn.Linear(4, 4, dtype=torch.complex64), Unitary(), Unitary()),
    "complex wide": (nn.Linear(5, 3, dtype=torch.complex64), Stiefel(), WIDE),
    "SPD": (nn.Linear(3, 3), SPD(), SPD()),
    "sphere": (nn.Linear(5, 3), Sphere(), Sphere()),
    "embedding": (nn.Embedding(6, 3), Stiefel(), Stiefel()),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.fixture(params=CASES)
def case(request) -> tuple[nn.Module, Manifold]:
    """The parametrized layer, and the manifold of its weight."""
    torch.manual_seed(0)
    layer, manifold, seen = CASES[request.param]
    return parametrize(copy.deepcopy(layer), "weight", manifold, init="random"), seen


def target(layer: nn.Module) -> Tensor:
    return torch.randn(layer.weight.shape, dtype=layer.weight.dtype, generator=torch.Generator().manual_seed(1))


def cost(layer: nn.Module, a: Tensor) -> Tensor:
    return (layer.weight - a).abs().square().sum()


def raw(layer: nn.Module) -> nn.Parameter:
    return layer.parametrizations.weight.original


def chart(layer: nn.Module) -> Trivialization:
    return layer.parametrizations.weight[0]


def residual(layer: nn.Module, manifold: Manifold) -> float:
    return manifold.residual(layer.weight.detach()).max().item()


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


# ------------------------------------------------------------------ the map
def test_what_is_declared(case) -> None:
    layer, manifold = case
    assert is_parametrized(layer, "weight")
    assert chart(layer).manifold == manifold
    assert not raw(layer).any()
    assert torch.equal(layer.weight, chart(layer).base)
    assert list(dict(layer.named_parameters())).count("parametrizations.weight.original") == 1
    assert list(layer.state_dict())[-2:] == ["parametrizations.weight.original", "parametrizations.weight.0.base"]
    assert repr(manifold) in repr(layer)


def test_the_gradient_at_the_base_is_the_riemannian_one(case) -> None:
    """⟨raw.grad, u⟩ = ⟨rgrad, u⟩_x for tangent u; raw.grad is rgrad itself where the metric is the ambient one."""
    layer, M = case
    layer = layer.to(torch.complex128 if layer.weight.is_complex() else torch.float64)
    layer.weight = M.random(*layer.weight.shape, dtype=layer.weight.dtype)
    x, a = layer.weight.detach().clone().requires_grad_(), target(layer)
    (x - a).abs().square().sum().backward()
    rgrad = M.rgrad(x.detach(), x.grad)
    cost(layer, a).backward()
    gradient = raw(layer).grad
    for seed in range(5):
        noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
        u = M.project(x.detach(), noise)
        torch.testing.assert_close((gradient.conj() * u).sum().real, M.inner(x.detach(), rgrad, u).sum())
    assert distance(M.project(x.detach(), gradient), gradient) < 1e-12
    if M not in (Stiefel("canonical"), SPD()):
        torch.testing.assert_close(gradient, rgrad)


def test_the_gradient_elsewhere_is_that_of_the_retraction(case) -> None:
    layer, M = case
    layer = layer.to(torch.complex128 if layer.weight.is_complex() else torch.float64)
    layer.weight = M.random(*layer.weight.shape, dtype=layer.weight.dtype)
    with torch.no_grad():
        raw(layer).copy_(0.3 * torch.randn_like(raw(layer)))
    a = target(layer)
    cost(layer, a).backward()
    at, v, h = raw(layer).detach().clone(), torch.randn_like(raw(layer)), 1e-6
    with torch.no_grad():
        values = [cost(layer, a) for t in (h, -h) if raw(layer).copy_(at + t * v) is not None]
    slope = (raw(layer).grad.conj() * v).sum().real
    assert ((values[0] - values[1]) / (2 * h)).item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-6)


def test_weights_are_on_the_manifold_wherever_raw_is(case) -> None:
    layer, M = case
    for scale in (1e-4, 0.1, 1.0):
        with torch.no_grad():
            raw(layer).normal_().mul_(scale)
        assert residual(layer, M) <= 1e-5


# ------------------------------------------------------------------ training
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_stays_on_the_manifold(case, name: str) -> None:
    """Case 22 (complex weights) and 25 (weight decay)."""
    layer, M = case
    a = target(layer)
    optimizer = OPTIMIZERS[name](layer.parameters())
    first = cost(layer, a).item()
    for _ in range(50):
        optimizer.zero_grad()
        cost(layer, a).backward()
        optimizer.step()
        assert residual(layer, M) <= 1e-5
    assert cost(layer, a).item() < first


def test_rebasing_leaves_the_weight_and_training_goes_on(case) -> None:
    layer, M = case
    a = target(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02)
    costs = []
    for _ in range(4):
        for _ in range(10):
            optimizer.zero_grad()
            cost(layer, a).backward()
            optimizer.step()
        before = layer.weight.detach().clone()
        assert raw(layer).any()
        rebase(layer)
        assert torch.equal(layer.weight, before)
        assert not raw(layer).any()
        assert raw(layer) is optimizer.param_groups[0]["params"][-1]
        costs.append(cost(layer, a).item())
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]
    assert residual(layer, M) <= 1e-5


def test_rebased_at_every_step_it_is_riemannian_gradient_descent() -> None:
    """x ← R_x(−lr rgrad), by hand, in double precision."""
    M, lr = Stiefel(), 0.1
    layer = parametrize(nn.Linear(3, 6, dtype=torch.float64), "weight", M)
    a, x = target(layer), layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    for _ in range(5):
        optimizer.zero_grad()
        cost(layer, a).backward()
        optimizer.step()
        rebase(layer)
        x = M.retract(x, -lr * M.rgrad(x, 2 * (x - a)))
        torch.testing.assert_close(layer.weight.detach(), x, rtol=0, atol=1e-13)


def test_the_optimum_of_procrustes_is_found() -> None:
    layer = parametrize(nn.Linear(4, 4, dtype=torch.complex128), "weight", Unitary())
    a = target(layer)
    u, _, vh = torch.linalg.svd(a)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
    for k in range(300):
        optimizer.zero_grad()
        cost(layer, a).backward()
        optimizer.step()
        if k % 25 == 24:
            rebase(layer)
    assert distance(layer.weight, u @ vh) < 1e-6


def test_an_optimizer_built_before_steps_the_same_tensor() -> None:
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    parametrize(layer, "weight", Stiefel())
    before = layer.weight.detach().clone()
    cost(layer, target(layer)).backward()
    optimizer.step()
    assert distance(layer.weight, before) > 1e-3
    assert residual(layer, Stiefel()) < 1e-5


# ------------------------------------------------------------------ values: start, assignment, saving, copies
def test_a_value_on_the_manifold_is_kept_and_another_projected() -> None:
    """Case 56."""
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight)
    assert torch.equal(parametrize(layer, "weight", Stiefel()).weight, torch.eye(4))
    layer = nn.Linear(3, 5)
    u, _, vh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    with pytest.raises(ValueError, match=r"weight is off Stiefel\(\).*init=\"nearest\""):
        parametrize(layer, "weight", Stiefel(), init="keep")
    assert not is_parametrized(layer)
    assert distance(parametrize(layer, "weight", Stiefel()).weight, u @ vh) < 1e-5


def test_assignment(case) -> None:
    layer, M = case
    with torch.no_grad():
        raw(layer).normal_()
    x = M.random(*layer.weight.shape, dtype=layer.weight.dtype)
    layer.weight = x
    assert torch.equal(layer.weight, x)
    assert not raw(layer).any()
    with pytest.raises(ValueError, match=r"the assigned weight is off .* assign manifold\.nearest"):
        layer.weight = -3 * x
    assert torch.equal(layer.weight, x)


def test_state_dict(case) -> None:
    layer, M = case
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        raw(layer).normal_()
        layer.parametrizations.weight[0].base.copy_(M.random(*layer.weight.shape, dtype=layer.weight.dtype))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert distance(twin.weight, layer.weight) > 0.01
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin.weight, layer.weight)
    bad = {k: -3 * v if k.endswith("base") else v for k, v in layer.state_dict().items()}
    with pytest.raises(ValueError, match=r"parametrizations\.weight\.0\.base is off"):
        twin.load_state_dict(bad)
    assert torch.equal(twin.weight, layer.weight)


def test_deepcopy(case) -> None:
    layer, M = case
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        raw(twin).normal_()
    assert torch.equal(layer.weight, chart(layer).base)
    assert distance(twin.weight, layer.weight) > 0.01
    rebase(twin)
    assert chart(twin).manifold == M
    assert torch.equal(layer.weight, chart(layer).base)


def test_conversion_of_dtype(case) -> None:
    layer, M = case
    with torch.no_grad():
        raw(layer).normal_().mul_(0.3)
    before = layer.weight.detach()
    wide = layer.to(torch.complex128 if before.is_complex() else torch.float64)
    assert wide.weight.dtype == (torch.complex128 if before.is_complex() else torch.float64)
    assert distance(wide.weight, before) < 1e-5
    assert residual(wide, M) <= 1e-5
    if not before.is_complex():
        half = layer.to(torch.bfloat16)
        assert half.weight.dtype == torch.bfloat16
        assert distance(half.weight, before) < 0.1


def test_compile_and_cached(case) -> None:
    layer, _ = case
    if isinstance(layer, nn.Linear) and not layer.weight.is_complex():
        with torch.no_grad():
            raw(layer).normal_()
        x = torch.randn(2, layer.in_features)
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x))
        with cached():
            assert layer.weight is layer.weight  # evaluated once


def test_autocast() -> None:
    layer = parametrize(nn.Linear(3, 6), "weight", Stiefel())
    with torch.no_grad():
        raw(layer).normal_()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight.dtype == torch.float32
        layer(torch.randn(2, 3)).float().sum().backward()
        assert residual(layer, Stiefel()) < 1e-5
    assert raw(layer).grad.isfinite().all()


# ------------------------------------------------------------------ whole models
def test_recurrent_modules_and_attention_read_the_weight() -> None:
    """Their kernels read lists of weights; the outputs are those of torch's module with the weight that is shown."""
    x = torch.randn(5, 2, 8)
    for theirs, name in (
        (nn.RNN(8, 4, 2), "weight_hh_l1"),
        (nn.GRU(8, 4), "weight_hh_l0"),
        (nn.MultiheadAttention(8, 2), "in_proj_weight"),
    ):
        ours = parametrize(copy.deepcopy(theirs), name, Stiefel())
        with torch.no_grad():
            ours.parametrizations[name].original.normal_()
        values = {k: getattr(ours, k) if k == name else v for k, v in theirs.state_dict().items() if k == name}
        theirs.load_state_dict({**{k: v for k, v in ours.state_dict().items() if "param" not in k}, **values})
        inputs = (x, x, x) if isinstance(theirs, nn.MultiheadAttention) else (x,)
        torch.testing.assert_close(ours(*inputs)[0], theirs(*inputs)[0])
        ours(*inputs)[0].square().sum().backward()
        assert ours.parametrizations[name].original.grad.abs().max() > 1e-6


def test_release() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), mnn.Linear(6, 3, weight_manifold=Stiefel))
    keys = list(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).state_dict())
    parametrize(model, "0.weight", Stiefel())
    with torch.no_grad():
        raw(model[0]).normal_()
    x, p = torch.randn(4, 3), raw(model[0])
    before = model(x).detach()
    assert release(model) is model
    assert [type(m) for m in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert sorted(model.state_dict()) == sorted(keys)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight is p
    assert torch.equal(model(x), before)
    model[0].weight.data.mul_(2)
    assert not torch.equal(model(x), before)


def test_both_schools_in_one_report() -> None:
    model = nn.Sequential(nn.Linear(3, 6), mnn.Linear(6, 3, weight_manifold=Stiefel), nn.Linear(3, 3))
    parametrize(model, "0.weight", Stiefel())
    lines = report(model).splitlines()
    assert [line.split()[0] for line in lines] == ["parameter", "1.weight", "0.weight", "2"]
    assert lines[-1] == "2 on manifolds, 4 free"
    assert list(named_manifolds(model)) == [("1.weight", WIDE)]  # what a Riemannian optimizer steps
    assert [len(g["params"]) for g in param_groups(model)] == [5, 1]


@pytest.mark.parametrize(
    ("build", "name", "message"),
    [
        (lambda: nn.Linear(2, 3), "wieght", "no parameter 'wieght'; its parameters: weight, bias"),
        (lambda: nn.Linear(2, 3), "bias", "bias: no view of"),
        (lambda: nn.Sequential(nn.Linear(2, 3)), "1.weight", "has no part '1'"),
        (lambda: mnn.Linear(2, 3, weight_manifold=Stiefel), "weight", r"weight is constrained to Stiefel\(\): release"),
        (lambda: parametrize(nn.Linear(2, 3), "weight", Stiefel()), "weight", "no parameter 'weight'"),
        (lambda: nn.Embedding(5, 3, padding_idx=0), "weight", "padding_idx"),
    ],
)
def test_refuses(build, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parametrize(build(), name, Stiefel())


def test_tied_weights_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    for where, name in ((model, "0.weight"), (model[1], "weight")):
        with pytest.raises(ValueError, match="several modules share"):
            parametrize(where, name, Stiefel())


def test_nothing_to_rebase() -> None:
    with pytest.raises(ValueError, match=r"Linear has no weight under parametrize"):
        rebase(nn.Linear(2, 2))


def test_constrain_says_that_it_is_parametrized() -> None:
    with pytest.raises(ValueError, match="no parameter 'weight'"):
        constrain(parametrize(nn.Linear(2, 3), "weight", Stiefel()), "weight", Stiefel())


def test_a_tall_weight_needs_memory_of_its_size() -> None:
    """Case 58."""
    layer = parametrize(nn.Linear(2, 2000), "weight", Stiefel())
    assert sum(t.numel() for t in layer.state_dict().values()) == 2 * math.prod((2000, 2)) + 2000
