"""The adding problem: the task, its baseline, a run."""

import importlib
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")


@pytest.fixture
def adding(path):
    return importlib.import_module("adding")


@pytest.mark.parametrize("length", [2, 9, 100])
def test_task(adding, length):
    inputs, targets = adding.adding_task(length, 4000, torch.Generator().manual_seed(0))
    assert inputs.shape == (4000, length, 2)
    numbers, marks = inputs.unbind(-1)
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() <= 1
    half = length // 2
    for part in (marks[:, :half], marks[:, half:]):
        assert torch.equal(part.sum(1), torch.ones(4000))
        assert part.any(0).all()  # every place is used
    torch.testing.assert_close((numbers * marks).sum(1, keepdim=True), targets)


def test_always_one_has_the_baseline(adding):
    _, targets = adding.adding_task(50, 100_000, torch.Generator().manual_seed(0))
    assert (targets - 1).square().mean().item() == pytest.approx(adding.BASELINE, abs=0.003)
    assert pytest.approx(0.1667, abs=5e-5) == adding.BASELINE


@pytest.mark.parametrize("model", ["full", "frozen", "restricted", "lstm", "rnn", "orthogonal"])
def test_smoke(adding, capsys, model):
    adding.main(["--smoke", "--model", model])
    said = capsys.readouterr()
    assert said.err == ""
    error, residual = re.search(
        r"mean squared error (\S+) .*residual of W (\S+), loss curve finite", said.out, re.S
    ).groups()
    assert 0.01 < float(error) < 100
    assert float(residual) < 1e-5
    assert (Path("runs/adding/0") / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"


def test_learns_short_sums(adding, capsys):
    sizes = ["--length", "4", "--hidden", "16", "--iterations", "400", "--every", "100", "--fresh", "200"]
    adding.main([*sizes, "--lr", "0.005", "--schedule", "cosine"])
    error = float(re.search(r"mean squared error (\S+) ", capsys.readouterr().out).group(1))
    assert error < adding.BASELINE / 4


@pytest.mark.parametrize(("flag", "value", "least"), [("--length", "1", 2), ("--hidden", "0", 1), ("--fresh", "0", 1)])
def test_sizes_that_make_no_sense(adding, capsys, flag, value, least):
    with pytest.raises(SystemExit) as refused:
        adding.main([flag, value])
    assert refused.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {flag}: must be at least {least}, got {value}\n")
    assert not Path("runs").exists()
