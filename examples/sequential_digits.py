"""Handwritten digits read pixel by pixel by a full-capacity unitary RNN, its recurrence optimized on U(N).

``python examples/sequential_digits.py`` trains on scikit-learn's bundled digits (64 steps) and writes its logs,
checkpoints and pictures to a new folder under runs/sequential_digits. ``--data FOLDER`` reads MNIST's idx files.
``--study`` asks whether the recurrence is really learned: with W frozen at the identity, the network is a set of units
that do not see each other, and everything else trains as before.

Le, Jaitly and Hinton, 2015 (pixel by pixel); Wisdom et al., 2016 (full-capacity unitary RNN).
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from harness.cli import parse, positive, training_parser
from harness.data import Splits, load_sequences, loader
from harness.models import ACTIVATIONS, MODELS, STARTS, SequenceModel, count_parameters, paper_size
from harness.plots import confusion_matrix, learning_curve
from harness.study import study
from harness.training import Sequences, fit, health, outcome
from sklearn.linear_model import LogisticRegression
from torch import Tensor

SEEDS = range(5)
#: seed of the papers' order of pixels (Wisdom et al., 2016, released code)
PERMUTATION = 92916
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "init": "restricted", "optimizer": "paper", "schedule": "constant", "lr": 1e-3, "epochs": 200, "patience": 5
    },
    "smoke": {"hidden": 6, "epochs": 1, "batch": 200, "lr": 0.01},
}  # fmt: skip


class Classifier(Sequences):
    """Class scores (B, classes) from the last state, for sequences (B, T, 1)."""

    def __init__(self, args: Namespace, classes: int) -> None:
        super().__init__(
            args,
            SequenceModel(args.model, 1, args.hidden, classes, start=args.init, last=True, activation=args.activation),
        )
        self.predicted: list[Tensor] = []

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == targets).float().mean()}

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.predicted.append(self(batch[0]).argmax(-1))


def load(args: Namespace) -> Splits:
    """The digits or the set in ``args.data``, its pixels in reading order or permuted; ``SystemExit`` without it."""
    try:
        data = load_sequences(args.data, args.seed)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data {args.data}: {error}") from error
    if args.permuted:
        order = torch.from_numpy(np.random.RandomState(PERMUTATION).permutation(data.steps))
        for part in data[1:]:
            part.tensors = (part.tensors[0][:, order], part.tensors[1])
    return data


def run(args: Namespace) -> dict[str, Any]:
    """Train, then read the test set once, with the parameters that were best in validation."""
    start = time.perf_counter()
    data = load(args)
    torch.set_num_threads(args.threads)
    L.seed_everything(args.seed, workers=True, verbose=False)
    model = Classifier(args, data.classes)
    trainer = fit(model, loader(data.train, args.batch, args.seed), loader(data.validation, 250), args)
    out = Path(trainer.default_root_dir)
    best = out / "checkpoints" / "best.ckpt"
    trainer.test(model, loader(data.test, 250), ckpt_path=best, verbose=False, weights_only=True)
    labels, predictions = data.test.tensors[1], torch.cat(model.predicted)
    learning_curve(out / "csv", out / "learning_curve.png")
    confusion_matrix(labels.numpy(), predictions.numpy(), data.classes, out / "confusion.png")
    accuracy = (labels == predictions).float().mean().item()
    return {**outcome(trainer, model, start), "score": accuracy, "parameters": count_parameters(model)}


def logistic_regression(args: Namespace) -> dict[str, float]:
    """A linear classifier that sees all pixels at once, on the same split."""
    start = time.perf_counter()
    data = load(args)
    (x, y), (x_test, y_test) = ((p.flatten(1).numpy(), c.numpy()) for p, c in (data.train.tensors, data.test.tensors))
    accuracy = LogisticRegression(max_iter=2000).fit(x, y).score(x_test, y_test)
    return {"score": accuracy, "seconds": time.perf_counter() - start}


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = training_parser("sequential_digits", __doc__, lr=2e-3, epochs=60, batch=50)
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="a set in MNIST's format instead of the digits")
    add("--permuted", action="store_true", help="pixels in one random order, the same for all pictures")
    add("--model", default="full", choices=MODELS, help="(%(default)s)")
    add("--hidden", type=positive, help="units N (64; with --paper the paper's, by model)")
    add("--init", default="identity", choices=STARTS, help="what W of full and frozen starts from (identity)")
    add("--activation", default="modrelu", choices=ACTIVATIONS, help="of full and frozen, on the modulus (modrelu)")
    add("--freeze-recurrence", dest="model", action="store_const", const="frozen", help="the same as --model frozen")
    add("--study", action="store_true", help="five seeds, W trained and frozen; a table")
    add("--jobs", type=positive, default=2, help="processes of --study (%(default)s)")
    args = parse(parser, argv, PRESETS)
    args.hidden = args.hidden or (paper_size("sequential_digits", args.model) if args.paper else 64)
    if args.study:
        if args.resume or args.model != "full":
            parser.error("--study starts all its runs anew, trained and frozen")
        variants = {
            f"W from {start}, {state}": {"init": start, "model": model, "out": f"{start}-{state}"}
            for start in ("identity", "haar")
            for state, model in (("trained", "full"), ("frozen", "frozen"))
        }
        return study(args, "test accuracy", SEEDS, run, variants, {"logistic regression": logistic_regression})
    result = run(args)
    print(
        f"test accuracy {result['score']:.4f}, {health(result)}, {result['epochs']} epochs in "
        f"{result['seconds']:.0f} s; {args.model}, N = {args.hidden}, {result['parameters']} parameters; "
        f"logs, checkpoints and pictures in {result['out']}"
    )


if __name__ == "__main__":
    main()
