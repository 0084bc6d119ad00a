"""Single units: the two tasks by hand, units that share nothing, and what a run writes."""

import importlib
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")  # harness


@pytest.fixture
def example(path):
    return importlib.import_module("kernel_units")


@pytest.fixture
def units(path):
    return importlib.import_module("harness.units")


def settings(**changes):
    return Namespace(**{"seed": 0, "seeds": 3, "centers": 5, "lr": 0.01, "steps": 3, "charging_steps": 2, **changes})


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_parity(units, bits):
    patterns, odd = units.parity(bits)
    assert patterns.unique(dim=0).shape == (2**bits, bits)
    assert odd.tolist() == [bin(int("".join(str(int(b)) for b in row), 2)).count("1") % 2 for row in patterns]


@pytest.mark.parametrize(
    ("charge", "left"),
    [
        ([0, 3, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]),
        ([2, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]),
        ([2, 2, 0, 0, 0, 1], [1, 1, 1, 1, 0, 1]),  # one is left when two are added: four steps in all
        ([0, 0, 0, 0, 0, 9], [0, 0, 0, 0, 0, 1]),
    ],
)
def test_charging_by_hand(units, charge, left):
    assert units.charging(torch.tensor(charge, dtype=torch.float32)).tolist() == left
    assert units.charging(torch.tensor([charge, charge]).mH.float()).tolist() == [[y, y] for y in left]


def test_charges(units):
    x = units.charges(3000, torch.Generator().manual_seed(0))
    assert x.shape == (30, 3000)
    assert ((x > 0).sum(0) == 3).all()
    assert sorted(x.unique().tolist()) == list(range(11))
    assert (x > 0).any(1).all()


@pytest.mark.parametrize("kind", ["kernel", "frozen centers", "relu"])
def test_units_share_nothing(units, kind):
    own = units.Units(2, kind, settings(), coefficients=1.0)
    x, _ = units.parity(2)
    own(x)[:, 1].sum().backward()
    learned = {name: p for name, p in own.named_parameters() if p.grad is not None}
    assert ("f.centers" in learned) == (kind == "kernel")
    for name, p in learned.items():
        assert not p.grad[[0, 2]].any(), name
        assert name == "back" or kind == "relu" or p.grad[1].any(), name


def test_scan_is_forward_step_by_step(units):
    own, x = units.Units(1, "kernel", settings(), coefficients=1.0), torch.rand(4, 6)
    h = torch.zeros(6, 3)
    for step, seen in zip(x, own.scan(x), strict=True):
        h = own(step[:, None], h)
        torch.testing.assert_close(seen, h)


def test_a_unit_learns_the_parity_of_two_bits(units):
    found = units.learn_parity(2, "kernel", 0.0, settings(centers=20, steps=400))
    assert found.right.tolist() == [1, 1, 1]
    assert (found.since > 1).all()
    assert (found.since <= 400).all()
    line = units.learn_parity(2, "relu", 0.0, settings(steps=400))
    assert (line.right <= 0.75).all()  # exclusive or is not monotone along any direction
    assert line.since.isnan().all()


def test_penalty_empties_a_sum(units):
    kept = [units.learn_parity(2, "kernel", p, settings(steps=300)).units.penalty() for p in (0.0, 0.05)]
    assert kept[1] < kept[0] / 2


def test_smoke(example, capsys):
    found = example.main(["--smoke"])
    said = capsys.readouterr().out
    out = Path("runs/kernel_units/0")
    assert said == (out / "table.md").read_text() + f"table and picture in {out}\n"
    assert (out / "shapes.png").read_bytes()[:4] == b"\x89PNG"
    rows = [line.strip("| ").split(" | ") for line in said.splitlines()[2:-1]]
    assert [tuple(row[:2]) for row in rows] == [name[:2] for name in found]
    assert len(found) == 13


def test_row_counts_by_hand(example, units):
    args = settings(seeds=4, centers=3)
    own = units.Units(2, "kernel", args, coefficients=1.0)
    with torch.no_grad():
        own.f.chi.copy_(torch.tensor([[1, 0.0, 0.005], [1, -1, 0.0], [0.02, -0.02, 1], [0, 0, 0]]))
    since = torch.tensor([7.0, math.nan, 30, 100])
    learned = units.Learned(own, torch.tensor([1, 0.5, 1, 1]), since)
    cells = example.row("parity of 2", "kernel", 7.5e-4, learned, args).strip("| ").split(" | ")
    assert cells == ["parity of 2", "kernel", "0.00075", "0.500 1.000 1.000", "3 of 4", "7 30 100", "0 3 of 3"]
