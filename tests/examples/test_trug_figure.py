"""The pictures and the table of the TruG unit: what the script's text claims."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")


@pytest.fixture
def example(path):
    return importlib.import_module("trug_figure")


def test_smoke(example, capsys):
    found = example.main(["--smoke"])
    said = capsys.readouterr().out
    out = Path("runs/trug_figure/0")
    assert said == (out / "accuracy.md").read_text() + f"table and pictures in {out}\n"
    for picture in ("figure1", "accuracy"):
        assert (out / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"
    lines = said.splitlines()
    assert lines[0].strip("| ").split(" | ") == list(example.COLUMNS)
    assert len(lines) == 2 + sum(len(z) for _, z in example.PLACES) + 1
    assert {len(line.split(" | ")) for line in lines[:-1]} == {len(example.COLUMNS)}
    assert any(line.startswith("| [0, ∞) | -40 | NaN | NaN | ") for line in lines)
    assert len(found[-1].z) == 9

    errors = {
        (e.interval, z): {k: v[:, i] for k, v in e.by_method.items()} for e in found for i, z in enumerate(e.z.tolist())
    }
    assert max(v["ours"].max() for v in errors.values()) < 1e-12
    one_sided = (0.0, math.inf)
    at = errors[one_sided, -40.0]
    assert at["textbook"].isnan().all()
    assert 1e-4 < at["published"][0] < 1e-3
    assert at["published"][1] > 0.5
    assert errors[one_sided, -37.0]["published"][0] < 1e-9
    assert errors[(-1.0, 0.0), 37.0]["textbook"][0] < 1e-9  # the other side lasts longer
    assert errors[(0.0, 1.0), -9.0]["textbook"].isnan().all()


def test_exact_values_are_those_of_the_reference(example):
    file = Path(__file__).parents[1] / "reference" / "trug_moments.json"
    points = [p for p in json.loads(file.read_text())["points"] if p["kind"] == "grid" and p["sigma"] == 1.0]
    assert len(points) > 50
    for p in points[::3]:
        mean, variance = example.exact(p["z"], float(p["xi1"]), float(p["xi2"]))
        assert abs(float(mean) - p["mean"]) <= 1e-14 * abs(p["mean"])
        assert abs(float(variance) - p["var"]) <= 1e-14 * p["var"]


def test_published_approximation(example):
    """4.8e-7 at the switch, as the bound of proposition 1 says."""
    x = torch.tensor(example.SWITCH, dtype=torch.float64)
    with example.mp.workdps(40):
        error = float(example.approximate_ratio(x).item() * example.mp.ncdf(x.item()) / example.mp.npdf(x.item()) - 1)
    assert abs(abs(error) - 4.8e-7) < 0.1e-7
    assert torch.isnan(example.published(x[None], 0.0, 1.0)).all()


def test_figure_1_is_the_paper_s(example):
    ends = [(layer().xi1.item(), round(layer().xi2.item(), 5)) for _, layer, _, _, _ in example.PANELS]
    assert ends == [(0, math.inf), (-1, 1), (0, 1), (0, 4)]


def test_table_tells_what_does_not_apply_from_what_fails(example):
    z = torch.tensor([-9.0], dtype=torch.float64)
    one_sided, two_sided = example.table([example.measure(i, z) for i in ((0.0, math.inf), (0.0, 1.0))]).splitlines()[
        2:
    ]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (one_sided, two_sided)]
    assert [row[2:4] for row in cells] == [["NaN", "NaN"]] * 2
    assert cells[1][4:6] == ["-", "-"]
    assert all(float(cell) < 1e-6 for cell in cells[0][4:] + cells[1][6:])
