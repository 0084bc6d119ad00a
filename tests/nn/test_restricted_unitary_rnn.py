"""RestrictedUnitaryRNN: published values, the full-capacity layer with the same W, shapes of torch.nn.RNN."""

import copy
import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from manopt_torch import max_residual, named_manifolds, param_groups
from manopt_torch.nn import (
    GivensUnitary,
    HouseholderUnitary,
    RealReadout,
    RestrictedUnitary,
    RestrictedUnitaryRNN,
    RestrictedUnitaryRNNCell,
    UnitaryRNN,
)
from manopt_torch.optim import RiemannianAdam

NETWORK = json.loads((Path(__file__).parents[1] / "reference" / "urnn.json").read_text())["network"]
VARIANTS = {
    "restricted": {"unitary": RestrictedUnitary, "dtype": torch.complex128},
    "householder": {"unitary": partial(HouseholderUnitary, num_factors=2), "dtype": torch.complex128},
    "orthogonal": {"unitary": partial(GivensUnitary, num_layers=3), "dtype": torch.float64},
}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def value(name: str) -> Tensor:
    x = NETWORK[name]
    if isinstance(x, dict):
        return torch.complex(*(torch.tensor(x[part], dtype=torch.float64) for part in ("re", "im")))
    return torch.tensor(x, dtype=torch.float64)


def exact(found: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=atol)


def test_reference_network():
    N, M, L = NETWORK["N"], NETWORK["M"], NETWORK["L"]
    rnn = RestrictedUnitaryRNN(M, N, hard=True, dtype=torch.complex128)
    readout = RealReadout(N, L, dtype=torch.complex128)
    v = value("reflection")
    rnn.load_state_dict(
        {
            "cells.0.unitary.theta": value("theta"),
            "cells.0.unitary.reflection": torch.complex(v[:, :N], v[:, N:]),
            "cells.0.unitary.permutation": torch.tensor(NETWORK["perm"]),
            "cells.0.weight_ih": value("V"),
            "cells.0.modrelu.bias": value("b"),
            "cells.0.h0": value("h0"),
        }
    )
    readout.load_state_dict({"weight": value("U"), "bias": value("c")})
    states, last = rnn(value("X"))
    y = readout(states)
    loss = (y - value("target")).square().mean()
    exact(y, value("y"))
    exact(last, value("h_last").unsqueeze(0))
    exact(loss, value("loss"))
    unitary = rnn.cells[0].unitary
    parameters = list(unitary.parameters())
    found = torch.autograd.grad(loss, parameters)
    for a, b in zip(found, torch.autograd.grad(unitary.matrix(), parameters, value("grad_W")), strict=True):
        exact(a, b)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("hard", [False, True])
@every_variant
def test_equals_the_full_capacity_layer_with_the_same_matrix(name, hard, num_layers):
    rnn = RestrictedUnitaryRNN(3, 5, num_layers, hard=hard, **VARIANTS[name])
    dtype = VARIANTS[name]["dtype"]
    full = UnitaryRNN(3, 5, num_layers, hard=hard, dtype=dtype)
    with torch.no_grad():
        for cell, other in zip(rnn.cells, full.cells, strict=True):
            cell.modrelu.bias.uniform_(-0.5, 0.5)
            other.weight_hh.copy_(cell.unitary.matrix())
            for p, q in (
                (other.weight_ih, cell.weight_ih),
                (other.modrelu.bias, cell.modrelu.bias),
                (other.h0, cell.h0),
            ):
                p.copy_(q)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    g = torch.randn(6, 4, 5, dtype=dtype)
    found, last = rnn(x)
    expected, expected_last = full(x)
    exact(found, expected.detach())
    exact(last, expected_last.detach())
    found.backward(g)
    expected.backward(g)
    for cell, other in zip(rnn.cells, full.cells, strict=True):
        exact(cell.weight_ih.grad, other.weight_ih.grad)
        exact(cell.modrelu.bias.grad, other.modrelu.bias.grad)
        exact(cell.h0.grad, other.h0.grad)
        parameters = list(cell.unitary.parameters())
        chained = torch.autograd.grad(cell.unitary.matrix(), parameters, other.weight_hh.grad)
        for p, grad in zip(parameters, chained, strict=True):
            exact(p.grad, grad)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batch", [None, 1, 4])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_shapes_are_those_of_torch_rnn(batch_first, batch, with_state, num_layers):
    T, M, N = 6, 3, 5
    shape = (T, M) if batch is None else (batch, T, M) if batch_first else (T, batch, M)
    state = (num_layers, N) if batch is None else (num_layers, batch, N)
    x, hx = torch.randn(shape), torch.randn(state) if with_state else None
    outputs = nn.RNN(M, N, num_layers, batch_first=batch_first)(x, hx)
    rnn = RestrictedUnitaryRNN(M, N, num_layers, batch_first)
    ours = rnn(x, hx.to(torch.complex64) if with_state else None)
    assert [t.shape for t in ours] == [t.shape for t in outputs]
    assert [t.dtype for t in ours] == [torch.complex64] * 2


