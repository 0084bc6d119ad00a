"""Norms of gradients: constant for a unitary recurrence without threshold, and what autograd and algebra say."""

import csv
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")


@pytest.fixture
def flow(path):
    return importlib.import_module("gradient_flow")


def model_of(flow, name, T, batch=4, N=16):
    torch.manual_seed(0)
    model = flow.SequenceModel(name, 9, N, 9, last=True)
    inputs = nn.functional.one_hot(torch.randint(9, (batch, T)), 9).float()
    return model, inputs, torch.randint(9, (batch,))


def test_norm_is_constant_without_threshold(flow):
    """b = 0 and the exact modReLU: σ(z) = z, and ‖∂L/∂h_t‖ is the same for all t."""
    model, inputs, labels = model_of(flow, "full", 1000)
    for module in model.modules():
        if isinstance(module, flow_activation()):
            module.hard = True
            nn.init.zeros_(module.bias)
        if hasattr(module, "hard"):
            module.hard = True
    norms = torch.tensor(flow.gradient_norms(model, inputs, labels))
    assert norms.shape == (1000,)
    assert norms[0] > 1e-3
    assert (norms / norms[-1] - 1).abs().max() < 1e-4


def flow_activation():
    return importlib.import_module("manopt_torch.nn").ModReLU


def test_norm_decays_as_the_recurrence_contracts(flow):
    """A tanh RNN with W = 0.9·orthogonal and no input or bias stays at 0, where tanh' = 1: norms 0.9^(T-t)."""
    model, inputs, labels = model_of(flow, "rnn", 30)
    with torch.no_grad():
        for p in (model.rnn.weight_ih_l0, model.rnn.bias_ih_l0, model.rnn.bias_hh_l0):
            p.zero_()
        model.rnn.weight_hh_l0.copy_(0.9 * torch.linalg.qr(torch.randn(16, 16)).Q)
    norms = torch.tensor(flow.gradient_norms(model, inputs, labels))
    torch.testing.assert_close(norms / norms[-1], 0.9 ** torch.arange(29, -1, -1.0))


def test_norms_of_an_lstm_are_those_of_the_whole_state(flow):
    """Finite differences of L after step t in random directions of (h, c) have the mean square ‖grad‖²."""
    model, inputs, labels = model_of(flow, "lstm", 6, batch=2, N=3)
    model, inputs = model.double(), inputs.double()
    norms = flow.gradient_norms(model, inputs, labels)
    t = 3
    with torch.no_grad():
        _, state = model.rnn(inputs[:, :t])
        start = torch.cat([part.flatten() for part in state])

        def loss(flat):
            hx = tuple(part.reshape(1, 2, 3) for part in flat.chunk(2))
            _, (h, _) = model.rnn(inputs[:, t:], hx)
            return nn.functional.cross_entropy(model.readout(h[-1]), labels)

        eye = 1e-5 * torch.eye(12, dtype=torch.float64)
        slopes = torch.stack([(loss(start + e) - loss(start - e)) / 2e-5 for e in eye])
    assert norms[t - 1] == pytest.approx(slopes.norm().item(), rel=1e-6)


def test_smoke(flow, capsys):
    flow.main(["--smoke", "--models", "full", "restricted", "rnn", "lstm", "--out", "run"])
    assert len(re.findall(r"‖∂L/∂h_1‖ = \d", capsys.readouterr().out)) == 4
    assert Path("run/gradient_flow.png").read_bytes()[:4] == b"\x89PNG"
    with Path("run/gradient_flow.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["t", "full", "restricted", "rnn", "lstm"]
    assert [int(row[0]) for row in rows[1:]] == list(range(1, 21))


@pytest.mark.parametrize(
    ("least", "limit"),
    [(1e-3, 1e-4), (1e-12, 1e-13), (1e-50, 1e-30), (0.0, 1e-30)],  # what lies below 1e-30 is not shown
)
def test_the_picture_reaches_down_to_the_data(flow, monkeypatch, least, limit):
    drawn = []
    monkeypatch.setattr(flow.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    flow.picture({"rnn": [least, 1e-29 if least < 1e-30 else 0.1, 1.0], "full": [1.0, 1.0, 1.0]}, Path("none.png"))
    (axes,) = drawn[0].axes
    assert axes.get_ylim() == pytest.approx((limit, 30.0), rel=1e-9)
    assert [line.get_label() for line in axes.lines] == ["full", "rnn"]  # the broad line lies below


def test_lines_that_coincide_can_be_told_apart(flow):
    looks = [(style.get("linestyle", "-"), style.get("linewidth", 1.5)) for style in flow.STYLES.values()]
    assert set(flow.STYLES) == set(flow.MODELS)
    assert len(set(looks)) == len(looks)
