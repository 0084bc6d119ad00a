"""UnitaryRNN: published values, an explicit loop, shapes of torch.nn.RNN, laws of a norm-preserving recurrence."""

import copy
import io
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from manopt_torch import max_residual, named_manifolds, param_groups
from manopt_torch.manifolds import Unitary
from manopt_torch.nn import RealReadout, UnitaryRNN, init
from manopt_torch.optim import RiemannianAdam, RiemannianSGD, riemannian

# torch's own derivative formulas use torch.jit.script when forward mode first runs
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

NETWORK = json.loads((Path(__file__).parents[1] / "reference" / "urnn.json").read_text())["network"]


def value(name: str) -> Tensor:
    x = NETWORK[name]
    if isinstance(x, dict):
        return torch.complex(*(torch.tensor(x[part], dtype=torch.float64) for part in ("re", "im")))
    return torch.tensor(x, dtype=torch.float64)


def exact(close: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(close.detach(), expected, rtol=0, atol=1e-10)


def test_reference_network():
    N, M, L = NETWORK["N"], NETWORK["M"], NETWORK["L"]
    model = torch.nn.ModuleDict(
        {
            "rnn": UnitaryRNN(M, N, hard=True, dtype=torch.complex128),
            "readout": RealReadout(N, L, dtype=torch.complex128),
        }
    )
    weights = {
        "rnn.cells.0.weight_hh": "W",
        "rnn.cells.0.weight_ih": "V",
        "rnn.cells.0.modrelu.bias": "b",
        "rnn.cells.0.h0": "h0",
    }
    weights |= {"readout.weight": "U", "readout.bias": "c"}
    model.load_state_dict({name: value(short) for name, short in weights.items()})

    def loss() -> tuple[Tensor, Tensor, Tensor]:
        states, last = model["rnn"](value("X"))
        y = model["readout"](states)
        return (y - value("target")).square().mean(), y, last

    before, y, last = loss()
    exact(y, value("y"))
    exact(last, value("h_last").unsqueeze(0))
    exact(before, value("loss"))
    before.backward()
    exact(model["rnn"].cells[0].weight_hh.grad, value("grad_W"))

    # the step of size λ of MATH's (5.5) is lr = 2λ on Unitary, whose metric is the Frobenius one
    for parameter in (p for name, p in model.named_parameters() if name != "rnn.cells.0.weight_hh"):
        parameter.grad = None
    RiemannianSGD(param_groups(model), lr=2 * NETWORK["lam"]).step()
    exact(model["rnn"].cells[0].weight_hh, value("W_next"))
    exact(loss()[0], value("loss_next"))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("complex_input", [False, True])
def test_equals_an_explicit_loop(hard, complex_input):
    T, B, M, N = 9, 4, 3, 5
    rnn = UnitaryRNN(M, N, hard=hard, dtype=torch.complex128)
    with torch.no_grad():
        rnn.cells[0].modrelu.bias.uniform_(-0.5, 0.5)
    x = torch.randn(T, B, M, dtype=torch.complex128 if complex_input else torch.float64)
    hx = torch.randn(1, B, N, dtype=torch.complex128)
    W, V, b, h0 = (
        p.detach().numpy()
        for p in (rnn.cells[0].weight_hh, rnn.cells[0].weight_ih, rnn.cells[0].modrelu.bias, rnn.cells[0].h0)
    )

    def sequence(steps: np.ndarray, h: np.ndarray) -> np.ndarray:
        states = []
        for step in steps:
            z = W @ h + V @ step
            s = np.abs(z) if hard else np.sqrt(np.abs(z) ** 2 + 1e-5)
            h = z / (s if hard else s + 1e-5) * np.maximum(s + b, 0)
            states.append(h)
        return np.array(states)

    for start, given in ((np.broadcast_to(h0, (B, N)), None), (hx[0].numpy(), hx)):
        output, last = rnn(x, given)
        expected = np.stack([sequence(x[:, i].numpy(), start[i]) for i in range(B)], axis=1)
        np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(last, output[-1:], rtol=0, atol=0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batch", [None, 1, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_shapes_are_those_of_torch_rnn(batch_first, batch, with_state):
    T, M, N = 6, 3, 5
    shape = (T, M) if batch is None else (batch, T, M) if batch_first else (T, batch, M)
    state = (1, N) if batch is None else (1, batch, N)
    x, hx = torch.randn(shape), torch.randn(state) if with_state else None
    outputs = torch.nn.RNN(M, N, batch_first=batch_first)(x, hx)
    ours = UnitaryRNN(M, N, batch_first=batch_first)(x, hx.to(torch.complex64) if with_state else None)
    assert [t.shape for t in ours] == [t.shape for t in outputs]
    assert [t.dtype for t in ours] == [torch.complex64] * 2


def test_layouts_agree():
    rnn = UnitaryRNN(3, 5, dtype=torch.complex128)
    first = UnitaryRNN(3, 5, batch_first=True, dtype=torch.complex128)
    first.load_state_dict(rnn.state_dict())
    x, hx = torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(1, 4, 5, dtype=torch.complex128)
    output, last = rnn(x, hx)
    swapped, same_last = first(x.transpose(0, 1), hx)
    torch.testing.assert_close(swapped.transpose(0, 1), output)
    torch.testing.assert_close(same_last, last)
    for i in range(4):
        alone, alone_last = rnn(x[:, i], hx[:, i])
        torch.testing.assert_close(alone, output[:, i])
        torch.testing.assert_close(alone_last, last[:, i])


def test_two_halves_make_the_whole():
    rnn = UnitaryRNN(3, 5, dtype=torch.complex128)
    x = torch.randn(8, 2, 3, dtype=torch.complex128)
    output, last = rnn(x)
    first, middle = rnn(x[:3])
    second, end = rnn(x[3:], middle)
    torch.testing.assert_close(torch.cat([first, second]), output)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("hard", [False, True])
def test_gradcheck(hard):
    rnn = UnitaryRNN(2, 3, hard=hard, dtype=torch.complex128)
    names = [name for name, _ in rnn.named_parameters()]
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    hx = torch.randn(1, 2, 3, dtype=torch.complex128, requires_grad=True)
    weights = tuple(p.detach().requires_grad_() for p in rnn.parameters())

    def call(x: Tensor, hx: Tensor | None, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(rnn, dict(zip(names, weights, strict=True)), (x, hx))

    assert torch.autograd.gradcheck(call, (x, hx, *weights), check_forward_ad=True)
    assert torch.autograd.gradcheck(lambda x, *weights: call(x, None, *weights), (x, *weights))
    assert torch.autograd.gradgradcheck(call, (x, hx, *weights))


@pytest.mark.parametrize("initial", ["haar", "identity"])
def test_norm_is_preserved_without_input_and_bias(initial):
    rnn = UnitaryRNN(2, 16, init=initial, hard=True, dtype=torch.complex128)
    torch.nn.init.zeros_(rnn.cells[0].modrelu.bias)
    hx = torch.randn(1, 3, 16, dtype=torch.complex128)
    output, _ = rnn(torch.zeros(200, 3, 2, dtype=torch.float64), hx)
    torch.testing.assert_close(output.norm(dim=-1), hx.norm(dim=-1).expand(200, 3), rtol=1e-12, atol=0)
    assert torch.allclose(output[-1], hx[0]) == (initial == "identity")


def test_gradient_neither_vanishes_nor_explodes_through_time():
    rnn = UnitaryRNN(1, 8, hard=True, dtype=torch.complex128)
    torch.nn.init.zeros_(rnn.cells[0].modrelu.bias)
    hx = torch.randn(1, 1, 8, dtype=torch.complex128, requires_grad=True)
    g = torch.randn(1, 1, 8, dtype=torch.complex128)
    _, last = rnn(torch.zeros(500, 1, 1, dtype=torch.float64), hx)
    (gradient,) = torch.autograd.grad(last, hx, g)
    torch.testing.assert_close(gradient.norm(), g.norm(), rtol=1e-10, atol=0)


def test_initial_values():
    N, M = 200, 5
    rnn = UnitaryRNN(M, N, dtype=torch.complex128)
    assert max_residual(rnn) < 1e-12
    # Haar: entries have variance 1/N, trace has variance 1
    entries = torch.view_as_real(rnn.cells[0].weight_hh.detach())
    assert entries.var().item() == pytest.approx(1 / (2 * N), rel=0.05)
    assert rnn.cells[0].weight_hh.diagonal().sum().abs().item() < 4
    for p, bound in ((rnn.cells[0].weight_ih, math.sqrt(6 / (M + 2 * N))), (rnn.cells[0].h0, math.sqrt(3 / (2 * N)))):
        parts = torch.view_as_real(p.detach())
        for part in parts.unbind(-1):
            assert 0.97 * bound < part.max() <= bound
            assert -bound <= part.min() < -0.97 * bound
    identity = UnitaryRNN(M, N, init="identity")
    assert torch.equal(identity.cells[0].weight_hh, torch.eye(N, dtype=torch.complex64))
    readout = RealReadout(N, 10)
    assert 0.97 < readout.weight.real.max() / math.sqrt(6 / (2 * N + 10)) <= 1
    assert not readout.bias.any()


@pytest.mark.parametrize("initial", ["haar", "identity"])
def test_reset_parameters(initial):
    rnn = UnitaryRNN(3, 6, init=initial)
    before = copy.deepcopy(rnn.state_dict())
    with torch.no_grad():
        rnn.cells[0].weight_hh.mul_(2)
    rnn.reset_parameters()
    assert max_residual(rnn) < 1e-5
    for name, p in rnn.named_parameters():
        assert torch.equal(p, before[name]) == (initial == "identity" and name == "cells.0.weight_hh"), name
    torch.manual_seed(7)
    rnn.reset_parameters()
    once = copy.deepcopy(rnn.state_dict())
    torch.manual_seed(7)
    rnn.reset_parameters()
    assert all(torch.equal(p, once[name]) for name, p in rnn.state_dict().items())


def test_slot_and_state_dict_round_trip():
    rnn, other = UnitaryRNN(3, 6), UnitaryRNN(3, 6)
    assert dict(named_manifolds(rnn)) == {"cells.0.weight_hh": Unitary()}
    file = io.BytesIO()
    torch.save(rnn.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(5, 2, 3)
    assert torch.equal(other(x)[0], rnn(x)[0])
    for twin in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert torch.equal(twin(x)[0], rnn(x)[0])
        assert dict(named_manifolds(twin)) == {"cells.0.weight_hh": Unitary()}
    with pytest.raises(ValueError, match="weight_hh"):
        other.load_state_dict({**rnn.state_dict(), "cells.0.weight_hh": torch.randn(6, 6, dtype=torch.complex64)})


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    "convert", [lambda m: m.double(), lambda m: m.to(torch.float64), lambda m: m.to(torch.complex128)]
)
def test_conversion_to_double_keeps_complex_complex_and_real_real(convert):
    model = torch.nn.Sequential(UnitaryRNN(3, 6), RealReadout(6, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(5, 2, 3)
    y = model[1](model[0](x)[0])
    convert(model)
    for name, p in model.named_parameters():
        assert p.dtype == (torch.complex128 if before[name].is_complex() else torch.float64)
        assert torch.equal(p, before[name].to(p.dtype))
    assert dict(named_manifolds(model)) == {"0.cells.0.weight_hh": Unitary()}
    wide = model[1](model[0](x.double())[0])
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), y, rtol=1e-4, atol=1e-4)
    model.float()
    assert torch.equal(model[1](model[0](x)[0]), y)


def test_meta_then_empty_then_reset():
    rnn = UnitaryRNN(3, 6, device="meta")
    assert rnn(torch.empty(5, 2, 3, device="meta"))[0].shape == (5, 2, 6)
    rnn.to_empty(device="cpu").reset_parameters()
    assert dict(named_manifolds(rnn)) == {"cells.0.weight_hh": Unitary()}
    assert max_residual(rnn) < 1e-5


@pytest.mark.parametrize("name", ["RiemannianAdam", "RMSprop"])
def test_training_reduces_the_loss_and_stays_unitary(name):
    model = torch.nn.ModuleList([UnitaryRNN(1, 8), RealReadout(8, 1)])
    x = torch.randn(10, 16, 1)
    if name == "RMSprop":
        optimizer = riemannian(torch.optim.RMSprop(param_groups(model), lr=0.01), frame="ambient")
    else:
        optimizer = RiemannianAdam(param_groups(model), lr=0.01)

    def loss() -> Tensor:
        return (model[1](model[0](x)[1][0]) - x[0]).square().mean()  # remember the first input

    before, start = loss().item(), model[0].cells[0].weight_hh.detach().clone()
    for _ in range(100):
        optimizer.zero_grad()
        loss().backward()
        assert not any(p.grad.is_conj() for p in model.parameters())  # torch's optimizers view it as real
        optimizer.step()
    assert loss().item() < 0.1 * before
    assert (model[0].cells[0].weight_hh - start).norm() > 0.1
    assert max_residual(model) < 1e-5


def test_float32_input_of_low_precision_is_accepted_under_autocast():
    rnn = UnitaryRNN(3, 6)
    x = torch.randn(5, 2, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = rnn(x)
    assert torch.equal(output, rnn(x.float())[0])


def test_readout_is_the_real_part():
    readout = RealReadout(5, 3, dtype=torch.complex128)
    torch.nn.init.uniform_(readout.bias)
    h = torch.randn(4, 2, 5, dtype=torch.complex128)
    expected = (h.numpy() @ readout.weight.detach().numpy().T).real + readout.bias.detach().numpy()
    np.testing.assert_allclose(readout(h).detach().numpy(), expected, rtol=0, atol=1e-14)
    flipped = RealReadout(5, 3, dtype=torch.complex128)
    flipped.load_state_dict(readout.state_dict())
    torch.testing.assert_close(flipped(h.conj().mT.mT), readout(h.conj().resolve_conj()))
    weights = tuple(p.detach().requires_grad_() for p in readout.parameters())
    names = [name for name, _ in readout.named_parameters()]

    def call(h: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(readout, dict(zip(names, weights, strict=True)), (h,))

    assert torch.autograd.gradcheck(call, (h.requires_grad_(), *weights), check_forward_ad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16])
def test_haar_fills_any_shape_and_dtype(dtype):
    for shape in ((5, 5), (6, 3), (3, 6), (8, 2, 3, 3)):
        weight = init.haar_(torch.empty(shape, dtype=dtype))
        assert weight.dtype == dtype
        matrix = weight.flatten(1)
        matrix = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mH).to(
            torch.complex128 if dtype.is_complex else torch.float64
        )
        error = (matrix @ matrix.mH - torch.eye(len(matrix), dtype=matrix.dtype)).abs().max()
        assert error < (0.02 if dtype == torch.bfloat16 else 1e-12)
    first, second = (init.haar_(torch.empty(3, 3, dtype=dtype), torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": 0}, "input_size of UnitaryRNNCell must be at least 1, got 0"),
        ({"hidden_size": -2}, "hidden_size of UnitaryRNNCell must be at least 1, got -2"),
        ({"num_layers": 0}, "num_layers of UnitaryRNN must be at least 1, got 0"),
        ({"dtype": torch.int64}, r"must be complex64, complex128 or floating point, got torch\.int64"),
        ({"init": "eye"}, "init must be one of 'haar', 'identity', .* got 'eye'"),
        ({"init": "restricted", "dtype": torch.float32}, "restricted_ fills complex tensors"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        UnitaryRNN(**{"input_size": 3, "hidden_size": 5, **arguments})


def test_forward_errors():
    rnn, first = UnitaryRNN(3, 5), UnitaryRNN(3, 5, batch_first=True)
    with pytest.raises(ValueError, match=r"\(T, B, 3\) or \(T, 3\), got \(6, 2, 4\)"):
        rnn(torch.zeros(6, 2, 4))
    with pytest.raises(ValueError, match=r"\(B, T, 3\) or \(T, 3\), got \(3,\)"):
        first(torch.zeros(3))
    with pytest.raises(ValueError, match="no time step"):
        rnn(torch.zeros(0, 2, 3))
    with pytest.raises(ValueError, match="no time step"):
        first(torch.zeros(2, 0, 3))
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        rnn(torch.zeros(6, 2, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        rnn(torch.zeros(6, 2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"hx must have shape \(1, 2, 5\) .* got \(2, 5\)"):
        rnn(torch.zeros(6, 2, 3), torch.zeros(2, 5, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"hx must have shape \(1, 5\) .* got \(1, 1, 5\)"):
        rnn(torch.zeros(6, 3), torch.zeros(1, 1, 5, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"hx must be torch\.complex64.*got torch\.float32"):
        rnn(torch.zeros(6, 2, 3), torch.zeros(1, 2, 5))
    with pytest.raises(TypeError, match=r"hx must be one tensor of shape \(1, 2, 5\), got tuple"):
        rnn(torch.zeros(6, 2, 3), (torch.zeros(1, 2, 5, dtype=torch.complex64),))
    with pytest.raises(TypeError, match="got list"):
        rnn([1.0, 2.0])
    with pytest.raises(ValueError, match=r"mask must be .* shape \(6, 2\) .* got torch\.bool of shape \(6,\)"):
        rnn(torch.zeros(6, 2, 3), mask=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got torch\.float32 of shape"):
        rnn(torch.zeros(6, 2, 3), mask=torch.ones(6, 2))
    packed = pack_sequence([torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="without a mask"):
        rnn(packed, mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(steps, 3\) in a PackedSequence, got \(2, 4\)"):
        rnn(pack_sequence([torch.zeros(2, 4)]))
    with pytest.raises(TypeError, match=r"input of UnitaryRNN must be torch\.float32, as the weights"):
        UnitaryRNN(3, 5, dtype=torch.float32)(torch.zeros(6, 2, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"\(B, 3\) or \(3,\), got \(1, 1, 3\)"):
        rnn.cells[0](torch.zeros(1, 1, 3))
    with pytest.raises(TypeError, match="lacks such complex numbers"):
        UnitaryRNN(3, 5).bfloat16()
    with pytest.raises(ValueError, match=r"nn\.Linear is the readout"):
        RealReadout(3, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"5 units, got shape \(2, 4\)"):
        RealReadout(5, 2)(torch.zeros(2, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"torch\.complex64, as the weight is, got torch\.float32"):
        RealReadout(5, 2)(torch.zeros(2, 5))


def test_repr():
    cell = "UnitaryRNNCell(\n      3, 5, init='identity'\n      (modrelu): ModReLU(5, hard=True)\n    )"
    layers = f"UnitaryRNN(\n  batch_first=False\n  (cells): ModuleList(\n    (0): {cell}\n  )\n)"
    assert repr(UnitaryRNN(3, 5, init="identity", hard=True)) == layers
    assert "checkpoint_every=9" in repr(UnitaryRNN(3, 5, checkpoint_every=9))
    assert repr(RealReadout(5, 2)) == "RealReadout(5, 2)"


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64])
def test_the_cell_step_by_step_is_the_layer(dtype):
    rnn = UnitaryRNN(3, 5, 2, dtype=dtype)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    states: list[Tensor | None] = [None, None]
    for t in range(7):
        states[0] = rnn.cells[0](x[t], states[0])
        states[1] = rnn.cells[1](states[0], states[1])
    output, last = rnn(x)
    torch.testing.assert_close(output[-1], states[1], rtol=0, atol=1e-14)
    torch.testing.assert_close(last, torch.stack(states), rtol=0, atol=1e-14)
    alone = rnn.cells[0](x[0, 0])
    torch.testing.assert_close(alone, rnn.cells[0](x[0])[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("with_state", [False, True])
def test_layers_and_shapes_are_those_of_torch_rnn(batch_first, num_layers, with_state):
    x = torch.randn(4, 6, 3)
    hx = torch.randn(num_layers, 4 if batch_first else 6, 5) if with_state else None
    wanted = torch.nn.RNN(3, 5, num_layers, batch_first=batch_first)(x, hx)
    rnn = UnitaryRNN(3, 5, num_layers, batch_first, dtype=torch.float32)
    found = rnn(x, hx)
    assert [t.shape for t in found] == [t.shape for t in wanted]
    below = UnitaryRNN(3, 5, max(num_layers - 1, 1), batch_first, dtype=torch.float32)
    below.load_state_dict({k: v for k, v in rnn.state_dict().items() if k in below.state_dict()})
    if num_layers > 1:
        top = UnitaryRNN(5, 5, batch_first=batch_first, dtype=torch.float32)
        top.cells[0].load_state_dict(rnn.cells[-1].state_dict())
        middle, _ = below(x, hx if hx is None else hx[:-1])
        torch.testing.assert_close(found[0], top(middle, hx if hx is None else hx[-1:])[0])


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_and_masked_sequences_are_the_short_ones(sort, with_state):
    rnn = UnitaryRNN(3, 5, 2, dtype=torch.complex128)
    lengths = [7, 5, 3, 2] if sort else [3, 7, 2, 5]
    x = torch.randn(7, 4, 3, dtype=torch.float64, requires_grad=True)
    hx = torch.randn(2, 4, 5, dtype=torch.complex128) if with_state else None
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=sort)
    mask = torch.arange(7).unsqueeze(-1) < torch.tensor(lengths)
    output, last = rnn(packed, hx)
    padded, found_lengths = pad_packed_sequence(output)
    masked, masked_last = rnn(x, hx, mask=mask)
    assert found_lengths.tolist() == lengths
    torch.testing.assert_close(masked_last, last)
    torch.testing.assert_close(masked[-1], last[-1])  # states stay as they are
    losses = []
    for i, n in enumerate(lengths):
        alone, alone_last = rnn(x[:n, i], None if hx is None else hx[:, i])
        torch.testing.assert_close(padded[:n, i], alone)
        torch.testing.assert_close(masked[:n, i], alone)
        torch.testing.assert_close(last[:, i], alone_last)
        losses.append(alone.real.sum() + alone_last.imag.sum())
    wanted = torch.autograd.grad(sum(losses), (x, *rnn.parameters()), retain_graph=True, allow_unused=with_state)
    loss = output.data.real.sum() + last.imag.sum()
    found = torch.autograd.grad(loss, (x, *rnn.parameters()), allow_unused=with_state)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_batch_first_mask():
    rnn, first = UnitaryRNN(3, 5), UnitaryRNN(3, 5, batch_first=True)
    first.load_state_dict(rnn.state_dict())
    x, mask = torch.randn(6, 4, 3), torch.rand(6, 4) < 0.5
    torch.testing.assert_close(first(x.mT.mT.transpose(0, 1), mask=mask.T)[0].transpose(0, 1), rnn(x, mask=mask)[0])
    alone, _ = rnn(x[:, 0], mask=mask[:, 0])
    torch.testing.assert_close(alone, rnn(x, mask=mask)[0][:, 0])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_checkpoints_change_nothing(num_layers):
    rnn = UnitaryRNN(3, 5, num_layers, dtype=torch.complex128)
    lean = UnitaryRNN(3, 5, num_layers, checkpoint_every=4, dtype=torch.complex128)
    lean.load_state_dict(rnn.state_dict())
    x, direction = torch.randn(11, 2, 3, dtype=torch.float64), torch.randn(11, 2, 5, dtype=torch.complex128)
    for net in (rnn, lean):
        net(x)[0].backward(direction)
    for p, q in zip(rnn.parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.complex128) for name in ("haar", "identity", "restricted", "henaff", "cayley")),
        *((name, torch.float64) for name in ("haar", "identity", "henaff", "cayley")),  # restricted is complex
    ],
)
def test_every_init_is_unitary(name, dtype):
    torch.manual_seed(1)
    W = UnitaryRNN(2, 7, init=name, dtype=dtype).cells[0].weight_hh.detach()
    torch.testing.assert_close(W @ W.mH, torch.eye(7, dtype=dtype), rtol=0, atol=1e-12)
    if name in ("henaff", "cayley"):  # 2x2 blocks and a one
        blocks = torch.block_diag(*[torch.ones(2, 2)] * 3, torch.ones(1, 1)).bool()
        assert not W[~blocks].any()
        cosines = torch.stack(
            [UnitaryRNN(2, 8, init=name, dtype=dtype).cells[0].weight_hh[0, 0].real for _ in range(20)]
        )
        assert (cosines > 0).all() == (name == "cayley")  # angles below π/2, or any
    elif name == "haar" or name == "restricted":
        assert (W.abs() > 0).all()


def test_fullgraph_compile_traces():
    rnn = UnitaryRNN(3, 4)
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(torch.compile(rnn, backend="eager", fullgraph=True)(x), rnn(x))


class TestStep:
    """A step is (5.5) of the paper's method with the true gradient, and neither of the two that were published."""

    def setting(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        N = 5
        W = torch.linalg.qr(torch.randn(N, N, dtype=torch.complex128, generator=g))[0]
        rnn = UnitaryRNN(2, N, dtype=torch.complex128)
        with torch.no_grad():
            rnn.cells[0].weight_hh.copy_(W)
        target = torch.randn(6, 3, N, dtype=torch.complex128, generator=g)
        output, _ = rnn(torch.randn(6, 3, 2, dtype=torch.float64, generator=g))
        (output - target).abs().square().sum().backward()
        return rnn.cells[0].weight_hh, rnn.cells[0].weight_hh.detach().clone(), target

    @staticmethod
    def slope(G: Tensor, direction: Tensor) -> float:
        return (G.conj() * direction).real.sum().item()

    def test_it_descends_by_the_cayley_curve_of_the_true_gradient(self):
        for seed in range(10):
            weight, W, _ = self.setting(seed)
            G, lam = weight.grad.clone(), 1e-2
            A = G @ W.mH - W @ G.mH
            eye = torch.eye(5, dtype=W.dtype)
            expected = torch.linalg.solve(eye + lam / 2 * A, (eye - lam / 2 * A) @ W)
            RiemannianSGD([weight], lr=2 * lam).step()
            torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
            assert self.slope(G, -A @ W) == pytest.approx(-A.abs().square().sum().item() / 2)

    def test_the_printed_generator_does_not_descend(self):
        """Aₚ = Gᴴ W − Wᴴ G from the left goes uphill."""
        slopes = []
        for seed in range(40):
            weight, W, _ = self.setting(seed)
            A = weight.grad.mH @ W - W.mH @ weight.grad
            slopes.append(self.slope(weight.grad, -A @ W))
        assert sum(slope > 0 for slope in slopes) > 20

    def test_the_gradient_of_the_first_block_row_is_another(self):
        """The released code differentiates a real 2N × 2N matrix by the block row that makes Re h only."""
        cosines = []
        for seed in range(20):
            g = torch.Generator().manual_seed(seed)
            N = 5
            W = torch.linalg.qr(torch.randn(N, N, dtype=torch.complex128, generator=g))[0]
            h, target = (torch.randn(8, N, dtype=torch.complex128, generator=g) for _ in range(2))
            own = W.clone().requires_grad_()
            (h @ own.mT - target).abs().square().sum().backward()
            top = torch.cat([W.real, -W.imag], -1).requires_grad_()  # Re z = top [Re h; Im h]
            parts = torch.cat([h.real, h.imag], -1)
            (parts @ top.mT - target.real).square().sum().backward()
            partial = torch.complex(top.grad[:, :N], -top.grad[:, N:])
            true, found = (G @ W.mH - W @ G.mH for G in (own.grad, partial))
            cosines.append((self.slope(true, found) / (true.norm() * found.norm())).item())
        assert 0.3 < sum(cosines) / len(cosines) < 0.9
        assert max(cosines) < 0.99
