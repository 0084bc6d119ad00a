"""benchmarks/layers.py: every contestant trains, ours on the manifold, and the table has them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torch import nn

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("layers")


@pytest.fixture
def without_peers(layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(layers.CONTESTANTS, "geotorch orthogonal")


@pytest.mark.parametrize(
    ("build", "weight", "batch", "number"),
    [
        (lambda: nn.Linear(4, 6), "weight", (5, 4), 6),
        (lambda: nn.Conv2d(2, 3, 2), "weight", (1, 2, 4, 4), 4),
        (lambda: nn.RNN(2, 4), "weight_hh_l0", (3, 2, 2), 6),
    ],
)
def test_rows(layers, without_peers, build, weight, batch, number) -> None:
    rows = layers.run_case("small", layers.Case(build, weight, batch), steps=3)
    assert len(rows) == number
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["residual"] < 1e-5 for row in rows if row["contestant"] != "no constraint")
    assert rows[-1]["residual"] > 0.1  # the measure sees what is not orthogonal
    table = layers.report(rows)
    assert all(row["contestant"] in table for row in rows)


def test_a_weight_off_the_manifold_is_an_error(layers, without_peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.CONTESTANTS, layers.OURS, lambda module, name: None)
    case = layers.Case(lambda: nn.Linear(3, 3), "weight", (2, 3))
    with pytest.raises(RuntimeError, match=r"constrain .* ended at residual"):
        layers.run_case("small", case, steps=3)
