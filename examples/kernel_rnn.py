"""A Boolean function of the first two bits of a long sequence, learned by a KBRN and by an LSTM.

``python examples/kernel_rnn.py --length 20`` trains both with five seeds for each of ∨, ∧, ⊕ and ≡, and writes a table,
a picture and checkpoints to a new folder under runs/kernel_rnn. All bits after the second are noise. A run ends when
more than 99 % of 10 batches in a row, drawn as it goes, are classified right, each before the step that it makes. The
KBRN (:class:`manopt_torch.nn.KernelRNN`, |a − c| kernels) sees batch statistics, as in the paper; the table shows what
becomes of it with the running ones. The LSTM has torch's initial values, and both have a sigmoid read-out and a
squared error. Gradients are clipped to norm 1, which the paper does not say: the KBRN's first large ones else leave
Adam's rates so small that some seeds stay at 75 % (``--clip inf``).

Marra, Zanca, Betti and Gori, 2018 (20 units, 100 centers, Adam with 0.001, batches of 500).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from harness.boolean import FUNCTIONS, MODELS, Cell, Reader, boolean_task, gains, train
from harness.cli import at_least, new_folder, positive
from matplotlib.figure import Figure

#: what a resumed run may change
FREE = ("functions", "length", "models", "seeds", "iterations", "jobs", "flow", "smoke")
COLUMNS = ("function", "T", "model", "iterations by seed", "solved", "median", "fresh", "running", "s per run")

#: function, T and model: a row of the table
Name = tuple[str, int, str]


def row(name: Name, runs: list[dict[str, Any]]) -> str:
    """One line of the table; a run that failed counts as infinitely many iterations."""
    counts = [r["iterations"] if r["solved"] else math.inf for r in runs]
    shown = [f"{c:g}".replace("inf", "-") for c in (*counts, statistics.median_high(counts))]
    means = [f"{statistics.fmean(r[key] for r in runs):.3f}" for key in ("fresh", "running")]
    solved, seconds = f"{sum(r['solved'] for r in runs)} of {len(runs)}", statistics.fmean(r["seconds"] for r in runs)
    return f"| {' | '.join([*map(str, name), ' '.join(shown[:-1]), solved, shown[-1], *means, f'{seconds:.0f}'])} |"


def picture(found: dict[Name, list[dict[str, Any]]], file: Path) -> None:
    """Iterations against T, a panel for each function; a cross is a run that failed."""
    functions = list(dict.fromkeys(name[0] for name in found))
    figure = Figure(figsize=(2.5 + 2.3 * len(functions), 4), layout="constrained")
    panels = figure.subplots(1, len(functions), sharey=True, squeeze=False)[0]
    for (function, length, model), runs in found.items():
        axes, kind = panels[functions.index(function)], MODELS.index(model)
        for solved, marker in ((True, "o"), (False, "x")):
            y = [r["iterations"] for r in runs if r["solved"] == solved]
            label = model.upper() + ("" if solved else ", failed")
            axes.plot([length * (0.97, 1.03)[kind]] * len(y), y, marker, color=f"C{kind}", alpha=0.7, label=label)
        axes.set(title=function, xlabel="T", yscale="log", xscale="log")
        axes.set_xticks(ticks := sorted({name[1] for name in found}), list(map(str, ticks)), minor=False)
        axes.minorticks_off()
    panels[0].set_ylabel("iterations to 99 %")
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=120)


def flow(cells: list[Cell], file: Path) -> None:
    """The product of ``gains`` over the steps so far, of each unit over one sequence, and the median over 200."""
    figure = Figure(figsize=(4.5 * len(cells), 4), layout="constrained")
    for axes, (args, checkpoint, function, length, model, seed) in zip(
        figure.subplots(1, len(cells), squeeze=False)[0], cells, strict=True
    ):
        reader = Reader(model, args.hidden, args.centers)
        reader.load_state_dict(torch.load(checkpoint, weights_only=True)["reader"])
        x, _ = boolean_task(function, length, 200, torch.Generator().manual_seed(seed))
        paths = gains(reader, x).log10().cumsum(0).clamp(min=-40)
        steps = range(1, length + 1)
        axes.plot(steps, paths[:, 0], color="C0", alpha=0.35, linewidth=0.8)
        axes.plot(steps, paths.flatten(1).median(1).values, "k", label="median")
        what = "∏ |f′(a)| of the KBRN" if model == "kbrn" else "∏ forget gate, cell path of the LSTM"
        axes.set(title=f"{function}, {what}", xlabel="step", ylabel="log₁₀ of the product")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> dict[Name, list[dict[str, Any]]]:
    """Command line: see ``--help``. Returns the runs of each row of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), help="(all)")
    add("--length", nargs="+", type=at_least(2), default=[20], metavar="T", help="bits, one or several (%(default)s)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(both)")
    add("--seeds", type=positive, default=5, help="runs of each (%(default)s)")
    add("--iterations", type=positive, default=3000, help="at most (%(default)s)")
    add("--hidden", type=positive, default=20, help="units (%(default)s)")
    add("--centers", type=positive, default=100, help="d of the KBRN (%(default)s)")
    add("--batch", type=positive, default=500, help="sequences per step (%(default)s)")
    add("--lr", type=float, default=1e-3, help="of Adam (%(default)s)")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient; inf: as in the paper (%(default)s)")
    add("--jobs", type=positive, default=1, help="processes (%(default)s)")
    add("--flow", action="store_true", help="also draw what flows back along a sequence, of the first function")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="continue the runs in --out, with more --iterations those that failed")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        small = {"length": [3], "seeds": 2, "iterations": 12, "hidden": 4, "centers": 6, "batch": 20}
        args = parser.parse_args(argv, Namespace(**small))
    kept = args.out / "settings.json" if args.out else None
    if args.resume:
        if kept is None or not kept.is_file():
            raise SystemExit(f"nothing to resume: {kept} does not exist; name the folder of the runs by --out")
        before = json.loads(kept.read_text())
        args = parser.parse_args(argv, Namespace(**before))
        if changed := [name for name in before if name not in FREE and getattr(args, name) != before[name]]:
            parser.error(f"the runs in {args.out} have another {', '.join(changed)}: start new ones")
    elif kept is not None and kept.is_file():
        raise SystemExit(f"{args.out} holds runs already: continue them with --resume, or name another --out")
    out = args.out or new_folder(Path("runs") / "kernel_rnn")
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps({k: v for k, v in vars(args).items() if k not in ("resume", "out")}))
    names = list(itertools.product(args.functions, args.length, args.models))
    cells = {n: [Cell(args, out / f"{n[0]}-{n[1]}-{n[2]}-{s}.pt", *n, s) for s in range(args.seeds)] for n in names}
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    print(*table, sep="\n", flush=True)
    found: dict[Name, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        runner = map if args.jobs == 1 else pool.map  # a pool that is not used starts no process
        running = {name: runner(train, own) for name, own in cells.items()}
        for name, results in running.items():
            found[name] = list(results)
            table.append(row(name, found[name]))
            print(table[-1], flush=True)
    (out / "table.md").write_text("\n".join(table) + "\n")
    picture(found, out / "iterations.png")
    if args.flow:
        flow([cells[name][0] for name in names if name[:2] == names[0][:2]], out / "flow.png")
    print(f"table, pictures and checkpoints in {out}")
    return found


if __name__ == "__main__":
    main()
