"""SPD networks: covariance matrices, classified by layers that keep them positive definite (Huang, Van Gool, 2017).

``python examples/spd_net.py`` takes region covariances of scikit-learn's digits in 5 random folds. ``--data FOLDER``
takes the EMG recording of geomstats 2.8.0 (``emg.csv``, hand gestures, 8 channels, windows of 200 samples) and leaves
one session out at a time. Methods:

* ``log-Euclidean``: logistic regression on log X as a vector (Arsigny et al., 2006), its penalty by cross-validation;
* ``SPD net``: BiMap, SPDBatchNorm, ReEig for each of ``--sizes``, then LogEig and Linear, by RiemannianAdam;
* ``frozen BiMap``: the same with random BiMap weights that stay as they are.

Rate and penalty are chosen without the test fold: networks train for ``--epochs``, with a rate that falls along half a
cosine from the one of ``--lr`` that is best in the next fold, when that is left out too. But default sizes and rates
were set after tests on the first fold of the digits and the second session of the EMG, which favours the networks.

The table has the accuracy in every fold, results.json all predictions, confusion.png those of the SPD net.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from harness.cli import new_folder, positive
from harness.covariances import METHODS, Covariances, baseline, draw, load, table
from torch import Tensor, nn
from tqdm import tqdm

from manopt_torch import max_residual, param_groups
from manopt_torch.nn import BiMap, LogEig, ReEig, SPDBatchNorm
from manopt_torch.optim import RiemannianAdam

SMOKE = {"epochs": 1, "folds": 3, "sizes": [4], "first": 120}
#: settings that a resumed run may have of its own
FREE = {"resume", "out"}


def network(n: int, sizes: list[int], classes: int, iterations: int) -> nn.Sequential:
    """(B, n, n) -> (B, classes)."""
    layers: list[nn.Module] = []
    for before, after in zip([n, *sizes], sizes, strict=False):
        layers += [BiMap(before, after), SPDBatchNorm(after, iterations=iterations), ReEig()]
    vector = sizes[-1] * (sizes[-1] + 1) // 2
    return nn.Sequential(*layers, LogEig(vectorize=True), nn.Linear(vector, classes))


def train(data: Covariances, rows: Tensor, frozen: bool, lr: float, args: argparse.Namespace) -> nn.Module:
    """A network trained on the matrices that ``rows`` (a mask) tells."""
    torch.manual_seed(args.seed)
    model = network(data.x.shape[-1], args.sizes, len(data.classes), args.iterations)
    for layer in model:
        if frozen and isinstance(layer, BiMap):
            layer.requires_grad_(False)
    optimizer = RiemannianAdam(param_groups(model), lr=lr)
    x, y = data.x[rows], data.y[rows]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * -(-len(x) // args.batch))
    for _ in tqdm(range(args.epochs), desc=f"rate {lr:g}", leave=False, disable=None):
        for batch in torch.randperm(len(x)).split(args.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def predict(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(-1)


def rate(data: Covariances, fold: int, frozen: bool, args: argparse.Namespace) -> float:
    """The one of ``--lr`` that is best in the fold after ``fold``, trained on what is left."""
    validation = data.fold == (fold + 1) % len(data.folds)
    accuracies = []
    for lr in args.lr if len(args.lr) > 1 else []:
        model = train(data, ~validation & (data.fold != fold), frozen, lr, args)
        accuracies.append((predict(model, data.x[validation]) == data.y[validation]).double().mean().item())
    return args.lr[accuracies.index(max(accuracies))] if accuracies else args.lr[0]


def evaluate(data: Covariances, fold: int, args: argparse.Namespace) -> dict[str, Any]:
    """What each method found in one fold."""
    test = data.fold == fold
    found: dict[str, Any] = {}
    for method in METHODS:
        start = time.perf_counter()
        if method == METHODS[0]:
            result = {"predictions": baseline(data, test).tolist(), "residual": 0.0}
        else:
            frozen = method == METHODS[2]
            lr = rate(data, fold, frozen, args)
            model = train(data, ~test, frozen, lr, args)
            result = {"predictions": predict(model, data.x[test]).tolist(), "residual": max_residual(model), "lr": lr}
        accuracy = (torch.tensor(result["predictions"]) == data.y[test]).double().mean().item()
        found[method] = {**result, "accuracy": accuracy, "seconds": time.perf_counter() - start}
    return found


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Command line: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="where emg.csv is (without it, scikit-learn's digits)")
    add("--sizes", type=positive, nargs="+", default=[8], metavar="n", help="of matrices after BiMaps (%(default)s)")
    add("--epochs", type=positive, default=10, help="(%(default)s)")
    add("--batch", type=positive, default=64, help="matrices per step (%(default)s)")
    add("--lr", type=float, nargs="+", default=[1e-2, 1e-1], metavar="RATE", help="of which one is taken (%(default)s)")
    add("--iterations", type=positive, default=2, help="of the mean in SPDBatchNorm (%(default)s)")
    add("--folds", type=positive, default=5, help="of the digits (%(default)s)")
    add("--first", type=positive, help="so many matrices only, of those drawn at random")
    add("--seed", type=int, default=0, help="of folds, initial values and batches (%(default)s)")
    add("--threads", type=positive, default=1, help="of torch (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="continue the run in --out with the folds that are missing")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, argparse.Namespace(**SMOKE))
    torch.set_num_threads(args.threads)
    out = args.out or new_folder(Path("runs") / "spd_net")
    file, settings = out / "results.json", {k: str(v) for k, v in vars(args).items() if k not in FREE}
    if file.exists() != args.resume or (args.resume and json.loads(file.read_text())["settings"] != settings):
        parser.error(f"{out}: --resume goes on with a run of the same settings; a new one needs a folder of its own")
    out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = json.loads(file.read_text())["folds"] if args.resume else []
    data = load(args.data, args.seed, args.folds)
    if args.first:
        chosen = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(args.seed))[: args.first]
        data = data._replace(x=data.x[chosen], y=data.y[chosen], fold=data.fold[chosen])
    for fold in tqdm(range(len(done), len(data.folds)), desc=data.name, disable=None):
        done.append(evaluate(data, fold, args))
        file.with_suffix(".new").write_text(json.dumps({"settings": settings, "folds": done}))
        file.with_suffix(".new").replace(file)
        tqdm.write(f"{data.folds[fold]}: " + ", ".join(f"{m} {done[-1][m]['accuracy']:.3f}" for m in METHODS))
    lines = table(data, done)
    print(*lines, sep="\n")
    (out / "results.md").write_text("\n".join([*lines, ""]))
    predictions = torch.zeros_like(data.y)
    for fold, found in enumerate(done):
        predictions[data.fold == fold] = torch.tensor(found["SPD net"]["predictions"])
    draw(data, predictions, out / "confusion.png")
    print(f"table and picture in {out}")
    return done


if __name__ == "__main__":
    main()
