"""examples/spd_net.py: the data by other means, the smoke run, resuming, what is said."""

import csv
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture
def script(path):
    return importlib.import_module("spd_net")


@pytest.fixture
def covariances(path):
    return importlib.import_module("harness.covariances")


def write_emg(folder, samples, sessions=("a", "b"), labels=("rock", "paper")):
    """Runs of ``samples`` rows for every session and label."""
    rng = np.random.default_rng(0)
    runs = {}
    folder.mkdir()
    with (folder / "emg.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", *(f"c{k}" for k in range(8)), "label", "exp"])
        for session in sessions:
            for label in labels:
                run = rng.integers(100, 150, (samples, 8))
                writer.writerows([0, *row, label, session] for row in run.tolist())
                runs[session, label] = run
    return runs


# ------------------------------------------------------------ data
def test_digits(covariances):
    data = covariances.load(None, 0, 5)
    assert data.x.shape == (1797, 8, 8)
    assert data.x.dtype == torch.float32
    assert torch.linalg.eigvalsh(data.x).min() > 1e-4
    assert data.fold.bincount().tolist() == [360, 360, 359, 359, 359]
    other = covariances.load(None, 1, 5)
    assert not torch.equal(other.fold, data.fold)
    assert torch.equal(other.x, data.x)
    # the position is the same in all images, and grey values have their variance, in the same units
    assert torch.allclose(data.x[0, :2, :2], data.x[5, :2, :2], atol=1e-2)
    from sklearn.datasets import load_digits

    grey = load_digits().images.reshape(-1, 64).var(1, ddof=1)
    found = data.x[:, 2, 2].numpy()
    assert np.corrcoef(grey, found)[0, 1] > 0.999


def test_emg_windows_do_not_mix_labels_or_sessions(covariances, tmp_path):
    runs = write_emg(tmp_path / "emg", 450)
    data = covariances.load(tmp_path / "emg", 0)
    assert data.classes == ["paper", "rock"]
    assert data.folds == ["a", "b"]
    assert data.y.tolist() == [1, 1, 0, 0] * 2
    assert data.fold.tolist() == [0] * 4 + [1] * 4
    last = np.cov(runs["b", "paper"][200:400], rowvar=False)
    expected = (1 - covariances.SHRINKAGE) * last + covariances.SHRINKAGE * np.trace(last) / 8 * np.eye(8)
    ratio = data.x[-1].double().numpy() / expected
    assert np.allclose(ratio, ratio[0, 0], rtol=1e-4)
    assert data.x.diagonal(dim1=-2, dim2=-1).mean().item() == pytest.approx(1, abs=1e-5)


def test_no_emg(script, tmp_path):
    with pytest.raises(SystemExit, match=r"emg\.csv does not exist"):
        script.main(["--smoke", "--data", str(tmp_path), "--out", "run"])


# ------------------------------------------------------------ methods
def separable(covariances, n=90):
    """Three folds of matrices of two classes that differ in one eigenvalue, by rotation of two axes."""
    labels = torch.arange(n) % 2
    values = torch.ones(n, 4)
    values[:, 0] += 4 * labels
    noise = torch.randn(n, 4, 4) * 0.2
    x = torch.diag_embed(values) + noise @ noise.mT
    return covariances.Covariances("made", x, labels, torch.arange(n) // 2 % 3, ["0", "1"], ["0", "1", "2"])


def settings(script, **changes):
    import argparse

    given = {"sizes": [3], "epochs": 8, "batch": 10, "lr": [0.1], "iterations": 2, "seed": 0}
    return argparse.Namespace(**{**given, **changes})


def test_all_methods_learn_what_is_there_to_learn(script, covariances):
    found = script.evaluate(separable(covariances), 1, settings(script))
    assert set(found) == set(script.METHODS)
    for method in script.METHODS:
        assert len(found[method]["predictions"]) == 30
        assert found[method]["accuracy"] > 0.9
        assert found[method]["residual"] < 1e-5


def test_frozen_weights_stay(script, covariances):
    data, args = separable(covariances), settings(script, epochs=2)
    torch.manual_seed(0)
    start = script.network(4, [3], 2, 2)[0].weight
    rows = data.fold != 0
    frozen, free = (script.train(data, rows, kind, 0.1, args) for kind in (True, False))
    assert torch.equal(frozen[0].weight, start)
    assert (free[0].weight - start).norm() > 0.05
    assert (frozen[-1].weight - free[-1].weight).norm() > 1e-3


def test_rate_is_chosen_without_the_test_fold(script, covariances):
    data = separable(covariances)
    args = settings(script, lr=[0.0, 0.1])
    assert script.rate(data, 0, False, args) == 0.1
    spoiled = data._replace(x=torch.where((data.fold == 0)[:, None, None], torch.nan, data.x))
    assert script.rate(spoiled, 0, False, args) == 0.1


# ------------------------------------------------------------ runs
def test_smoke_and_resume(script, capsys):
    whole = script.main(["--smoke", "--out", "whole"])
    said = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows[2:]] == list(script.METHODS)
    for row, method in zip(rows[2:], script.METHODS, strict=True):
        accuracies = [100 * fold[method]["accuracy"] for fold in whole]
        assert [float(cell) for cell in row[1:4]] == pytest.approx(accuracies, abs=0.051)
        assert float(row[4]) == pytest.approx(sum(accuracies) / 3, abs=0.051)
    first, second = (float(row[4]) for row in rows[2:4])
    assert float(rows[3][5]) == pytest.approx(second - first, abs=0.11)
    assert Path("whole/confusion.png").read_bytes()[:4] == b"\x89PNG"
    assert Path("whole/results.md").read_text().splitlines()[0] in said
    # a run that was stopped after the first fold
    file = Path("whole/results.json")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "folds": kept["folds"][:1]}))
    again = script.main(["--smoke", "--resume", "--out", "whole"])
    for a, b in zip(whole, again, strict=True):
        for method in script.METHODS:
            assert a[method]["predictions"] == b[method]["predictions"]
    with pytest.raises(SystemExit):
        script.main(["--smoke", "--out", "whole"])
    with pytest.raises(SystemExit):
        script.main(["--smoke", "--resume", "--seed", "1", "--out", "whole"])
