"""The adding problem: the sum of the two numbers that are marked in a long sequence of numbers.

``python examples/adding.py --length T`` trains a full-capacity unitary RNN, and writes logs, checkpoints and the
learning curve to a new folder under runs/adding. A network that always answers 1 has the mean squared error 1/6, the
variance of a sum of two numbers.

Hochreiter and Schmidhuber, 1997; Arjovsky, Shah and Bengio, 2016 (T = 100, 200, 400 and 750).
"""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from harness.cli import at_least, parse, positive, training_parser
from harness.data import TEST, VALIDATION, fresh, generated
from harness.models import MODELS, STARTS, SequenceModel, count_parameters, paper_size
from harness.plots import learning_curve
from harness.study import study
from harness.training import Sequences, fit, health, outcome
from torch import Tensor

#: mean squared error of the best constant, 1: the variance of a sum of two numbers uniform on [0, 1]
BASELINE = 1 / 6
SEEDS = range(3)
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "length": 750, "iterations": 10000, "batch": 50, "init": "restricted",
        "optimizer": "paper", "lr": 1e-3, "lr_manifold": 2e-3, "schedule": "constant",
    },
    "smoke": {"length": 10, "hidden": 6, "iterations": 4, "every": 2, "batch": 3, "fresh": 20},
}  # fmt: skip


def adding_task(length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (batch, T, 2), numbers uniform on [0, 1] and marks, one in each half; targets (batch, 1), the sum."""
    numbers = torch.rand(batch, length, generator=generator)
    half = length // 2
    first = torch.randint(half, (batch, 1), generator=generator)
    second = torch.randint(half, length, (batch, 1), generator=generator)
    marked = torch.cat([first, second], 1)
    marks = torch.zeros(batch, length).scatter_(1, marked, 1.0)
    return torch.stack([numbers, marks], -1), numbers.gather(1, marked).sum(1, keepdim=True)


class Adding(Sequences):
    """Mean squared error of the last output."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args, SequenceModel(args.model, 2, args.hidden, 1, start=args.init, last=True))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}


def run(args: Namespace) -> dict[str, Any]:
    """Train, then measure the error on fresh sequences."""
    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    L.seed_everything(args.seed, workers=True, verbose=False)
    task, draw = Adding(args), functools.partial(adding_task, args.length)
    train = generated(draw, args.batch, args.seed, every=args.every, epochs=args.epochs)
    trainer = fit(task, train, fresh(draw, 200, 100, args.seed, VALIDATION), args)
    result = {**task.evaluate(fresh(draw, args.fresh, 100, args.seed, TEST)), **outcome(trainer, task, start)}
    curve = {"loss": "mean squared error", "score": None, "every": args.every, "baseline": ("always 1", BASELINE)}
    learning_curve(result["out"] / "csv", result["out"] / "learning_curve.png", **curve)
    return {**result, "score": result["loss"], "parameters": count_parameters(task)}


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = training_parser("adding", __doc__, lr=2e-3, lr_manifold=2e-4, batch=50, iterations=4000)
    parser.add_argument("--length", type=at_least(2), default=100, metavar="T", help="steps (%(default)s)")
    parser.add_argument("--model", default="full", choices=MODELS, help="(%(default)s)")
    parser.add_argument("--hidden", type=positive, help="units N (the paper's, by model)")
    parser.add_argument("--init", default="henaff", choices=STARTS, help="start of W, full and frozen (%(default)s)")
    parser.add_argument("--fresh", type=positive, default=1000, help="sequences of the result (%(default)s)")
    parser.add_argument("--study", action="store_true", help="all models, three seeds each; a table of their errors")
    parser.add_argument("--jobs", type=positive, default=2, help="processes of --study (%(default)s)")
    args = parse(parser, argv, PRESETS)
    if args.study:
        variants = {name: {"model": name, "hidden": args.hidden or paper_size("adding", name)} for name in MODELS}
        return study(args, f"mean squared error, T = {args.length}", SEEDS, run, variants)
    args.hidden = args.hidden or paper_size("adding", args.model)
    result = run(args)
    print(
        f"mean squared error {result['loss']:.2e} on {args.fresh} fresh sequences after {result['steps']} iterations "
        f"of batch {args.batch}; always 1 has {BASELINE:.3f}\n{args.model}, N = {args.hidden}, {result['parameters']} "
        f"parameters, {health(result)}, {result['seconds']:.0f} s; logs, checkpoints and picture in {result['out']}"
    )


if __name__ == "__main__":
    main()
