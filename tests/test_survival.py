"""A declaration outlives whatever torch does to a module, its tensors and its state (cases 50, 52, 68, 74)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call, stack_module_state, vmap

import manopt_torch.nn as layers
from manopt_torch import (
    Blocks,
    Euclidean,
    Manifold,
    ManifoldParameter,
    Sphere,
    Stiefel,
    Unitary,
    View,
    assert_on_manifold,
    constrain,
    max_residual,
    named_manifolds,
    param_groups,
    release,
)

WIDE = View(Stiefel(), "transpose")
DECLARED: dict[str, Manifold] = {"W": Stiefel(), "batch.0": Sphere(), "part.weight": Stiefel()}


class Declaring(nn.Module):
    """A user's module with a declaration of its own, a list of them, and a constrained part."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.W = ManifoldParameter(Stiefel(), (5, 3), dtype=dtype)
        self.batch = nn.ParameterList([ManifoldParameter(Sphere(), (2, 3), dtype=dtype)])
        self.part = constrain(nn.Linear(3, 5, bias=False, dtype=dtype), "weight", Stiefel())
        self.plain = nn.Linear(3, 3, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.W)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.part(x) @ self.W) * self.batch[0].sum(0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.U = ManifoldParameter(Unitary(), (3, 3), dtype=torch.complex64)
        self.plain = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.U)
        nn.init.ones_(self.plain)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.U) * self.plain).real * 1.0


def linear(n: int, p: int) -> nn.Module:
    return constrain(nn.Linear(p, n), "weight", Stiefel())


def conv() -> nn.Module:
    return constrain(nn.Conv2d(2, 3, 2), "weight", Stiefel())


# name: (how to build it, what is declared, an input)
MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Manifold], Tensor]] = {
    "user's module": (Declaring, DECLARED, torch.randn(4, 3)),
    "complex": (Complex, {"U": Unitary()}, torch.randn(4, 3, dtype=torch.complex64)),
    "Linear square": (lambda: linear(3, 3), {"weight": Stiefel()}, torch.randn(4, 3)),
    "Linear tall": (lambda: linear(5, 3), {"weight": Stiefel()}, torch.randn(4, 3)),
    "Linear wide": (lambda: linear(3, 5), {"weight": WIDE}, torch.randn(4, 5)),
    "Conv2d": (conv, {"weight": View(WIDE, "flatten", ndim=4)}, torch.randn(4, 2, 5, 5)),
    "layer with groups": (
        lambda: layers.Conv1d(4, 6, 3, groups=2, weight_manifold=Stiefel),
        {"weight": View(Blocks(WIDE, 2), "flatten", ndim=3)},
        torch.randn(2, 4, 5),
    ),
    "layer of matrices and free rows": (
        lambda: constrain(nn.Linear(3, 6), "weight", Blocks(WIDE, 1, of=3)),
        {"weight": Blocks(WIDE, 1, of=3)},
        torch.randn(2, 3),
    ),
}


@pytest.fixture(params=MODULES)
def case(request) -> tuple[nn.Module, dict[str, Manifold], Tensor]:
    torch.manual_seed(0)
    build, declared, x = MODULES[request.param]
    return build(), declared, x


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def swap() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.fixture
def overwrite() -> Iterator[None]:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def assert_alive(model: nn.Module, declared: dict[str, Manifold], prefix: str = "") -> None:
    """What is declared is known, on its manifold, grouped for an optimizer, guarded when loading, reset to a point."""
    declared = {prefix + name: manifold for name, manifold in declared.items()}
    assert dict(named_manifolds(model)) == declared
    assert_on_manifold(model)
    groups = param_groups(model)
    names = {id(p): n for n, p in model.named_parameters()}
    grouped = {names[id(p)]: g["manifold"] for g in groups for p in g["params"]}
    assert grouped == {n: declared.get(n, Euclidean()) for n in names.values()}

    before = {k: whole(v).clone() for k, v in model.state_dict().items()}
    state = model.state_dict()
    for name in declared:
        bad = {k: v + 1 for k, v in state.items() if k != name} | {name: 3 * state[name]}
        with pytest.raises(ValueError, match=rf"{name} is off "):
            model.load_state_dict(bad)
    for k, v in model.state_dict().items():
        assert torch.equal(whole(v), before[k])

    for m in model.modules():
        if "reset_parameters" in vars(m):
            m.reset_parameters()
    assert_on_manifold(model)
    if not any(hasattr(p, "full_tensor") for p in model.parameters()):
        for p in model.parameters():
            p.data.mul_(3)
        assert max_residual(model) > 1  # it is this model that is measured, not the one it comes from


def assert_same_values(a: nn.Module, b: nn.Module) -> None:
    for (k, v), w in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(whole(v), whole(w).to(v.dtype)), k


def test_copy(case) -> None:
    model, declared, _ = case
    twin = copy.deepcopy(model)
    assert_same_values(twin, model)
    assert [type(p) for p in twin.parameters()] == [type(p) for p in model.parameters()]
    assert_alive(twin, declared)
    assert_on_manifold(model)
    assert_alive(model, declared)


def test_pickle(case) -> None:
    model, declared, _ = case
    twin = pickle.loads(pickle.dumps(model))
    assert_same_values(twin, model)
    assert [type(p) for p in twin.parameters()] == [type(p) for p in model.parameters()]
    assert_alive(twin, declared)
    assert_on_manifold(model)


