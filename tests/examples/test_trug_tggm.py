"""The TruG-TGGM example: its data, its splits, its table, resuming and its picture, at tiny sizes."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


@pytest.fixture
def example(path):
    return importlib.import_module("trug_tggm")


@pytest.fixture
def regression(path):
    return importlib.import_module("harness.regression")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def write(name, rows):
    np.savetxt(name, rows, delimiter=",", header=",".join("abcdefgh"[: rows.shape[1]]), comments="")


def test_smoke(example, capsys):
    results = example.main(["--smoke"])
    said = capsys.readouterr().out
    out = Path("runs/trug_tggm/0")
    assert said.endswith(f"table and picture in {out}\n")
    lines = (out / "results.md").read_text().splitlines()
    assert all(line in said for line in lines)
    assert [r.name for r in results] == list(example.METHODS)
    for line, result in zip(lines[2:], results, strict=False):
        assert len(result.errors) == 2
        mean, half = sum(result.errors) / 2, abs(result.errors[0] - result.errors[1]) / 2
        assert cells(line)[0] == result.name
        assert float(cells(line)[1]) == pytest.approx(mean, rel=1e-3)
        assert float(cells(line)[2]) == pytest.approx(half, rel=0.06)
        assert (cells(line)[3] != "") == (result.name in ("shared", "unit"))
    assert 45 < np.mean(results[0].errors) < 65  # of diabetes
    assert lines[9].startswith("shared − fixed, RMSE: ")
    assert lines[10].startswith("unit − fixed, RMSE: ")
    assert (out / "errors.png").read_bytes()[:4] == b"\x89PNG"


def test_resumed_run_is_the_uninterrupted_one(example, monkeypatch):
    arguments = ["--smoke", "--method", "fixed", "unit", "--out"]
    whole = example.main([*arguments, "a", "--splits", "3"])
    example.main([*arguments, "b", "--splits", "1"])
    again = example.main([*arguments, "b", "--splits", "3", "--resume"])
    for one, other in zip(whole, again, strict=True):
        assert one.errors == other.errors
        assert one.moved == other.moved
    assert len(set(whole[1].errors)) == 3
    monkeypatch.setattr(example, "evaluate", None)  # nothing is left to do
    assert example.main([*arguments, "b", "--splits", "3", "--resume"])[1].errors == whole[1].errors
    kept = json.loads(Path("b/splits.json").read_text())["splits"]
    assert len(kept) == 3
    assert kept[0]["fixed"]["ends"][1] == [1.0] * 3
    assert kept[0]["unit"]["ends"][1] != [1.0] * 3
    for refused in ([*arguments, "b"], [*arguments, "c", "--resume"], [*arguments, "b", "--resume", "--hidden", "4"]):
        with pytest.raises(SystemExit):
            example.main(refused)


def test_splits(regression):
    """Parts of the right sizes with no row in common; standardised without the test set."""
    x = torch.arange(200.0).double()[:, None] ** torch.tensor([1, 2, 0]).double()
    table = regression.Table("squares", x, 3 * x[:, :1])
    parts, other, again = (regression.split(table, 0, i) for i in (0, 1, 0))
    assert [len(part[0]) for part in parts[:3]] == [162, 18, 20]
    assert torch.equal(parts.test[0], again.test[0])
    assert not torch.equal(parts.test[0], other.test[0])
    known = parts.known[0]
    torch.testing.assert_close(known.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(known[:, :2].std(0, correction=0), torch.ones(2))
    rows = torch.cat([known[:, 0], parts.test[0][:, 0]])
    assert len(rows.unique()) == 200
    gaps = known[:, 0].double().sort().values.diff() * parts.scale / 3  # of whole numbers
    torch.testing.assert_close(gaps, gaps.round(), atol=1e-3, rtol=0)
    assert gaps.min() > 0.9
    for part in parts[:3]:
        torch.testing.assert_close(part[0][:, :1], part[1])  # both are standardised alike
    error = regression.rmse(parts.test[1] + 2, parts.test, parts.scale)
    assert error == pytest.approx(2 * parts.scale.item())
    assert regression.ridge(parts) < 0.01 * parts.scale.item()  # y is linear


def test_files(regression, example):
    rows = np.random.default_rng(0).normal(size=(30, 4))
    for name in ("any", "protein-structure", "naval-propulsion"):
        write(f"{name}.csv", rows)
    whole = torch.as_tensor(rows)
    for name, targets in (("any", [3]), ("protein-structure", [0]), ("naval-propulsion", [2, 3])):
        table = regression.read_table(Path(f"{name}.csv"))
        torch.testing.assert_close(table.y, whole[:, targets])
        torch.testing.assert_close(table.x, whole[:, [c for c in range(4) if c not in targets]])
    results = example.main(
        ["--smoke", "--data", "naval-propulsion.csv", "--method", "MLP", "unit", "--splits", "1", "--out", "naval"]
    )
    assert all(math.isfinite(r.errors[0]) for r in results)
    write("few.csv", rows[:5])
    for name, said in (("few", "has 5 rows of 4 numbers"), ("none", "is not there")):
        with pytest.raises(SystemExit, match=said):
            regression.read_table(Path(f"{name}.csv"))


def test_what_is_said_of_pairs(regression):
    """By hand: differences −1, −2, 0 have mean −1 and standard error 1/√3; t(0.975, 2) = 4.3027."""
    said = regression.paired("unit", [1.0, 2.0, 5.0], [2.0, 4.0, 5.0])
    assert said == "unit − fixed, RMSE: -1, 95% t interval [-3.48, +1.48], lower in 2 of 3 splits"
    assert regression.paired("unit", [1.0], [2.0]) == "unit − fixed, RMSE: -1; one split has no interval"


def test_moves_of_the_ends(regression):
    units = regression.TruG(2, lower=-1.0, upper=1.0, learn="unit")
    assert regression.moved(units) == pytest.approx([0, 0], abs=1e-6)
    units.lower.data += torch.tensor([0.5, -0.1])  # both ends, since ξ₂ = ξ₁ + width
    assert regression.moved(units) == pytest.approx([0.3, 0.3], abs=1e-6)
    assert regression.moved(regression.TruG(2, learn="unit"))[1] == 0


def test_training_keeps_the_best_on_validation(example, regression):
    """With a rate at which Adam diverges beside a good one, the good one is kept."""
    x = torch.linspace(-2, 2, 100).double()[:, None]
    parts = regression.split(regression.Table("abs", x, x.abs()), 0, 0)
    arguments = example.argparse.Namespace(
        seed=0, hidden=8, steps=100, batch=20, lr=[1e3, 0.05], lower=-1.0, upper=1.0, sigma2=0.2
    )
    found = example.evaluate("MLP", parts, arguments, "test")
    assert found["error"] < 0.3 * parts.scale.item()
    assert found["moved"] == found["ends"] == []
