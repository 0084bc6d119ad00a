"""Several runs of one experiment as a table."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Run = Callable[[Namespace], dict[str, Any]]


def study(
    args: Namespace,
    score: str,
    seeds: Iterable[int],
    run: Run,
    variants: Mapping[str, dict[str, Any]],
    others: Mapping[str, Run] | None = None,
) -> None:
    """``run`` each of the ``variants`` of ``args``, and the ``others``, with every seed: a table, kept in study.md.

    A run's ``"score"`` is in the table by seed, of its other results the worst residual, and the mean of epochs and
    seconds. ``args.jobs`` processes run at a time.
    """
    seeds = list(seeds)
    out = args.out or Path("runs") / f"{args.experiment}_study"
    if (out / "study.md").exists():
        raise SystemExit(f"{out} holds a study already: name another --out")
    columns = [f"{score}, seed", *map(str, seeds), "mean", "residual", "epochs", "s per run"]
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    print(*table, sep="\n", flush=True)
    rows = {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for number, (name, changes) in enumerate(variants.items()):
            given = {**vars(args), **changes}
            folder = changes.get("out", str(number))
            rows[name] = pool.map(run, [Namespace(**{**given, "seed": s, "out": out / f"{folder}-{s}"}) for s in seeds])
        for name, other in (others or {}).items():
            rows[name] = pool.map(other, [Namespace(**{**vars(args), "seed": s}) for s in seeds])
        for name, results in rows.items():
            table.append(_row(name, list(results)))
            print(table[-1], flush=True)
    (out / "study.md").write_text("\n".join(table) + "\n")
    print(f"table in {out / 'study.md'}")


def _row(name: str, results: list[dict[str, Any]]) -> str:
    scores = [result["score"] for result in results]
    cells = [name, *(f"{a:.3f}" for a in scores), f"{statistics.mean(scores):.3f}"]
    cells.append(f"{max(r['residual'] for r in results):.1e}" if "residual" in results[0] else "")
    cells.append(f"{statistics.mean(r['epochs'] for r in results):.0f}" if "epochs" in results[0] else "")
    return f"| {' | '.join(cells)} | {statistics.mean(r['seconds'] for r in results):.1f} |"
