"""The table and the picture of capacities: the numbers that the script's text claims."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


@pytest.fixture
def example(path):
    return importlib.import_module("capacity")


def test_smoke(example, capsys):
    found = example.main(["--smoke"])
    assert list(found["restricted"]) == [2, 3, 4]
    said = capsys.readouterr().out
    out = Path("runs/capacity/0")
    assert said == (out / "capacity.md").read_text() + f"table and picture in {out}\n"
    assert (out / "capacity.png").read_bytes()[:4] == b"\x89PNG"
    lines = said.splitlines()
    assert lines[0].strip("| ").split(" | ") == list(example.COLUMNS)
    assert "| restricted | 3 | 21 | 9 | no | 9 | yes |" in lines
    assert len(lines) == 2 + 6 * 3 + 1


def test_numbers_of_the_text(example):
    found = example.main(["--largest", "8", "--points", "1", "--out", "here"])
    assert Path("here/capacity.png").is_file()
    restricted = found["restricted"]
    assert [c.rank for c in restricted.values()] == [4, 9, 16, 25, 35, 42, 49]
    assert [c.restricted for c in restricted.values()] == [False] * 6 + [True]
    for name in ("restricted", "3 reflections", "6 rotation layers"):
        assert all(abs(c.num_params - 7 * N) <= 6 for N, c in found[name].items()), name
        assert found[name][8].rank < 64
    for name in ("Cayley", "N−1 reflections", "N rotation layers"):
        assert all(c.rank == N * N for N, c in found[name].items()), name
    assert all(c.num_params == N * N for name in ("Cayley", "N rotation layers") for N, c in found[name].items())


def test_sizes_that_make_no_sense(example, capsys):
    with pytest.raises(SystemExit) as refused:
        example.main(["--largest", "1"])
    assert refused.value.code == 2
    assert capsys.readouterr().err.endswith("error: argument --largest: must be at least 2, got 1\n")
    assert not Path("runs").exists()
