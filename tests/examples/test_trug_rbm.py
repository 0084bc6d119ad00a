"""The TruG-RBM example: its data, its training, its table and its pictures, at tiny sizes."""

import argparse
import importlib
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")


@pytest.fixture
def example(path):
    return importlib.import_module("trug_rbm")


@pytest.fixture
def boltzmann(path):
    return importlib.import_module("harness.boltzmann")


def settings(**changes):
    values = {"seed": 0, "batch": 70, "hidden": 8, "data": "bars", "lr": 0.1, "cd_steps": 20}
    return argparse.Namespace(**{**values, **changes})


def test_bars_and_stripes(boltzmann):
    """2 · 2³ pictures, of which all white and all black count twice; rows alike or columns alike."""
    x = boltzmann.bars_and_stripes()
    assert x.shape == (14, 9)
    assert len(x.unique(dim=0)) == 14
    for picture in x.view(14, 3, 3):
        assert (picture == picture[:1]).all() or (picture == picture[:, :1]).all()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_smoke(example, capsys):
    results = example.main(["--smoke"])
    said = capsys.readouterr()
    out = Path("runs/trug_rbm/0")
    assert said.out.endswith(f"table and pictures in {out}\n")
    lines = (out / "results.md").read_text().splitlines()
    assert all(line in said.out for line in lines)
    assert len(lines) == 2 + len(results) == 2 + 2 * len(example.MODELS) + 1
    for line, result in zip(lines[2:], results, strict=True):
        assert cells(line)[:3] == [result.name, result.method, f"{result.train:.3f}"]
        assert cells(line)[3:5] == ["", ""]
        assert (cells(line)[5] == "") == (result.rbm.unit_kind == "binary")
        assert -8 < result.train < -math.log(14)
    fixed = cells(lines[2])
    assert fixed[0] == "[0, 1], ξ fixed"
    assert fixed[5:] == ["0.00 … 0.00", "1.00 … 1.00"]
    for picture in ("samples", "fields", "truncation"):
        assert (out / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"


def test_smoke_of_digits(example, capsys):
    results = example.main(["--smoke", "--data", "digits", "--out", "digits"])
    assert [r.method for r in results] == ["CD-1"] * len(example.MODELS) + ["scikit-learn"]
    for result in results:
        assert result.rbm.W.shape == (64, 4)
        assert -64 * math.log(2) < result.train < -10
        assert abs(result.test - result.train) < 3
        assert result.error > 0
    assert re.search(
        r"\| \{0, 1\} \| scikit-learn \| -\d+\.\d{3} \| -\d+\.\d{3} \| \d+\.\d{3} \|  \|  \|", capsys.readouterr().out
    )


def test_digits_are_black_from_8_on(example):
    from sklearn.datasets import load_digits

    x, test = example.load(settings(data="digits"))
    pixels = torch.as_tensor(load_digits().data)
    assert ((x == 0) | (x == 1)).all()
    assert (len(x), len(test)) == (1257, 360)
    assert x.sum() + test.sum() < (pixels >= 8).sum()
    every = {tuple(row) for row in (pixels >= 8).int().tolist()}
    assert {tuple(row) for row in torch.cat([x, test]).int().tolist()} <= every


def test_exact_gradient_nears_the_optimum(example):
    """A short run from [−1, 1]: from −6.24 to within a third of −ln 14 = −2.64, and ξ moves."""
    args, x = settings(), example.load(settings())[0]
    rbm = example.TruGRBM(9, 8, lower=-1.0, upper=1.0, dtype=torch.float64)
    example.train(rbm, x, 0, 120, 0.1, args, "")
    result = example.evaluate("[−1, 1]", "exact gradient", rbm, x, x[:0], args)
    assert -math.log(14) - 0.33 < result.train < -math.log(14)
    assert (rbm.xi1 + 1).abs().max() > 0.01


def test_contrastive_divergence_learns(example):
    args, x = settings(), example.load(settings())[0]
    rbm = example.TruGRBM(9, 8, lower=-1.0, upper=1.0, dtype=torch.float64)
    example.train(rbm, x, 2, 100, 0.03, args, "")
    assert rbm.log_likelihood(x).mean() > -5.9


def test_baseline_is_scikit_learn_s(example):
    """The likelihood by our free energy is that of their own, summed over all pictures."""
    x = example.load(settings())[0]
    rbm = example.scikit_learn(x, settings(cd_steps=10))
    theirs = example.BernoulliRBM(8, batch_size=70, n_iter=100, random_state=0).fit(x.repeat(5, 1).numpy())
    states = (torch.arange(512)[:, None] >> torch.arange(9)) & 1
    free = torch.as_tensor(theirs._free_energy(states.double().numpy()))
    expected = -torch.as_tensor(theirs._free_energy(x.numpy())) - (-free).logsumexp(0)
    torch.testing.assert_close(rbm.log_likelihood(x).detach(), expected, rtol=1e-10, atol=1e-10)
    assert expected.mean() > -6.5


def test_pictures_change_nothing(boltzmann):
    rbm = boltzmann.TruGRBM(4, 3, upper=1.0)
    rbm.units.lower.data.sub_(0.5)
    boltzmann.draw_points({"a, CD-1": rbm}, Path("points.png"))
    boltzmann.draw_images({"a": torch.rand(5, 4), "b": torch.rand(5, 4)}, "title", Path("images.png"))
    assert torch.equal(rbm.xi1, torch.full((3,), -0.5))
    assert all(Path(f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("points", "images"))
