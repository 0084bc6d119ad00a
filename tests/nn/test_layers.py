"""Torch's layers with ``weight_manifold=``: they are torch's in everything but where their weights live."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import manopt_torch.nn as mnn
from manopt_torch import (
    SPD,
    Blocks,
    Euclidean,
    Manifold,
    Sphere,
    Stiefel,
    Unitary,
    View,
    assert_on_manifold,
    constrain,
    max_residual,
    named_manifolds,
    release,
    report,
)
from manopt_torch.nn import layers
from manopt_torch.optim import RiemannianAdam, RiemannianSGD

WIDE = View(Stiefel(), "transpose")


class Case:
    """A layer: its name, the arguments of torch's class, an input, and its matrices on the manifold."""

    def __init__(self, name: str, args: tuple, kwargs: dict, x: tuple, matrices: Callable[[nn.Module], list[Tensor]]):
        self.name, self.args, self.kwargs, self.x, self.matrices = name, args, kwargs, x, matrices

    def ours(self, manifold: Manifold | type[Manifold] | None = Stiefel, **more) -> nn.Module:
        torch.manual_seed(0)
        return getattr(mnn, self.name)(*self.args, **self.kwargs, **more, weight_manifold=manifold)

    def theirs(self, **more) -> nn.Module:
        torch.manual_seed(0)
        return getattr(nn, self.name)(*self.args, **self.kwargs, **more)

    def __repr__(self) -> str:
        words = [*map(str, self.args), *(f"{k}={v}" for k, v in self.kwargs.items())]
        return f"{self.name}({', '.join(words)})"


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def kernel(groups: int = 1) -> Callable[[nn.Module], list[Tensor]]:
    return lambda m: [w.flatten(1) for w in m.weight.chunk(groups)]


def gates(number: int, *names: str) -> Callable[[nn.Module], list[Tensor]]:
    return lambda m: [w for name in names for w in getattr(m, name).chunk(number)]


def heads(m: nn.MultiheadAttention) -> list[Tensor]:
    if m._qkv_same_embed_dim:
        query, key, _ = m.in_proj_weight.chunk(3)
    else:
        query, key = m.q_proj_weight, m.k_proj_weight
    return [*query.chunk(m.num_heads), *key.chunk(m.num_heads)]


def both(n: int) -> list[str]:
    return [f"weight_hh_l{k}{d}" for k in range(n) for d in ("", "_reverse")]