@every_variant
def test_cell_steps_make_the_sequence(name):
    rnn = RestrictedUnitaryRNN(3, 5, **VARIANTS[name])
    cell = rnn.cells[0]
    assert isinstance(cell, RestrictedUnitaryRNNCell)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    output, last = rnn(x)
    h, states = None, []
    for step in x:
        h = cell(step, h)
        states.append(h)
    torch.testing.assert_close(torch.stack(states), output)
    torch.testing.assert_close(h, last[0])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_padded_and_packed_sequences_are_those_alone(num_layers):
    rnn = RestrictedUnitaryRNN(3, 5, num_layers, dtype=torch.complex128)
    lengths = [2, 6, 4]
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    mask = torch.arange(6)[:, None] < torch.tensor(lengths)
    output, last = rnn(x, mask=mask)
    packed, packed_last = rnn(nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))
    unpacked, found = nn.utils.rnn.pad_packed_sequence(packed)
    assert found.tolist() == lengths
    torch.testing.assert_close(packed_last, last)
    for i, length in enumerate(lengths):
        alone, alone_last = rnn(x[:length, i])
        torch.testing.assert_close(output[:length, i], alone)
        torch.testing.assert_close(unpacked[:length, i], alone)
        torch.testing.assert_close(last[:, i], alone_last)


@every_variant
def test_norm_is_preserved_without_input_and_bias(name):
    rnn = RestrictedUnitaryRNN(2, 16, hard=True, **VARIANTS[name])
    nn.init.zeros_(rnn.cells[0].modrelu.bias)
    hx = torch.randn(1, 3, 16, dtype=VARIANTS[name]["dtype"])
    output, _ = rnn(torch.zeros(200, 3, 2, dtype=torch.float64), hx)
    torch.testing.assert_close(output.norm(dim=-1), hx.norm(dim=-1).expand(200, 3), rtol=1e-12, atol=0)
    assert (output[0] - output[1]).norm() > 0.1


def test_complex_input():
    rnn = RestrictedUnitaryRNN(3, 5, dtype=torch.complex128)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(rnn(x)[0], rnn(x.to(torch.complex128))[0])
    turned, _ = rnn(1j * x)
    assert (turned - rnn(x)[0]).norm() > 0.1


def test_parameters_are_not_constrained_and_train():
    """Any torch optimizer keeps W unitary: the parameters are free."""
    rnn, readout = RestrictedUnitaryRNN(1, 8), RealReadout(8, 1)
    model = nn.ModuleList([rnn, readout])
    assert not list(named_manifolds(model))
    x = torch.randn(12, 20, 1)
    target = x.roll(2, 0)
    start = [p.detach().clone() for p in model.parameters()]
    for optimizer in (torch.optim.Adam(model.parameters(), lr=1e-2), RiemannianAdam(param_groups(model), lr=1e-2)):
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (readout(rnn(x)[0]) - target)[2:].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    assert max_residual(model) == 0
    W = rnn.cells[0].unitary.matrix()
    torch.testing.assert_close(W @ W.mH, torch.eye(8, dtype=torch.complex64), rtol=0, atol=1e-5)


def test_copies_keep_values_and_permutation():
    rnn = RestrictedUnitaryRNN(2, 6, 2)
    x = torch.randn(4, 3, 2)
    expected, _ = rnn(x)
    other = RestrictedUnitaryRNN(2, 6, 2)
    other.load_state_dict(rnn.state_dict())
    for same in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn)), other):
        assert torch.equal(same(x)[0], expected)
    torch.testing.assert_close(
        copy.deepcopy(rnn).double()(x.double())[0], expected.to(torch.complex128), rtol=0, atol=1e-5
    )


def test_number_of_parameters():
    """7N + 2MN + N + 2N real numbers."""
    rnn = RestrictedUnitaryRNN(3, 470)
    count = sum(p.numel() * (2 if p.is_complex() else 1) for p in rnn.parameters())
    assert count == (7 + 2 * 3 + 3) * 470


def test_errors_name_what_came():
    with pytest.raises(ValueError, match=r"RestrictedUnitary is complex"):
        RestrictedUnitaryRNN(2, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"unitary must make a UnitaryMap, .* got Linear"):
        RestrictedUnitaryRNN(2, 3, unitary=lambda size, **options: nn.Linear(size, size))
    with pytest.raises(ValueError, match=r"unitary must make a map of size 3.*, got GivensUnitary\(4, num_layers=2\)"):
        RestrictedUnitaryRNN(2, 3, unitary=lambda size, **options: GivensUnitary(4, 2, **options))
    rnn = RestrictedUnitaryRNN(2, 3)
    with pytest.raises(ValueError, match=r"got \(4, 5, 3\)"):
        rnn(torch.zeros(4, 5, 3))
    with pytest.raises(ValueError, match=r"at least 1, got 0"):
        RestrictedUnitaryRNN(0, 3)
