"""The copy-memory task: ten symbols, a long silence, a signal, and the ten symbols again.

``python examples/copy_memory.py --delay T`` trains a full-capacity unitary RNN until it recalls 99.9 % of the symbols
of 1,000 fresh sequences, and writes logs, checkpoints and the learning curve to a new folder under runs/copy_memory.
A network without memory answers blanks and then guesses: its cross-entropy is 10 ln 8 / (T + 20).

Hochreiter and Schmidhuber, 1997; Arjovsky, Shah and Bengio, 2016; Wisdom et al., 2016 (T = 1000 and 2000).
"""

from __future__ import annotations

import functools
import math
import time
from argparse import Namespace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from harness.cli import parse, positive, training_parser
from harness.data import CONFIRMATION, TEST, VALIDATION, fresh, generated
from harness.models import MODELS, STARTS, SequenceModel, count_parameters, paper_size
from harness.plots import learning_curve
from harness.study import study
from harness.training import Sequences, fit, health, outcome
from torch import Tensor

#: symbols to recall, kinds of symbols; blank is 0, the symbols 1 to 8, the delimiter 9
SYMBOLS, KINDS = 10, 8
#: recall of fresh sequences at which training stops: others are then recalled to 99.9 % too
SOLVED = 0.9998
SEEDS = range(3)
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"delay": 1000, "iterations": 5000, "batch": 20, "optimizer": "paper", "schedule": "constant"},
    "smoke": {"delay": 5, "hidden": 6, "iterations": 4, "every": 2, "batch": 3, "fresh": 20},
}


def copy_task(delay: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (batch, T + 20, 10), one-hot: 10 symbols, T − 1 blanks, the delimiter, 10 blanks; targets (batch, T + 20):

    T + 10 blanks and the 10 symbols.
    """
    symbols = torch.randint(1, KINDS + 1, (batch, SYMBOLS), generator=generator)
    inputs = torch.zeros(batch, delay + 2 * SYMBOLS, dtype=torch.int64)
    inputs[:, :SYMBOLS] = symbols
    inputs[:, SYMBOLS + delay - 1] = KINDS + 1
    targets = torch.zeros_like(inputs)
    targets[:, -SYMBOLS:] = symbols
    return F.one_hot(inputs, KINDS + 2).float(), targets


def baseline(delay: int) -> float:
    """Cross-entropy of a network without memory, a mean over all steps."""
    return SYMBOLS * math.log(KINDS) / (delay + 2 * SYMBOLS)


def validated_every(delay: int) -> int:
    """Iterations between two validations: short delays are learned in a few dozen."""
    return min(100, max(10, delay // 5))


class CopyMemory(Sequences):
    """Cross-entropy over all T + 20 steps; the recall of the ten symbols."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args, SequenceModel(args.model, KINDS + 2, args.hidden, KINDS + 1, start=args.init))
        self.draw = functools.partial(copy_task, args.delay)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        last = slice(-SYMBOLS, None)
        return {"recall": (outputs[:, last].argmax(-1) == targets[:, last]).float().mean()}

    def on_validation_epoch_end(self) -> None:
        if self.trainer.callback_metrics["val_recall"] >= SOLVED:
            self.trainer.should_stop = self.on_fresh(CONFIRMATION)["recall"] >= SOLVED

    def on_fresh(self, stream: int) -> dict[str, float]:
        """Recall and cross-entropy on ``args.fresh`` sequences that neither training nor validation has seen."""
        return self.evaluate(fresh(self.draw, self.args.fresh, 100, self.args.seed, stream))


def run(args: Namespace) -> dict[str, Any]:
    """Train, then count what the network recalls of fresh sequences."""
    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    L.seed_everything(args.seed, workers=True, verbose=False)
    task = CopyMemory(args)
    train = generated(task.draw, args.batch, args.seed, every=args.every, epochs=args.epochs)
    trainer = fit(task, train, fresh(task.draw, 100, 100, args.seed, VALIDATION), args)
    result = {**task.on_fresh(TEST), **outcome(trainer, task, start), "parameters": count_parameters(task)}
    line = ("no memory, 10 ln 8 / (T + 20)", baseline(args.delay))
    out = result["out"]
    learning_curve(out / "csv", out / "learning_curve.png", score="recall", every=args.every, baseline=line)
    return {**result, "score": result["recall"]}


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = training_parser(
        "copy_memory", __doc__, lr=1e-3, batch=20, iterations=2000, every=None, optimizer="paper", schedule="constant"
    )
    parser.add_argument("--delay", type=positive, default=200, metavar="T", help="steps of silence (%(default)s)")
    parser.add_argument("--model", default="full", choices=MODELS, help="(%(default)s)")
    parser.add_argument("--hidden", type=positive, help="units N (the paper's, by model)")
    parser.add_argument(
        "--init", default="restricted", choices=STARTS, help="start of W, full and frozen (%(default)s)"
    )
    parser.add_argument("--fresh", type=positive, default=1000, help="sequences of the final count (%(default)s)")
    parser.add_argument("--study", action="store_true", help="all models, three seeds each; a table of their recall")
    parser.add_argument("--jobs", type=positive, default=2, help="processes of --study (%(default)s)")
    args = parse(parser, argv, PRESETS, every=lambda args: validated_every(args.delay))
    if args.study:
        variants = {name: {"model": name, "hidden": args.hidden or paper_size("copy_memory", name)} for name in MODELS}
        return study(args, f"recall, T = {args.delay}", SEEDS, run, variants)
    args.hidden = args.hidden or paper_size("copy_memory", args.model)
    result = run(args)
    print(
        f"recall {result['recall']:.4f} and cross-entropy {result['loss']:.2e} on {args.fresh} fresh sequences after "
        f"{result['steps']} iterations of batch {args.batch}; without memory {baseline(args.delay):.2e}\n"
        f"{args.model}, N = {args.hidden}, {result['parameters']} parameters, {health(result)}, "
        f"{result['seconds']:.0f} s; logs, checkpoints and picture in {result['out']}"
    )


if __name__ == "__main__":
    main()