def test_save_and_load_the_module(case) -> None:
    model, declared, _ = case
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert_same_values(twin, model)
    assert_alive(twin, declared)


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_save_and_load_the_state_dict(case, keep_vars: bool, assign: bool) -> None:
    model, declared, _ = case
    twin = copy.deepcopy(model)
    for m in model.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=keep_vars), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    twin.load_state_dict(state, assign=assign)
    assert_same_values(twin, model)
    assert_alive(twin, declared)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("state", ["plain", "swap", "overwrite"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_conversion_of_dtype(case, state: str, dtype: torch.dtype, request) -> None:
    model, declared, _ = case
    if any(p.is_complex() for p in model.parameters()):
        dtype = torch.complex128
    if state != "plain":
        request.getfixturevalue(state)
    converted = copy.deepcopy(model).to(dtype)
    assert {p.dtype for p in converted.parameters()} == {dtype}
    assert_same_values(converted, model)
    assert_alive(converted, declared)


def test_double_and_half(case) -> None:
    model, declared, _ = case
    if not any(p.is_complex() for p in model.parameters()):
        assert_alive(copy.deepcopy(model).double(), declared)
        assert_alive(copy.deepcopy(model).half(), declared)


@pytest.mark.parametrize("state", ["plain", "swap", "overwrite"])
def test_loading_and_moving_with_future_flags(case, state: str, request) -> None:
    model, declared, _ = case
    if state != "plain":
        request.getfixturevalue(state)
    values = {k: v.clone() for k, v in model.state_dict().items()}
    model.to("meta")
    assert dict(named_manifolds(model)) == declared
    model.to_empty(device="cpu")
    assert dict(named_manifolds(model)) == declared
    model.load_state_dict(values)
    assert_alive(model, declared)


def test_built_on_meta() -> None:
    with torch.device("meta"):
        model = Declaring()
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for m in model.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    constrain(model, "batch.0", Sphere(), init="random")  # a ParameterList cannot reset itself
    assert_alive(model, DECLARED)


def test_a_tie_that_torch_undoes_leaves_both_declared() -> None:
    model = Declaring()
    model.part.weight = model.W
    assert dict(named_manifolds(model)) == {k: DECLARED[k] for k in ("W", "batch.0")}
    twin = copy.deepcopy(model)
    assert twin.part.weight is twin.W
    twin.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert twin.part.weight is not twin.W
    assert_alive(twin, DECLARED)


def test_averaged_model(case) -> None:
    model, declared, _ = case
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert_same_values(averaged.module, model)
    assert_alive(averaged, declared, "module.")
    assert_on_manifold(model)


def test_functional_call(case) -> None:
    model, declared, x = case
    values = {k: v.detach().clone() for k, v in model.state_dict().items()}
    out = functional_call(model, values, (x,))
    assert torch.equal(out, model(x))
    jacobians = torch.func.grad(lambda v: functional_call(model, v, (x,)).square().sum())(values)
    assert all(g.shape == values[k].shape for k, g in jacobians.items())
    assert_alive(model, declared)


def test_stacked_models_under_vmap(case) -> None:
    model, declared, x = case
    models = [model, copy.deepcopy(model)]
    params, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(model).to("meta")
    out = vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(params, buffers)
    torch.testing.assert_close(out, torch.stack([m(x) for m in models]))
    assert dict(named_manifolds(skeleton)) == declared
    for name, manifold in declared.items():  # a stack of points is a batch of points
        assert manifold.residual(params[name].detach()).max() < 1e-4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(case, backend: str) -> None:
    model, declared, x = case
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    assert_alive(compiled, declared, "_orig_mod.")


def test_compile_in_place_and_export(case) -> None:
    model, declared, x = case
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    model.compile(backend="eager")
    torch.testing.assert_close(model(x), program.module()(x))
    assert_alive(model, declared)


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize("when", ["declared before", "declared after", "on meta"])
def test_fully_shard(case, mesh: DeviceMesh, when: str) -> None:
    """Case 50, without the optimizer."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, declared, x = case
    expected = model(x).detach()
    if when == "declared after":
        release(model)
    if when == "on meta":
        model.to("meta")
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    if when == "declared after":
        for name in declared:
            base = {"batch.0": Sphere(), "U": Unitary()}.get(name, Stiefel())
            base = declared[name] if isinstance(declared[name], Blocks) else base
            constrain(model, name, base, init="keep")
    if when == "on meta":
        model.to_empty(device="cpu")
        for m in model.modules():
            if hasattr(m, "reset_parameters"):
                m.reset_parameters()
        if isinstance(model, Declaring):
            constrain(model, "batch.0", Sphere(), init="random")
    else:
        torch.testing.assert_close(model(x).detach(), expected)
    model(x).sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    assert_alive(model, declared)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    assert max_residual(model) > 1


@pytest.mark.parametrize("init", ["nearest", "random"])
def test_constrain_and_project_sharded_parameters(mesh: DeviceMesh, init: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    layer = nn.Linear(5, 3)
    u, _, vh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    fully_shard(layer, mesh=mesh)
    constrain(layer, "weight", Stiefel(), init=init, on_load="project")  # type: ignore[call-overload]
    assert isinstance(layer.weight, DTensor)
    assert_on_manifold(layer)
    nearest = torch.dist(layer.weight.full_tensor(), u @ vh)
    assert nearest < 1e-5 if init == "nearest" else nearest > 1e-2
    w = layer.weight.full_tensor().detach()
    state = layer.state_dict()
    layer.load_state_dict({**state, "weight": 2 * state["weight"]})
    assert isinstance(layer.weight, DTensor)
    torch.testing.assert_close(layer.weight.full_tensor().detach(), w)


def test_distributed_data_parallel(case, mesh: DeviceMesh) -> None:
    model, declared, x = case
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(x).sum().backward()
    assert_alive(wrapped, declared, "module.")
