"""Regression by TruG-TGGMs, truncation points fixed and learned, beside ridge regression and a ReLU network.

``python examples/trug_tggm.py`` learns scikit-learn's diabetes on 20 random splits; ``--data FILE`` takes a .csv file
whose last column is the target (the first of protein-structure, 5 splits; the last two of naval-propulsion). Of each
split 10% are the test set and 10% of the rest choose rate and epoch; x and y are standardised without the test set.
Methods: ridge regression, its penalty by leave-one-out; ``MLP``, Linear, ReLU, Linear of the same size by
back-propagation; ``original``, the TGGM of Su, Liao, Chen and Carin (2016), h in [0, ∞); ``fixed``, TruG units on
[--lower, --upper]; ``shared`` and ``unit``, where that is learned, one pair of ends for all units or one for each, with
steps of a fifth (Su, Liao and Carin, 2017).

The table has the RMSE on the test sets in the units of y, mean and standard error over splits, and the mean distance of
learned ends from where they began. Below, learned against fixed ends in pairs: splits overlap, so that the t interval,
which takes them to be independent, is too narrow.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.cli import new_folder, positive
from harness.regression import SPLITS, Parts, Result, draw, moved, paired, read_table, ridge, rmse, split
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from tqdm import tqdm

from manopt_torch.stochastic import TruGTGGM

VARIANTS: dict[str, dict[str, Any]] = {
    "original": {"lower": 0.0, "upper": math.inf, "learn": None},
    "fixed": {"learn": None},
    "shared": {"learn": "shared"},
    "unit": {"learn": "unit"},
}
METHODS = ("ridge", "MLP", *VARIANTS)
#: of the mean-field equations in training: the error is far below that of a mini-batch
TOLERANCE = 1e-3
#: how often the validation rows are looked at
CHECKS = 25
SMOKE = {"hidden": 3, "steps": 4, "splits": 2, "lr": [0.01]}
#: settings that a resumed run may change
FREE = {"resume", "out", "splits"}
HEAD = f"| method | RMSE | s.e. | ξ₁ moved | ξ₂ moved | minutes per split |\n|{' --- |' * 6}"


def train(
    make: Callable[[], nn.Module],
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    parts: Parts,
    args: argparse.Namespace,
    title: str,
) -> nn.Module:
    """Adam with every rate, falling along half a cosine; the network as it was when validation was best."""
    least, best, (x, y) = math.inf, make(), parts.train
    for lr in args.lr:
        torch.manual_seed(args.seed)
        model = make()
        ends = [p for name, p in model.named_parameters() if name.startswith("units.")]
        others = [p for name, p in model.named_parameters() if not name.startswith("units.")]
        optimizer = torch.optim.Adam([{"params": others}, {"params": ends, "lr": lr / 5}], lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        rows: list[Tensor] = []
        for step in tqdm(range(1, args.steps + 1), desc=f"{title}, rate {lr:g}", leave=False, disable=None):
            rows = rows or list(torch.randperm(len(x)).split(args.batch))
            batch = rows.pop()
            optimizer.zero_grad()
            loss(model, x[batch], y[batch]).backward()
            optimizer.step()
            schedule.step()
            if step % max(1, args.steps // CHECKS) == 0:
                with torch.no_grad():
                    error = rmse(model(parts.validation[0]), parts.validation, parts.scale)
                if error < least:
                    least, best = error, copy.deepcopy(model)
    return best


def evaluate(method: str, parts: Parts, args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Error on the test set, how far learned ends went, the ends, minutes."""
    start, (dx, D) = time.perf_counter(), (parts.train[0].shape[1], parts.train[1].shape[1])
    if method == "ridge":
        error = ridge(parts)
        return {"error": error, "moved": [], "ends": [], "minutes": (time.perf_counter() - start) / 60}
    if method == "MLP":
        model = train(
            lambda: nn.Sequential(nn.Linear(dx, args.hidden), nn.ReLU(), nn.Linear(args.hidden, D)),
            lambda model, x, y: mse_loss(model(x), y),
            parts, args, title,
        )  # fmt: skip
    else:
        settings = {"lower": args.lower, "upper": args.upper, "sigma2": args.sigma2, **VARIANTS[method]}
        model = train(
            lambda: TruGTGGM(dx, args.hidden, D, **settings),
            lambda model, x, y: -model.elbo(x, y, tolerance=TOLERANCE).mean(),
            parts, args, title,
        )  # fmt: skip
    with torch.no_grad():
        error = rmse(model(parts.test[0]), parts.test, parts.scale)
    way, ends = [], []
    if isinstance(model, TruGTGGM):
        way = moved(model.units) if model.units.learn else []
        ends = [end.expand(args.hidden).tolist() for end in model.units.truncation_points()]
    return {"error": error, "moved": way, "ends": ends, "minutes": (time.perf_counter() - start) / 60}


