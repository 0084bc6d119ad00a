"""Boolean functions of two bits in noise: labels, runs that go on, the table, what flows through."""

import importlib
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")  # harness
SMALL = ["--smoke", "--functions", "xor", "--seeds", "1"]
LABELS = {"or": [0, 1, 1, 1], "and": [0, 0, 0, 1], "xor": [0, 1, 1, 0], "equiv": [1, 0, 0, 1]}


@pytest.fixture
def example(path):
    return importlib.import_module("kernel_rnn")


@pytest.fixture
def boolean(path):
    return importlib.import_module("harness.boolean")


@pytest.mark.parametrize("function", LABELS)
def test_labels(boolean, function):
    assert list(boolean.FUNCTIONS) == list(LABELS)
    x, y = boolean.boolean_task(function, 7, 400, torch.Generator().manual_seed(0))
    assert x.shape == (7, 400, 1)
    assert sorted(x.unique().tolist()) == [0, 1]
    expected = torch.tensor(LABELS[function])[(2 * x[0, :, 0] + x[1, :, 0]).long()]
    assert torch.equal(y, expected.float())
    assert (x.mean((1, 2)) - 0.5).abs().max() < 0.1


def cell(boolean, file, model="kbrn", **changes):
    given = {"hidden": 4, "centers": 10, "lr": 0.01, "batch": 30, "iterations": 12, "clip": 1.0, **changes}
    return boolean.Cell(Namespace(**given), Path(file), "or", 2, model, 0)


@pytest.mark.parametrize("model", ["kbrn", "lstm"])
def test_resumed_run_has_the_trajectory_of_an_uninterrupted_one(boolean, model):
    boolean.train(cell(boolean, "whole.pt", model))
    boolean.train(cell(boolean, "halves.pt", model, iterations=5))
    boolean.train(cell(boolean, "halves.pt", model))
    whole, halves = (torch.load(name, weights_only=True) for name in ("whole.pt", "halves.pt"))
    assert whole["right"] == halves["right"]
    assert len(whole["right"]) == 12
    for name, value in whole["reader"].items():
        assert torch.equal(value, halves["reader"][name]), name


def test_gradients_are_clipped(boolean):
    """A norm of nothing: Adam's steps are far below its rate, 10⁻¹² / 10⁻⁸ of it."""
    for clip, moved in ((math.inf, True), (1e-12, False)):
        boolean.train(cell(boolean, f"{clip}.pt", iterations=1, clip=clip))
        torch.manual_seed(0)
        start = boolean.Reader("kbrn", 4, 10)
        step = torch.load(f"{clip}.pt", weights_only=True)["reader"]["read.bias"] - start.read.bias
        assert (step.abs() > 0.009).item() == moved


def test_success_is_ten_batches_in_a_row(boolean):
    found = boolean.train(cell(boolean, "run.pt", batch=200, iterations=2000))
    right = torch.load("run.pt", weights_only=True)["right"]
    assert found["solved"]
    assert found["iterations"] == len(right) < 2000
    means = torch.tensor(right, dtype=torch.float64).unfold(0, 10, 1).mean(1)
    assert means[-1] > 0.99
    assert (means[:-1] <= 0.99).all()
    assert found["fresh"] > 0.95
    again = boolean.train(cell(boolean, "run.pt", batch=200, iterations=3000))  # nothing is left to do
    assert again["iterations"] == found["iterations"]


@pytest.mark.parametrize("model", ["kbrn", "lstm"])
def test_gains(boolean, model):
    """∂h_t/∂a_t and ∂c_t/∂c_{t−1} by differences of the networks themselves."""
    torch.manual_seed(0)
    reader = boolean.Reader(model, 3, 8).double()
    if model == "kbrn":
        torch.nn.init.normal_(reader.rnn.activation.chi)
    x = torch.randint(2, (4, 9, 1)).double()
    found = boolean.gains(reader, x)
    assert found.shape == (4, 9, 3)
    states = reader.rnn(x)[0]
    before = states[-2]
    if model == "kbrn":
        activation, rnn = reader.rnn.activation, reader.rnn
        a = activation.normalized(torch.cat([x[-1], before], 1) @ rnn.weight.mH + rnn.bias).detach()
        torch.testing.assert_close(activation.function(a), states[-1])
        slope = (activation.function(a + 1e-7) - activation.function(a - 1e-7)) / 2e-7
        torch.testing.assert_close(found[-1], slope.abs(), rtol=1e-5, atol=1e-6)
    else:
        _, (h, c) = reader.rnn(x[:-1])
        ends = [reader.rnn(x[-1:], (h, c + d))[1][1] for d in (1e-5, -1e-5)]
        torch.testing.assert_close(found[-1], (ends[0] - ends[1])[0] / 2e-5, rtol=1e-6, atol=1e-8)


def test_row_by_hand(example):
    runs = [{"iterations": n, "solved": n < 50, "fresh": 0.5, "running": 0.25, "seconds": 2.0} for n in (10, 50, 30)]
    cells = "| xor | 20 | kbrn | 10 - 30 | 2 of 3 | 30 | 0.500 | 0.250 | 2 |"
    assert example.row(("xor", 20, "kbrn"), runs) == cells
    failed = example.row(("xor", 20, "kbrn"), runs[1:2])
    assert failed == "| xor | 20 | kbrn | - | 0 of 1 | - | 0.500 | 0.250 | 2 |"


def test_smoke(example, capsys):
    found = example.main([*SMALL, "--flow"])
    said = capsys.readouterr().out
    out = Path("runs/kernel_rnn/0")
    assert said == (out / "table.md").read_text() + f"table, pictures and checkpoints in {out}\n"
    for name in ("iterations.png", "flow.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert list(found) == [("xor", 3, "kbrn"), ("xor", 3, "lstm")]
    assert all(r["iterations"] == 12 for runs in found.values() for r in runs)


def test_resume(example, capsys):
    with pytest.raises(SystemExit, match=r"nothing to resume: run/settings\.json does not exist"):
        example.main([*SMALL, "--out", "run", "--resume"])
    example.main([*SMALL, "--out", "run", "--models", "kbrn"])
    kept = torch.load("run/xor-3-kbrn-0.pt", weights_only=True)["right"]
    with pytest.raises(SystemExit, match="run holds runs already"):
        example.main([*SMALL, "--out", "run"])
    with pytest.raises(SystemExit):
        example.main(["--resume", "--out", "run", "--batch", "21"])
    assert "the runs in run have another batch" in capsys.readouterr().err
    found = example.main(["--resume", "--out", "run", "--iterations", "14", "--models", "kbrn", "lstm"])
    assert list(found) == [("xor", 3, "kbrn"), ("xor", 3, "lstm")]
    right = torch.load("run/xor-3-kbrn-0.pt", weights_only=True)["right"]
    assert len(right) == 14
    assert right[:12] == kept
    assert json.loads(Path("run/settings.json").read_text())["iterations"] == 14
    assert math.isfinite(sum(right))


def test_sizes_that_make_no_sense(example, capsys):
    with pytest.raises(SystemExit) as refused:
        example.main(["--length", "1"])
    assert refused.value.code == 2
    assert "error: argument --length: must be at least 2, got 1" in capsys.readouterr().err
    assert not Path("runs").exists()
