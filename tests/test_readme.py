"""The README: every Python block runs and prints what stands below it, commands and links are real."""

from __future__ import annotations

import configparser
import contextlib
import io
import math
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", README, re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?")
ROUNDING = 1e-5  # numbers below this are rounding errors: only their size is compared
RELATIVE = 0.05  # between processors; the losses are printed with two to four digits


def differences(printed: str, written: str) -> list[str]:
    """Where two outputs differ: in words, or in numbers by more than rounding explains."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", written).split():
        return [f"printed {printed!r}, README has {written!r}"]
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(written), strict=True)
    return [f"printed {a}, README has {b}" for a, b in pairs if not same(a, b)]


def same(a: str, b: str) -> bool:
    if float(a) < ROUNDING and float(b) < ROUNDING:
        return True
    last_digit = 0 if "e" in b else 10.0 ** -len(b.partition(".")[2])
    return math.isclose(float(a), float(b), rel_tol=RELATIVE, abs_tol=1.01 * last_digit if "." in b else 0)


@pytest.mark.parametrize("i", range(len(BLOCKS)))
def test_blocks_run_and_print_what_the_readme_says(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    code, written = BLOCKS[i]
    module = types.ModuleType(f"readme_{i}")  # so that its classes can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, f"README.md, Python block {i}", "exec"), module.__dict__)
    assert not differences(printed.getvalue(), written)


def test_differences_are_seen() -> None:
    assert not differences("Adam: loss 1.97, residual 2e-07\n", "Adam: loss 1.98, residual 8e-07\n")
    assert differences("loss 1.97", "loss 2.17")
    assert differences("residual 2e-03", "residual 2e-07")
    assert differences("residual 2e-07", "residual 2e-02")
    assert differences("loss 1", "cost 1")
    assert differences("loss 1", "")
    assert differences("a 1 2", "a 1")


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == README.count("```python")
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("marker", ["main job", "test command"])
def test_commands_are_one_line_and_use_extras_that_exist(marker: str) -> None:
    (command,) = re.findall(rf"<!-- {marker} -->\n```bash\n(.*)\n```\n", README)
    setup = configparser.ConfigParser(interpolation=configparser.ExtendedInterpolation())
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    (extra,) = re.findall(r'^pip install -c constraints\.txt -e "\.\[(\w+)\]" && python ', command)
    assert extra in setup["options.extras_require"]


def test_links_lead_somewhere() -> None:
    text = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_name_files_that_exist() -> None:
    named = re.findall(r"python ((?:examples|benchmarks)/\w+\.py)", README)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_levels_show_every_module() -> None:
    shown = README.split("## How it is built")[1].split("###")[0]
    modules = {p.stem for p in (ROOT / "manopt_torch").rglob("*.py")} - {"__init__", "_version"}
    assert [name for name in sorted(modules) if not re.search(rf"\b{name}\b", shown)] == []
