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
    weights = {"rnn.weight_hh": "W", "rnn.weight_ih": "V", "rnn.modrelu.bias": "b", "rnn.h0": "h0"}
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
    exact(model["rnn"].weight_hh.grad, value("grad_W"))

    # the step of size λ of MATH's (5.5) is lr = 2λ on Unitary, whose metric is the Frobenius one
    for parameter in (p for name, p in model.named_parameters() if name != "rnn.weight_hh"):
        parameter.grad = None
    RiemannianSGD(param_groups(model), lr=2 * NETWORK["lam"]).step()
    exact(model["rnn"].weight_hh, value("W_next"))
    exact(loss()[0], value("loss_next"))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("complex_input", [False, True])
def test_equals_an_explicit_loop(hard, complex_input):
    T, B, M, N = 9, 4, 3, 5
    rnn = UnitaryRNN(M, N, hard=hard, dtype=torch.complex128)
    with torch.no_grad():
        rnn.modrelu.bias.uniform_(-0.5, 0.5)
    x = torch.randn(T, B, M, dtype=torch.complex128 if complex_input else torch.float64)
    hx = torch.randn(1, B, N, dtype=torch.complex128)
    W, V, b, h0 = (p.detach().numpy() for p in (rnn.weight_hh, rnn.weight_ih, rnn.modrelu.bias, rnn.h0))

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
    ours = UnitaryRNN(M, N, batch_first)(x, hx.to(torch.complex64) if with_state else None)
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
    torch.nn.init.zeros_(rnn.modrelu.bias)
    hx = torch.randn(1, 3, 16, dtype=torch.complex128)
    output, _ = rnn(torch.zeros(200, 3, 2, dtype=torch.float64), hx)
    torch.testing.assert_close(output.norm(dim=-1), hx.norm(dim=-1).expand(200, 3), rtol=1e-12, atol=0)
    assert torch.allclose(output[-1], hx[0]) == (initial == "identity")


def test_gradient_neither_vanishes_nor_explodes_through_time():
    rnn = UnitaryRNN(1, 8, hard=True, dtype=torch.complex128)
    torch.nn.init.zeros_(rnn.modrelu.bias)
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
    entries = torch.view_as_real(rnn.weight_hh.detach())
    assert entries.var().item() == pytest.approx(1 / (2 * N), rel=0.05)
    assert rnn.weight_hh.diagonal().sum().abs().item() < 4
    for p, bound in ((rnn.weight_ih, math.sqrt(6 / (M + 2 * N))), (rnn.h0, math.sqrt(3 / (2 * N)))):
        parts = torch.view_as_real(p.detach())
        for part in parts.unbind(-1):
            assert 0.97 * bound < part.max() <= bound
            assert -bound <= part.min() < -0.97 * bound
    identity = UnitaryRNN(M, N, init="identity")
    assert torch.equal(identity.weight_hh, torch.eye(N, dtype=torch.complex64))
    readout = RealReadout(N, 10)
    assert 0.97 < readout.weight.real.max() / math.sqrt(6 / (2 * N + 10)) <= 1
    assert not readout.bias.any()


@pytest.mark.parametrize("initial", ["haar", "identity"])
def test_reset_parameters(initial):
    rnn = UnitaryRNN(3, 6, init=initial)
    before = copy.deepcopy(rnn.state_dict())
    with torch.no_grad():
        rnn.weight_hh.mul_(2)
    rnn.reset_parameters()
    assert max_residual(rnn) < 1e-5
    for name, p in rnn.named_parameters():
        assert torch.equal(p, before[name]) == (initial == "identity" and name == "weight_hh"), name
    torch.manual_seed(7)
    rnn.reset_parameters()
    once = copy.deepcopy(rnn.state_dict())
    torch.manual_seed(7)
    rnn.reset_parameters()
    assert all(torch.equal(p, once[name]) for name, p in rnn.state_dict().items())


def test_slot_and_state_dict_round_trip():
    rnn, other = UnitaryRNN(3, 6), UnitaryRNN(3, 6)
    assert dict(named_manifolds(rnn)) == {"weight_hh": Unitary()}
    file = io.BytesIO()
    torch.save(rnn.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(5, 2, 3)
    assert torch.equal(other(x)[0], rnn(x)[0])
    for twin in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert torch.equal(twin(x)[0], rnn(x)[0])
        assert dict(named_manifolds(twin)) == {"weight_hh": Unitary()}
    with pytest.raises(ValueError, match="weight_hh"):
        other.load_state_dict({**rnn.state_dict(), "weight_hh": torch.randn(6, 6, dtype=torch.complex64)})


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
    assert dict(named_manifolds(model)) == {"0.weight_hh": Unitary()}
    wide = model[1](model[0](x.double())[0])
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), y, rtol=1e-4, atol=1e-4)
    model.float()
    assert torch.equal(model[1](model[0](x)[0]), y)


def test_meta_then_empty_then_reset():
    rnn = UnitaryRNN(3, 6, device="meta")
    assert rnn(torch.empty(5, 2, 3, device="meta"))[0].shape == (5, 2, 6)
    rnn.to_empty(device="cpu").reset_parameters()
    assert dict(named_manifolds(rnn)) == {"weight_hh": Unitary()}
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

    before, start = loss().item(), model[0].weight_hh.detach().clone()
    for _ in range(100):
        optimizer.zero_grad()
        loss().backward()
        assert not any(p.grad.is_conj() for p in model.parameters())  # torch's optimizers view it as real
        optimizer.step()
    assert loss().item() < 0.1 * before
    assert (model[0].weight_hh - start).norm() > 0.1
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
        ({"input_size": 0}, "input_size of UnitaryRNN must be at least 1, got 0"),
        ({"hidden_size": -2}, "hidden_size of UnitaryRNN must be at least 1, got -2"),
        ({"dtype": torch.float32}, r"dtype of UnitaryRNN must be complex, got torch\.float32"),
        ({"init": "eye"}, "init must be 'haar' or 'identity', got 'eye'"),
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
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(2, 3)])
    with pytest.raises(TypeError, match="got PackedSequence"):
        rnn(packed)
    with pytest.raises(ValueError, match=r"5 units, got shape \(2, 4\)"):
        RealReadout(5, 2)(torch.zeros(2, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"torch\.complex64, as the weight is, got torch\.float32"):
        RealReadout(5, 2)(torch.zeros(2, 5))


def test_repr():
    assert repr(UnitaryRNN(3, 5, init="identity", hard=True)) == (
        "UnitaryRNN(\n  3, 5, batch_first=False, init='identity'\n  (modrelu): ModReLU(5, hard=True)\n)"
    )
    assert repr(RealReadout(5, 2)) == "RealReadout(5, 2)"