def main(argv: list[str] | None = None) -> list[Result]:
    """Command line: see ``--help``. Returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help=".csv (scikit-learn's diabetes)")
    add("--method", nargs="+", choices=METHODS, default=list(METHODS), help="(all)")
    add("--splits", type=positive, help="(20; 5 of protein-structure)")
    add("--hidden", type=positive, default=50, help="units (%(default)s)")
    add("--steps", type=positive, default=1000, help="of Adam, at most (%(default)s)")
    add("--batch", type=positive, default=50, help="rows of each (%(default)s)")
    add("--lr", type=float, nargs="+", default=[0.01], help="rates to choose from (%(default)s)")
    add("--lower", type=float, default=-1.0, help="ξ₁ at first (%(default)s)")
    add("--upper", type=float, default=1.0, help="ξ₂ at first (%(default)s)")
    add("--sigma2", type=float, default=0.2, help="σ² (%(default)s)")
    add("--seed", type=int, default=0, help="of splits, initial values and batches (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="go on with the run in --out, after its last whole split")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, argparse.Namespace(**SMOKE))
    table = read_table(args.data)
    out = args.out or new_folder(Path("runs") / "trug_tggm")
    settings = {name: str(value) for name, value in vars(args).items() if name not in FREE}
    file = out / "splits.json"
    if file.exists() != args.resume or (args.resume and json.loads(file.read_text())["settings"] != settings):
        parser.error(f"{out}: --resume goes on with a run of the same settings; a new one needs a folder of its own")
    out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = json.loads(file.read_text())["splits"] if args.resume else []
    count, methods = args.splits or SPLITS.get(table.name, 20), [m for m in METHODS if m in args.method]
    for index in tqdm(range(len(done), count), desc=table.name, disable=None):
        parts = split(table, args.seed, index)
        found = {method: evaluate(method, parts, args, f"split {index}, {method}") for method in methods}
        done.append(found)
        file.with_suffix(".new").write_text(json.dumps({"settings": settings, "splits": done}))
        file.with_suffix(".new").replace(file)
        tqdm.write(f"split {index}: " + ", ".join(f"{m} {found[m]['error']:.4g}" for m in methods))
    results = [
        Result(
            m,
            [d[m]["error"] for d in done],
            [d[m]["moved"] for d in done],
            sum(d[m]["minutes"] for d in done) / len(done),
        )
        for m in methods
    ]
    lines = [HEAD, *(r.row() for r in results)]
    errors = {r.name: r.errors for r in results}
    lines += ["", *(paired(m, errors[m], errors["fixed"]) for m in ("shared", "unit") if {m, "fixed"} <= {*methods})]
    print("\n".join(lines))
    (out / "results.md").write_text("\n".join([*lines, ""]))
    ends = {m: done[-1][m]["ends"] for m in methods if done[-1][m]["ends"]}
    draw(results, ends, args.sigma2, f"{table.name}, {len(done)} splits", out / "errors.png")
    print(f"table and picture in {out}")
    return results


if __name__ == "__main__":
    main()