SEQUENCE, STATE, HIDDEN = randn(6, 4, 3), randn(4, 3), randn(4, 5)
CASES = [
    Case("Linear", (3, 5), {}, (randn(4, 3),), lambda m: [m.weight]),
    Case("Linear", (5, 3), {"bias": False}, (randn(4, 5),), lambda m: [m.weight]),
    Case("Linear", (4, 4), {}, (randn(4, 4),), lambda m: [m.weight]),
    Case("Bilinear", (3, 4, 2), {}, (randn(5, 3), randn(5, 4)), lambda m: list(m.weight)),
    Case("Conv1d", (2, 3, 5), {"padding": 2}, (randn(2, 2, 9),), kernel()),
    Case("Conv2d", (2, 30, 3), {"stride": 2}, (randn(2, 2, 7, 7),), kernel()),
    Case("Conv2d", (4, 6, 3), {"groups": 2}, (randn(2, 4, 5, 5),), kernel(2)),
    Case("Conv2d", (3, 30, (3, 1)), {"groups": 3, "bias": False}, (randn(2, 3, 5, 5),), kernel(3)),
    Case("Conv3d", (1, 2, 2), {"padding_mode": "circular"}, (randn(2, 1, 4, 4, 4),), kernel()),
    Case("ConvTranspose1d", (3, 2, 3), {"stride": 2}, (randn(2, 3, 5),), kernel()),
    Case("ConvTranspose2d", (4, 6, 2), {"groups": 2}, (randn(2, 4, 3, 3),), kernel(2)),
    Case("ConvTranspose3d", (2, 2, 2), {}, (randn(1, 2, 3, 3, 3),), kernel()),
    Case("Embedding", (7, 3), {}, (torch.tensor([0, 3, 6, 3]),), lambda m: [m.weight]),
    Case("RNNCell", (3, 5), {}, (STATE, HIDDEN), lambda m: [m.weight_hh]),
    Case("GRUCell", (3, 5), {}, (STATE, HIDDEN), gates(3, "weight_hh")),
    Case("LSTMCell", (3, 5), {"bias": False}, (STATE, (HIDDEN, HIDDEN)), gates(4, "weight_hh")),
    Case("RNN", (3, 5, 2), {"nonlinearity": "relu"}, (SEQUENCE,), gates(1, "weight_hh_l0", "weight_hh_l1")),
    Case("GRU", (3, 5, 2), {"bidirectional": True, "batch_first": True}, (SEQUENCE,), gates(3, *both(2))),
    Case("LSTM", (3, 5), {"proj_size": 2}, (SEQUENCE,), gates(4, "weight_hh_l0")),
    Case("MultiheadAttention", (8, 2), {}, (randn(5, 2, 8),) * 3, heads),
    Case("MultiheadAttention", (6, 1), {"bias": False, "batch_first": True}, (randn(2, 5, 6),) * 3, heads),
    Case(
        "MultiheadAttention", (8, 4), {"kdim": 3, "vdim": 5}, (randn(4, 2, 8), randn(6, 2, 3), randn(6, 2, 5)), heads
    ),
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
EACH = pytest.mark.parametrize("case", CASES, ids=repr)


def assert_orthonormal(case: Case, layer: nn.Module, atol: float = 1e-5) -> None:
    """Columns, or rows where there are more columns, of every matrix of the layer."""
    for w in case.matrices(layer):
        w = w.detach().double()
        w = w.mH if w.shape[0] < w.shape[1] else w
        torch.testing.assert_close(w.mH @ w, torch.eye(w.shape[1], dtype=w.dtype), rtol=0, atol=atol)


def output(layer: nn.Module, x: tuple) -> Tensor:
    y = layer(*x)
    return y[0] if isinstance(y, tuple) else y


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in layer.state_dict().items()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for k, v in a.items():
        assert torch.equal(v, b[k]), k


def test_every_layer_is_here() -> None:
    assert {c.name for c in CASES} == set(layers.__all__) <= set(mnn.__all__)


@EACH
def test_forward_is_torchs(case: Case) -> None:
    ours, theirs = case.ours(), case.theirs()
    assert isinstance(ours, type(theirs))
    assert type(ours).forward is type(theirs).forward
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(output(ours, case.x), output(theirs, case.x))
    for training in (True, False):
        gradients = [
            torch.autograd.grad(output(m.train(training), case.x).sum(), m.parameters()) for m in (ours, theirs)
        ]
        assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        assert torch.equal(output(ours.eval(), case.x), output(theirs.eval(), case.x))


@EACH
def test_state_dict_and_arguments_are_torchs(case: Case) -> None:
    ours, theirs = case.ours(), case.theirs()
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert [(k, type(p)) for k, p in ours.named_parameters()] == [(k, type(p)) for k, p in theirs.named_parameters()]
    arguments = list(inspect.signature(type(theirs)).parameters)
    assert [a for a in inspect.signature(type(ours)).parameters if a not in ("weight_manifold", "on_load")] == arguments
    with pytest.raises(TypeError):
        case.ours(no_such_argument=1)


@EACH
def test_only_the_matrices_differ_from_torchs(case: Case) -> None:
    """At the start: from the same seed everything else, values of attention included, is what torch draws."""
    ours, theirs = case.ours(), case.theirs()
    assert_orthonormal(case, ours)
    assert_on_manifold(ours)
    matrices = case.matrices(ours)
    assert all(torch.dist(a, b) > 0.1 for a, b in zip(matrices, case.matrices(theirs), strict=True))
    with torch.no_grad():
        for mine, other in zip(matrices, case.matrices(theirs), strict=True):
            mine.copy_(other)
    assert_same_bits(state(ours), state(theirs))


@EACH
def test_without_a_manifold_it_is_torchs(case: Case) -> None:
    ours = case.ours(None)
    assert_same_bits(state(ours), state(case.theirs()))
    assert list(named_manifolds(ours)) == []
    assert_same_bits(state(case.ours(Euclidean())), state(case.theirs()))


@EACH
@pytest.mark.parametrize("optimizer", [RiemannianSGD, RiemannianAdam])
def test_training_stays_on_the_manifold(case: Case, optimizer: type) -> None:
    layer = case.ours()
    before = state(layer)
    stepper = optimizer(layer, lr=0.05)
    for _ in range(20):
        stepper.zero_grad()
        (output(layer, case.x) - 1).square().mean().backward()
        stepper.step()
    assert max_residual(layer) <= 1e-5
    assert_orthonormal(case, layer)
    after = state(layer)
    moved = {k for k in after if not torch.equal(after[k], before[k])}
    assert {n for n, _ in named_manifolds(layer)} <= moved
    assert len(after) == 1 or moved > {n for n, _ in named_manifolds(layer)}  # the others too


@EACH
def test_a_torch_model_is_loaded(case: Case) -> None:
    """Refused, with the residual, or projected when asked: the nearest orthonormal matrices, all else as it is."""
    pretrained = state(case.theirs())
    layer = case.ours()
    before = state(layer)
    with pytest.raises(ValueError, match=r"weight.* is off .*residual"):
        layer.load_state_dict(pretrained)
    assert_same_bits(state(layer), before)
    layer = case.ours(on_load="project")
    layer.load_state_dict(pretrained)
    assert_orthonormal(case, layer)
    theirs = case.theirs()
    for w, z in zip(case.matrices(layer), case.matrices(theirs), strict=True):
        u, _, vh = torch.linalg.svd(z.detach(), full_matrices=False)
        torch.testing.assert_close(w.detach(), u @ vh, rtol=0, atol=2e-5)
        w.data.copy_(z.data)
    assert_same_bits(state(layer), pretrained)


@EACH
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(case: Case, how: Callable[[nn.Module], nn.Module]) -> None:
    """Case 68."""
    layer = case.ours()
    twin = how(layer)
    assert type(twin) is type(layer)
    assert repr(twin) == repr(layer)
    assert_same_bits(state(twin), state(layer))
    assert torch.equal(output(twin.eval(), case.x), output(layer.eval(), case.x))
    assert list(named_manifolds(twin)) == list(named_manifolds(layer))
    stepper = RiemannianSGD(twin, lr=0.1)
    output(twin, case.x).square().sum().backward()
    stepper.step()
    assert_orthonormal(case, twin)
    assert_on_manifold(layer)
    assert torch.dist(case.matrices(twin)[0], case.matrices(layer)[0]) > 1e-6  # tensors of its own


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_conversion(case: Case, dtype: torch.dtype) -> None:
    layer = case.ours().to(dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert_on_manifold(layer)
    x = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, case.x)
    stepper = RiemannianSGD(layer, lr=0.1)
    y = output(layer, x)
    assert y.dtype == dtype
    y.square().sum().backward()
    stepper.step()
    assert_on_manifold(layer, tol=1e-5 if dtype == torch.float64 else 0.1)


@EACH
def test_meta_device_and_reset(case: Case) -> None:
    layer = case.ours(device="meta")
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    reset = getattr(layer, "reset_parameters", None) or layer._reset_parameters
    for m in layer.children():  # the output of attention, which is torch's
        m.reset_parameters()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        reset()
        assert_orthonormal(case, layer)
        drawn.append([w.detach().clone() for w in case.matrices(layer)])
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert all(torch.dist(a, b) > 0.1 for a, b in zip(drawn[0], drawn[2], strict=True))
    assert output(layer, case.x).isfinite().all()
    built = case.ours(dtype=torch.float64)
    assert_orthonormal(case, built, 1e-12)


@EACH
def test_release_gives_torchs_layer(case: Case) -> None:
    layer = case.ours()
    before, parameters = state(layer), list(layer.parameters())
    theirs = case.theirs()
    assert release(layer) is layer
    assert type(layer) is type(theirs)
    assert b"manopt_torch" not in pickle.dumps(layer)
    assert_same_bits(state(layer), before)
    assert all(p is q and type(p) is nn.Parameter for p, q in zip(layer.parameters(), parameters, strict=True))
    assert repr(layer) == repr(theirs)
    layer.load_state_dict(theirs.state_dict())
    assert torch.equal(output(layer, case.x), output(theirs, case.x))
    (getattr(layer, "reset_parameters", None) or layer._reset_parameters)()
    assert max(torch.dist(w.mH @ w, torch.eye(w.shape[1])) for w in case.matrices(layer)) > 0.1


@EACH
def test_constrain_does_the_same_to_torchs_layer(case: Case) -> None:
    layer, ours = case.theirs(), case.ours()
    names = [n for n, _ in named_manifolds(ours)]
    constrained = constrain(layer, dict.fromkeys(names, Stiefel()))
    assert constrained == list(named_manifolds(ours))
    assert_orthonormal(case, layer)
    copied = constrain(case.theirs(), dict(constrained))  # what is reported can be given back
    assert copied == constrained


@pytest.mark.parametrize("case", [c for c in CASES if "Cell" not in c.name and c.name not in ("GRU", "LSTM")], ids=repr)
def test_compile(case: Case) -> None:
    layer = case.ours()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(output(compiled, case.x), output(layer, case.x))
    assert [n for n, _ in named_manifolds(compiled)] == [f"_orig_mod.{n}" for n, _ in named_manifolds(layer)]


@EACH
def test_autocast(case: Case) -> None:
    layer = case.ours()
    stepper = RiemannianAdam(layer, lr=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        loss = output(layer, case.x).float().square().mean()
    loss.backward()
    stepper.step()
    assert all(p.dtype == torch.float32 for p in layer.parameters())
    assert_orthonormal(case, layer)


# ------------------------------------------------------------------ the manifold, as class or instance
def test_other_manifolds() -> None:
    rows = mnn.Embedding(7, 3, weight_manifold=Sphere).weight
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(7))
    for weight in mnn.Bilinear(3, 3, 2, weight_manifold=SPD).weight:
        assert torch.linalg.eigvalsh(weight).min() > 0
    w = mnn.Linear(4, 4, weight_manifold=Unitary, dtype=torch.complex64).weight.detach()
    torch.testing.assert_close(w.mH @ w, torch.eye(4, dtype=w.dtype), atol=1e-5, rtol=0)
    layer = mnn.Linear(3, 5, weight_manifold=Stiefel(metric="canonical", retraction="qr"), on_load="project")
    assert list(named_manifolds(layer)) == [("weight", Stiefel(metric="canonical", retraction="qr"))]
    assert "weight_manifold=Stiefel(metric='canonical', retraction='qr')" in repr(layer)
    gru = mnn.GRU(2, 4, weight_manifold=Unitary)
    assert list(named_manifolds(gru)) == [("weight_hh_l0", Blocks(Unitary(), 3))]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: mnn.Linear(3, 3, weight_manifold="stiefel"),
            TypeError,
            r"'stiefel': expected a manifold such as Stie",
        ),
        (lambda: mnn.Linear(3, 3, weight_manifold=torch.nn.Linear), TypeError, "expected a manifold"),
        (lambda: mnn.Linear(3, 3, weight_manifold=View), TypeError, "View.*defaults for all its options.*missing"),
        (lambda: mnn.Linear(3, 4, weight_manifold=Unitary), ValueError, r"weight: no view of Unitary\(\) fits"),
        (lambda: mnn.Conv2d(3, 4, 3, weight_manifold=SPD), ValueError, r"weight: no view of SPD\(\)"),
        (lambda: mnn.Linear(3, 4, weight_manifold=Stiefel, on_load="nearest"), ValueError, "on_load='nearest'"),
        (lambda: constrain(nn.Linear(3, 4), "bias", Stiefel()), ValueError, r"bias: no view of Stiefel\(\) fits"),
        (lambda: constrain(nn.GRU(3, 4), "bias_hh_l0", Stiefel()), ValueError, r"bias_hh_l0: no view of"),
        (lambda: constrain(mnn.Linear(3, 4), {"wieght": Stiefel()}), ValueError, "matches none .*: weight, bias"),
        (lambda: mnn.Embedding(5, 4, padding_idx=0, weight_manifold=Stiefel), ValueError, "padding_idx.* build it wit"),
        (lambda: mnn.Embedding(5, 4, max_norm=1.0, weight_manifold=Stiefel), ValueError, "max_norm"),
    ],
)
def test_refuses(build: Callable[[], nn.Module], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_an_embedding_that_is_free_may_pad() -> None:
    layer = mnn.Embedding(5, 4, padding_idx=0)
    assert not layer.weight[0].any()


def test_a_users_subclass_keeps_its_class_when_released() -> None:
    class Mine(mnn.Linear):
        pass

    layer = Mine(3, 3, weight_manifold=Stiefel)
    assert max_residual(layer) < 1e-5
    assert type(release(layer)) is Mine
    assert list(named_manifolds(layer)) == []


# ------------------------------------------------------------------ recurrent modules and attention
@pytest.mark.parametrize("cls", ["RNN", "GRU", "LSTM"])
def test_flattened_weights_follow(cls: str) -> None:
    """``_flat_weights``, which the kernels read, are the constrained tensors, also after conversion and loading."""
    layer = getattr(mnn, cls)(3, 5, num_layers=2, bidirectional=True, weight_manifold=Stiefel)
    layer.flatten_parameters()
    for how in (lambda m: m, copy.deepcopy, lambda m: m.double()):
        layer = how(layer)
        assert [id(w) for w in layer._flat_weights] == [id(p) for p in layer.parameters()]
        assert_on_manifold(layer)
    x = randn(6, 4, 3).double()
    before = layer(x)[0].detach()
    stepper = RiemannianSGD(layer, lr=0.5)
    layer(x)[0].square().sum().backward()
    stepper.step()
    assert torch.dist(layer(x)[0], before) > 1e-3


def test_packed_sequences() -> None:
    layer = mnn.GRU(3, 5, weight_manifold=Stiefel)
    packed = nn.utils.rnn.pack_padded_sequence(randn(6, 2, 3), torch.tensor([6, 4]))
    theirs = nn.GRU(3, 5)
    theirs.load_state_dict(layer.state_dict())
    assert torch.equal(layer(packed)[0].data, theirs(packed)[0].data)


@pytest.mark.parametrize("optimizer", [RiemannianSGD, RiemannianAdam])
def test_values_of_attention_are_free(optimizer: type) -> None:
    layer = mnn.MultiheadAttention(8, 2, weight_manifold=Stiefel, dtype=torch.float64)
    x, before = randn(5, 2, 8).double(), layer.in_proj_weight.detach().clone()
    stepper = optimizer(layer, lr=0.1)
    (layer(x, x, x)[0] - 3).square().sum().backward()
    gradient = layer.in_proj_weight.grad[16:].clone()
    stepper.step()
    step = layer.in_proj_weight.detach()[16:] - before[16:]
    # parallel to the Euclidean gradient: on free rows nothing is projected
    assert torch.cosine_similarity(step.flatten(), -gradient.flatten(), 0).item() == pytest.approx(1, abs=1e-9)
    assert max_residual(layer) < 1e-10


def test_values_of_attention_load_as_they_are() -> None:
    layer = mnn.MultiheadAttention(8, 2, weight_manifold=Stiefel)
    given = state(layer)
    given["in_proj_weight"][16:] = 100 * randn(8, 8)
    layer.load_state_dict(given)
    assert_same_bits(state(layer), given)
    given["in_proj_weight"][:4] *= 2  # the query of the first head
    with pytest.raises(ValueError, match="in_proj_weight is off"):
        layer.load_state_dict(given)


def test_a_transformer_of_torch() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    done = constrain(model, {"*.self_attn.in_proj_weight": Stiefel(), "*.linear?.weight": Stiefel()})
    assert dict(done) == {
        f"layers.{k}.{n}": m
        for k in range(2)
        for n, m in {
            "self_attn.in_proj_weight": Blocks(WIDE, 4, of=6),
            "linear1.weight": Stiefel(),
            "linear2.weight": WIDE,
        }.items()
    }
    stepper = RiemannianAdam(model, lr=0.01)
    for _ in range(5):
        stepper.zero_grad()
        model(randn(3, 5, 8)).square().mean().backward()
        stepper.step()
    for layer in model.layers:
        for w in heads(layer.self_attn):
            torch.testing.assert_close(w @ w.mH, torch.eye(4), rtol=0, atol=1e-5)
    model.eval()
    with torch.inference_mode():
        assert model(randn(3, 5, 8)).isfinite().all()


# ------------------------------------------------------------------ report, near misses, saving
def test_report() -> None:
    model = nn.Sequential(
        mnn.Linear(3, 4, weight_manifold=Stiefel), nn.ReLU(), mnn.Linear(4, 2, weight_manifold=Stiefel)
    )
    model[0].weight.data.copy_(2 * torch.eye(4, 3))  # ‖3 I‖_F = 3 √3 = 5.2
    lines = report(model).splitlines()
    assert lines[0].split() == ["parameter", "shape", "manifold", "residual"]
    assert lines[1].split() == ["0.weight", "4×3", "Stiefel()", "5.2e+00"]
    assert lines[2].split()[:2] == ["2.weight", "2×4"]
    assert repr(WIDE) in lines[2]
    assert lines[3:] == ["2 on manifolds, 2 free"]
    assert report(mnn.Linear(3, 4, weight_manifold=Stiefel, device="meta")).splitlines()[1].split()[-1] == "meta"
    assert report(nn.Linear(2, 2)).endswith("0 on manifolds, 2 free")


def test_near_misses_are_named() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(20)))
    with pytest.raises(ValueError, match=r"'7\.0\.wieght' matches none .*7\.0\.weight.*\(80 of them\)") as caught:
        constrain(model, {"7.0.wieght": Stiefel()})
    assert str(caught.value).count("weight") + str(caught.value).count("bias") <= 8
    assert list(named_manifolds(model)) == []


def test_the_state_dict_is_torchs_when_saved() -> None:
    layer = mnn.Linear(3, 5, weight_manifold=Stiefel)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    theirs = nn.Linear(3, 5)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(theirs.weight, layer.weight)
