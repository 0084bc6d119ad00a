"""Kernel expansions against exact values, their identities, and life inside torch."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import pickle

import pytest
import scipy.integrate
import torch
from torch import nn

from manopt_torch.nn import KernelActivation, KernelRNN
from manopt_torch.nn.kernel_activation import count_below

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "kbdnn.json").read_text())
DOUBLE = torch.float64


def expansion(kernel, centers, chi, m=None, q=None):
    """One unit with these numbers."""
    layer = KernelActivation(1, len(centers), kernel, linear=m is not None, normalize=False, dtype=DOUBLE)
    with torch.no_grad():
        layer.centers.copy_(torch.tensor([centers], dtype=DOUBLE))
        layer.chi.copy_(torch.tensor([chi], dtype=DOUBLE))
        if m is not None:
            layer.m.fill_(m)
            layer.q.fill_(q)
    return layer


def random_units(kernel, units=3, centers=7, **options):
    torch.manual_seed(0)
    return KernelActivation(units, centers, kernel, normalize=False, dtype=DOUBLE, **options)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda c: f"{c['kernel']}-{len(c['centers'])}")
def test_values_and_gradients(case):
    layer = expansion(case["kernel"], case["centers"], case["chi"], case["m"], case["q"])
    for point in case["points"]:
        a = torch.tensor([[point["a"]]], dtype=DOUBLE, requires_grad=True)
        f = layer(a)
        assert f.item() == pytest.approx(point["f"], abs=1e-12)
        for leaf, name in ((a, "df_da"), (layer.chi, "df_dchi"), (layer.centers, "df_dc")):
            (found,) = torch.autograd.grad(f, leaf, retain_graph=True)
            expected = torch.tensor(point[name], dtype=DOUBLE).reshape(found.shape)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert layer.l1().item() == pytest.approx(case["l1"], abs=1e-12)


@pytest.mark.parametrize("case", REFERENCE["parity"], ids=lambda c: f"{c['n_bits']} bits")
def test_one_unit_computes_parity(case):
    layer = expansion("abs", case["centers"], [-c for c in case["chi"]])
    sums = torch.arange(case["n_bits"] + 1.0, dtype=DOUBLE)[:, None]
    torch.testing.assert_close(layer(sums)[:, 0], torch.tensor(case["values"], dtype=DOUBLE), rtol=0, atol=1e-14)


def test_line_and_absolute_values():
    case = REFERENCE["theta_nu"]
    layer = expansion("green", case["centers"], case["alpha"], case["m"], case["q"])
    a = torch.linspace(-3, 3, 13, dtype=DOUBLE)[:, None]
    distance = (a - torch.tensor(case["centers"], dtype=DOUBLE)).abs() @ torch.tensor(case["alpha"], dtype=DOUBLE)
    torch.testing.assert_close(layer(a)[:, 0], case["theta"] * a[:, 0] + case["nu"] + distance / 2)


@pytest.mark.parametrize("kernel", ["abs", "relu", "green", "gauss"])
@pytest.mark.parametrize("centers", [7, 40])
def test_the_sum_written_out(kernel, centers):
    layer = random_units(kernel, centers=centers)
    a = torch.randn(4, 5, 3, dtype=DOUBLE)
    x = a[..., None] - layer.centers
    g = {
        "abs": x.abs(),
        "relu": x.clamp(min=0),
        "green": -x.clamp(min=0),
        "gauss": torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi),
    }[kernel]
    torch.testing.assert_close(layer(a), -(layer.chi * g).sum(-1))


@pytest.mark.parametrize("kernel", ["abs", "relu", "green", "gauss"])
@pytest.mark.parametrize("centers", [3, 20])
def test_gradcheck(kernel, centers):
    layer = random_units(kernel, units=2, centers=centers, linear=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def f(a, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (a,))

    a = torch.randn(3, 2, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(f, (a, *values))
    assert torch.autograd.gradgradcheck(f, (a, *values))


def test_at_a_center_the_slope_is_that_from_the_left():
    layer = expansion("relu", [0.0, 1.0], [-1.0, 0.0])  # f = max(0, a)
    a = torch.zeros(1, 1, dtype=DOUBLE, requires_grad=True)
    layer(a).sum().backward()
    assert a.grad.item() == 0


@pytest.mark.parametrize("kernel", ["abs", "relu", "green", "gauss"])
def test_smoothness_is_the_integral(kernel):
    layer = random_units(kernel, units=1, centers=5)
    low, high = layer.centers.min().item(), layer.centers.max().item()
    ends = (-30.0, 30.0) if kernel == "gauss" else (low, high)

    def square(a):
        x = torch.tensor([[a]], dtype=DOUBLE, requires_grad=True)
        return torch.autograd.grad(layer(x), x)[0].item() ** 2

    inner = sorted(layer.centers.flatten().tolist())
    expected = scipy.integrate.quad(square, *ends, points=inner, limit=400)[0]
    assert layer.smoothness().item() == pytest.approx(expected, rel=1e-7)


def test_smoothness_of_coefficients_that_add_to_zero():
    """−½ Σ αₖ αₗ |cₖ − cₗ| for f = ½ Σ α |a − c|, over all numbers."""
    layer = random_units("abs", units=1, centers=6)
    with torch.no_grad():
        layer.chi -= layer.chi.mean()
    alpha, c = -2 * layer.chi[0], layer.centers[0]
    expected = -0.5 * (alpha[:, None] * alpha * (c[:, None] - c).abs()).sum()
    torch.testing.assert_close(layer.smoothness(), expected)


def test_no_tensor_has_room_for_all_centers():
    layer = KernelActivation(2, 1000, "abs", normalize=False)
    a, sizes = torch.randn(500, 2, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        layer(a).sum().backward()
    assert max(sizes) <= 2 * 1001


@pytest.mark.parametrize("centers", [1, 2, 3, 7, 8, 100])
def test_place_among_the_centers(centers):
    torch.manual_seed(0)
    c = torch.randn(3, centers).sort(-1).values
    a = torch.cat([torch.randn(3, 50), c, torch.tensor([-math.inf, math.inf]).expand(3, 2)], 1)
    assert torch.equal(count_below(c, a), torch.searchsorted(c, a))


@pytest.mark.parametrize("kernel", ["abs", "gauss"])
def test_prepared(kernel):
    layer = KernelActivation(3, 7, kernel)
    a = torch.randn(5, 3)
    ready = layer.prepared()
    assert torch.equal(ready(a), layer(a))
    assert torch.equal(ready(2 * a), layer(2 * a))


def test_normalization_and_what_is_outside():
    layer = KernelActivation(2, 9)
    a = 5 + 3 * torch.randn(400, 2)
    layer(a)
    torch.testing.assert_close(layer.normalized(a).mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        layer.centers.copy_(torch.linspace(-1, 1, 9).expand(2, 9))
    part = layer.outside(a)
    torch.testing.assert_close(part, torch.full((2,), 0.317), atol=0.06, rtol=0)  # of a normal distribution beyond ±1
    assert torch.equal(layer.norm.running_mean, before["norm.running_mean"])
    layer.eval()
    assert layer.outside(torch.full((3, 2), 1e6)).tolist() == [1, 1]


def test_what_is_learned():
    layer = KernelActivation(2, 5, learn_centers=False, linear=True, normalize=False)
    assert [name for name, _ in layer.named_parameters()] == ["chi", "m", "q"]
    assert "centers" in layer.state_dict()
    assert not KernelActivation(2, 5, coefficients=0).chi.any()
    again = copy.deepcopy(layer)
    pickled = pickle.loads(pickle.dumps(layer))
    a = torch.randn(4, 2)
    assert torch.equal(layer(a), again(a))
    assert torch.equal(layer(a), pickled(a))


def test_vmap_and_compile():
    layer = random_units("abs")
    a = torch.randn(4, 6, 3, dtype=DOUBLE)
    torch.testing.assert_close(torch.vmap(layer)(a), layer(a))
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(a), layer(a))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_units": 0}, "num_units"),
        ({"num_units": 2, "num_centers": 0}, "num_centers"),
        ({"num_units": 2, "kernel": "sinc"}, "kernel must be one of"),
        ({"num_units": 2, "coefficients": -1.0}, "coefficients"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        KernelActivation(**arguments)


def test_inputs_that_do_not_fit():
    layer = KernelActivation(3, 5)
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 3\), got shape \(4, 2\)"):
        layer(torch.randn(4, 2))
    with pytest.raises(TypeError, match="real floating point"):
        layer(torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected \(T, batch, 3\)"):
        KernelRNN(3, 4)(torch.randn(5, 3))


def test_recurrence_written_out():
    torch.manual_seed(0)
    rnn = KernelRNN(2, 3, num_centers=5, normalize=False, dtype=DOUBLE)
    with torch.no_grad():
        rnn.activation.chi.normal_()
    x, h = torch.randn(4, 6, 2, dtype=DOUBLE), torch.zeros(6, 3, dtype=DOUBLE)
    states, last = rnn(x)
    for step, own in zip(x, states, strict=True):
        h = rnn.activation(torch.cat([step, h], -1) @ rnn.weight.mH + rnn.bias)
        torch.testing.assert_close(own, h)
    torch.testing.assert_close(last, h)
    swapped = copy.deepcopy(rnn)
    swapped.batch_first = True
    torch.testing.assert_close(swapped(x.transpose(0, 1))[0], states.transpose(0, 1))
    halves, middle = rnn(x[:2])
    torch.testing.assert_close(torch.cat([halves, rnn(x[2:], middle)[0]]), states)


def test_recurrence_starts_at_zero_and_learns():
    torch.manual_seed(0)
    rnn, read = KernelRNN(1, 4, num_centers=10), nn.Linear(4, 1)
    x = torch.randint(2, (3, 200, 1)).float()
    assert not rnn(x)[0].any()
    target = x[0] != x[1]
    optimizer = torch.optim.Adam([*rnn.parameters(), *read.parameters()], lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (torch.sigmoid(read(rnn(x)[1])) - target.float()).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 0.02  # always ½: 0.25
