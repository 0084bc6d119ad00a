"""What the benchmarks share: who was measured on what, tables, result files."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parents[1] / "runs" / "benchmarks"  # git ignores runs/
DTYPES = {"float32": torch.float32, "complex64": torch.complex64}


def environment() -> dict[str, str]:
    """Versions and machine, to stand beside every number."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "manopt_torch", "geoopt", "geotorch", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "processor": _processor(), "threads": str(torch.get_num_threads())}


def environment_line() -> str:
    return ", ".join(f"{key} {value}" for key, value in environment().items())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def orthogonality(x: Tensor) -> float:
    """The largest ‖XᴴX − I‖_F of a batch of matrices, computed in double precision."""
    x = x.detach().to(torch.complex128 if x.is_complex() else torch.float64)
    gram = x.mH @ x
    return float(torch.linalg.matrix_norm(gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).max())


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are written with three significant digits."""

    def cell(value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.3g}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.1e}"

    lines = [header, ["---"] * len(header), *([cell(v) for v in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(name: str, rows: Sequence[Mapping[str, Any]], report: str, **settings: object) -> None:
    """Write ``runs/benchmarks/<name>``: the rows as .csv, with versions and settings as .json, the report as .md."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    document = {"environment": environment(), "settings": settings, "rows": list(rows)}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(report + "\n", encoding="utf-8")
    print(f"\nwritten: {RESULTS.relative_to(RESULTS.parents[1])}/{name}.csv, .json, .md")
