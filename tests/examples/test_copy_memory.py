"""Copy memory: the task, the count of what is recalled, stopping, resuming, the table."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
RUN = ["--smoke", "--optimizer", "paper", "--iterations", "6"]


@pytest.fixture
def copy_memory(path):
    return importlib.import_module("copy_memory")


def checkpoint(folder, name="last"):
    return torch.load(Path(folder) / "checkpoints" / f"{name}.ckpt", weights_only=True)


@pytest.mark.parametrize("delay", [1, 7])
def test_task(copy_memory, delay):
    inputs, targets = copy_memory.copy_task(delay, 500, torch.Generator().manual_seed(0))
    assert inputs.shape == (500, delay + 20, 10)
    assert torch.equal(inputs.sum(-1), torch.ones(500, delay + 20))
    read = inputs.argmax(-1)
    symbols = read[:, :10]
    assert set(symbols.unique().tolist()) == set(range(1, 9))
    assert (torch.bincount(symbols.flatten())[1:] / 5000 - 1 / 8).abs().max() < 0.02
    assert (read[:, 10 : 9 + delay] == 0).all()
    assert (read[:, 9 + delay] == 9).all()
    assert (read[:, 10 + delay :] == 0).all()
    assert (targets[:, :-10] == 0).all()
    assert torch.equal(targets[:, -10:], symbols)


def test_memoryless_network_has_the_baseline(copy_memory):
    """Blank with certainty, then all eight symbols alike: 10 ln 8 / (T + 20), at T = 1000 0.02039, and recall 1/8."""
    assert copy_memory.baseline(1000) == pytest.approx(0.02039, abs=5e-6)
    parser = copy_memory.training_parser("copy_memory", "", lr=0, batch=1, iterations=1)
    args = parser.parse_args([])
    args.model, args.hidden, args.init, args.delay = "full", 3, "haar", 30
    task = copy_memory.CopyMemory(args)
    _, targets = copy_memory.copy_task(30, 400, torch.Generator().manual_seed(0))
    outputs = torch.full((400, 50, 9), -math.inf)
    outputs[:, :40, 0] = 0
    outputs[:, 40:, 1:] = 0
    assert task.loss(outputs, targets).item() == pytest.approx(copy_memory.baseline(30), rel=1e-6)
    assert task.scores(outputs, targets)["recall"].item() == pytest.approx(1 / 8, abs=0.02)
    known = torch.nn.functional.one_hot(targets, 9).float()
    assert task.scores(known, targets)["recall"] == 1
    known[0, -1] = 1 - known[0, -1]  # one symbol of 4,000
    known[:, :5] = 0  # what stands before the last ten does not count
    assert task.scores(known, targets)["recall"].item() == pytest.approx(1 - 1 / 4000)


@pytest.mark.parametrize("model", ["full", "frozen", "restricted", "lstm", "rnn", "orthogonal"])
def test_smoke(copy_memory, capsys, model):
    copy_memory.main(["--smoke", "--model", model])
    said = capsys.readouterr()
    assert said.err == ""
    recall, residual = re.search(r"recall (0\.\d+) .*residual of W (\S+), loss curve finite", said.out, re.S).groups()
    assert 0 <= float(recall) < 0.9
    assert float(residual) < 1e-5
    assert f"{model}, N = 6, " in said.out
    out = Path("runs/copy_memory/0")
    assert str(out) in said.out
    assert (out / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert checkpoint(out)["global_step"] == 4


@pytest.mark.parametrize("optimizer", ["paper", "RMSprop", "RiemannianAdam", "Adam"])
def test_resumed_run_sees_the_batches_it_would_have_seen(copy_memory, monkeypatch, optimizer):
    run = [*RUN, "--optimizer", optimizer]
    copy_memory.main([*run, "--out", "whole"])
    with monkeypatch.context() as patch:

        def crash(task):
            if task.current_epoch == 1:
                raise RuntimeError("power cut")

        patch.setattr(copy_memory.CopyMemory, "on_train_epoch_start", crash, raising=False)
        with pytest.raises(RuntimeError, match="power cut"):
            copy_memory.main([*run, "--out", "halves"])
    assert checkpoint("halves")["global_step"] == 2
    copy_memory.main(["--resume", "--out", "halves"])
    whole, halves = checkpoint("whole"), checkpoint("halves")
    assert whole["global_step"] == halves["global_step"] == 6
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, halves["state_dict"][name]), name
    states = [c["optimizer_states"][0]["state"] for c in (whole, halves)]
    for key, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][key][name])), (key, name)


def test_stops_once_fresh_sequences_confirm(copy_memory, monkeypatch):
    asked = []

    def scores(self, outputs, targets):
        return {"recall": torch.tensor(1.0)}

    def on_fresh(self, stream):
        asked.append((stream, self.global_step))
        return {"recall": 0.9 if self.global_step < 4 else 1.0, "loss": 0.0}

    monkeypatch.setattr(copy_memory.CopyMemory, "scores", scores)
    monkeypatch.setattr(copy_memory.CopyMemory, "on_fresh", on_fresh)
    copy_memory.main([*RUN, "--out", "run"])
    assert checkpoint("run")["global_step"] == 4  # of 6
    assert asked[-3:] == [(copy_memory.CONFIRMATION, 2), (copy_memory.CONFIRMATION, 4), (copy_memory.TEST, 4)]


def test_only_the_gradients_of_an_lstm_are_clipped(copy_memory, monkeypatch):
    seen = {}

    def clip_then_look(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        grads = [torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in self.parameters()]
        seen[self.args.model] = max(g.abs().max() for g in grads)

    loss = copy_memory.CopyMemory.loss
    monkeypatch.setattr(copy_memory.CopyMemory, "loss", lambda self, y, t: 1e4 * loss(self, y, t))
    monkeypatch.setattr(copy_memory.CopyMemory, "configure_gradient_clipping", clip_then_look)
    for model in ("lstm", "full"):
        copy_memory.main(["--smoke", "--iterations", "2", "--model", model, "--out", model])
    assert seen["lstm"] == 1
    assert seen["full"] > 1


def test_numbers_below_the_smallest_normal_one_are_zero_in_training_only(copy_memory, monkeypatch):
    """A factor 10⁻³⁹ is 0 while the network trains, and a number again afterwards, whatever happens."""
    seen = []

    def loss(self, outputs, targets):
        seen.append((torch.full((4,), 1e-20) * 1e-19).max().item())
        raise RuntimeError("stop")

    monkeypatch.setattr(copy_memory.CopyMemory, "loss", loss)
    with pytest.raises(RuntimeError, match="stop"):
        copy_memory.main(["--smoke"])
    assert seen == [0.0]
    assert (torch.full((4,), 1e-20) * 1e-19).max().item() > 0


def test_a_loss_that_is_not_finite_is_told(copy_memory, monkeypatch, capsys):
    loss = copy_memory.CopyMemory.loss
    monkeypatch.setattr(copy_memory.CopyMemory, "loss", lambda self, y, t: math.nan * loss(self, y, t))
    copy_memory.main(["--smoke", "--lr", "0"])
    assert "loss curve NOT finite" in capsys.readouterr().out


def test_study_has_a_row_for_each_model(copy_memory, monkeypatch, capsys):
    monkeypatch.setattr(copy_memory, "SEEDS", range(1))
    monkeypatch.setattr(copy_memory, "MODELS", ("full", "frozen"))
    copy_memory.main(["--smoke", "--study", "--jobs", "1", "--out", "study"])
    table = Path("study/study.md").read_text()
    assert capsys.readouterr().out.startswith(table)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert rows[0][:2] == ["recall, T = 5, seed", "0"]
    assert [row[0] for row in rows[2:]] == ["full", "frozen"]
    with pytest.raises(SystemExit, match="study holds a study already"):
        copy_memory.main(["--smoke", "--study", "--out", "study"])


@pytest.mark.parametrize(("flag", "value"), [("--delay", "0"), ("--delay", "-3"), ("--hidden", "0"), ("--fresh", "0")])
def test_sizes_that_make_no_sense(copy_memory, capsys, flag, value):
    with pytest.raises(SystemExit) as refused:
        copy_memory.main([flag, value])
    assert refused.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {flag}: must be at least 1, got {value}\n")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("argv", "every", "epochs"),
    [
        (["--delay", "5"], 10, 200),
        (["--delay", "200"], 40, 50),
        (["--delay", "1000"], 100, 20),
        (["--delay", "5", "--every", "100"], 100, 20),
        (["--smoke"], 2, 2),
    ],
)
def test_short_delays_are_validated_more_often(copy_memory, monkeypatch, argv, every, epochs):
    seen = []
    monkeypatch.setattr(copy_memory, "study", lambda args, *others: seen.append(args))
    copy_memory.main([*argv, "--study"])
    assert (seen[0].every, seen[0].epochs) == (every, epochs)


def test_the_command_line_comes_before_the_preset(copy_memory, monkeypatch):
    seen = []
    monkeypatch.setattr(copy_memory, "study", lambda args, *others: seen.append((args, others[-1])))
    for argv in (["--smoke", "--hidden", "7"], ["--hidden", "7", "--smoke"], ["--paper", "--hidden", "7"]):
        copy_memory.main([*argv, "--study"])
    assert [args.hidden for args, _ in seen] == [7, 7, 7]
    assert all(variant["hidden"] == 7 for _, variants in seen for variant in variants.values())
