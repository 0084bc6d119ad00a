"""Handwritten digits read pixel by pixel by a full-capacity unitary RNN, its recurrence optimized on U(N).

``python examples/sequential_digits.py`` trains on scikit-learn's bundled digits (64 steps) and writes its logs,
checkpoints and pictures to a new folder under runs/sequential_digits. ``--data FOLDER`` reads MNIST's idx files.
``--study`` asks whether the recurrence is really learned: with W frozen at the identity, the network is a set of units
that do not see each other, and everything else trains as before.

Le, Jaitly and Hinton, 2015 (pixel by pixel); Wisdom et al., 2016 (full-capacity unitary RNN).
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from harness.cli import run_folder, settled, training_parser
from harness.data import load_sequences, loader
from harness.plots import confusion_matrix, learning_curve
from harness.training import cosine, fit, make_optimizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from manopt_torch import max_residual
from manopt_torch.nn import RealReadout, UnitaryRNN

SEEDS = range(5)


class Classifier(L.LightningModule):
    """Class scores (B, classes) from the last state of a unitary RNN, for sequences (B, T, 1)."""

    def __init__(self, args: Namespace, classes: int) -> None:
        super().__init__()
        self.args = args
        self.rnn = UnitaryRNN(1, args.hidden, batch_first=True, init=args.init)
        self.readout = RealReadout(args.hidden, classes)
        self.rnn.weight_hh.requires_grad_(not args.freeze_recurrence)
        self.predicted: list[Tensor] = []

    def forward(self, pixels: Tensor) -> Tensor:
        _, last = self.rnn(pixels)
        return self.readout(last[0])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        pixels, labels = batch
        loss = F.cross_entropy(self(pixels), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        pixels, labels = batch
        scores = self(pixels)
        accuracy = (scores.argmax(-1) == labels).float().mean()
        self.log_dict({"val_loss": F.cross_entropy(scores, labels), "val_accuracy": accuracy}, prog_bar=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.predicted.append(self(batch[0]).argmax(-1))

    def configure_optimizers(self) -> Any:
        args = self.args
        optimizer = make_optimizer(self, args.optimizer, args.lr, args.lr_manifold, args.frame)
        return cosine(optimizer, int(self.trainer.estimated_stepping_batches))


def run(args: Namespace) -> dict[str, Any]:
    """Train, then read the test set once, with the parameters that were best in validation."""
    start = time.perf_counter()
    out = run_folder(args.out, args.resume, "sequential_digits")
    args = settled(args, out)
    data = load_sequences(args.data, args.seed)
    torch.set_num_threads(args.threads)
    L.seed_everything(args.seed, workers=True, verbose=False)
    model = Classifier(args, data.classes)
    trainer = fit(model, loader(data.train, args.batch, args.seed), loader(data.validation, 500), args, out)
    trainer.test(
        model, loader(data.test, 500), ckpt_path=out / "checkpoints" / "best.ckpt", verbose=False, weights_only=True
    )
    labels, predictions = data.test.tensors[1], torch.cat(model.predicted)
    learning_curve(out / "csv", out / "learning_curve.png")
    confusion_matrix(labels.numpy(), predictions.numpy(), data.classes, out / "confusion.png")
    return {
        "accuracy": (labels == predictions).float().mean().item(),
        "residual": max_residual(model),
        "epochs": trainer.current_epoch,
        "seconds": time.perf_counter() - start,
        "out": out,
    }


def logistic_regression(args: Namespace) -> dict[str, float]:
    """A linear classifier that sees all pixels at once, on the same split."""
    start = time.perf_counter()
    data = load_sequences(args.data, args.seed)
    (x, y), (x_test, y_test) = ((p.flatten(1).numpy(), c.numpy()) for p, c in (data.train.tensors, data.test.tensors))
    accuracy = LogisticRegression(max_iter=2000).fit(x, y).score(x_test, y_test)
    return {"accuracy": accuracy, "seconds": time.perf_counter() - start}


def study(args: Namespace) -> None:
    """Five seeds each from the identity and from Haar, W trained and frozen; a table, printed and in study.md."""
    out = run_folder(args.out, False, "sequential_digits_study")
    columns = ["test accuracy, seed", *map(str, SEEDS), "mean", "residual", "epochs", "s per run"]
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    print(*table, sep="\n", flush=True)
    variants = {f"W from {i}, {f}": (i, f) for i in ("identity", "haar") for f in ("trained", "frozen")}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        rows = {}
        for name, (init, state) in variants.items():
            given = {**vars(args), "init": init, "freeze_recurrence": state == "frozen"}
            runs = [Namespace(**{**given, "seed": s, "out": out / f"{init}-{state}-{s}"}) for s in SEEDS]
            rows[name] = pool.map(run, runs)
        rows["logistic regression"] = pool.map(logistic_regression, [Namespace(data=args.data, seed=s) for s in SEEDS])
        for name, results in rows.items():
            table.append(_row(name, list(results)))
            print(table[-1], flush=True)
    (out / "study.md").write_text("\n".join(table) + "\n")
    print(f"table in {out / 'study.md'}")


def _row(name: str, results: list[dict[str, float]]) -> str:
    accuracies = [result["accuracy"] for result in results]
    cells = [name, *(f"{a:.3f}" for a in accuracies), f"{statistics.mean(accuracies):.3f}"]
    cells.append(f"{max(r['residual'] for r in results):.1e}" if "residual" in results[0] else "")
    cells.append(f"{statistics.mean(r['epochs'] for r in results):.0f}" if "epochs" in results[0] else "")
    return f"| {' | '.join(cells)} | {statistics.mean(r['seconds'] for r in results):.1f} |"


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = training_parser(__doc__, lr=2e-3, epochs=60, batch=50)
    parser.add_argument("--hidden", type=int, default=64, help="units N (%(default)s)")
    parser.add_argument(
        "--init", default="identity", choices=("identity", "haar"), help="what W starts from (identity)"
    )
    parser.add_argument("--freeze-recurrence", action="store_true", help="keep W as it starts")
    parser.add_argument("--study", action="store_true", help="five seeds, W trained and frozen; a table")
    parser.add_argument("--jobs", type=int, default=2, help="processes of --study (%(default)s)")
    args = parser.parse_args(argv)
    if args.study:
        if args.resume or args.freeze_recurrence:
            parser.error("--study starts all its runs anew, trained and frozen")
        return study(args)
    result = run(args)
    print(
        f"test accuracy {result['accuracy']:.4f}, residual of W {result['residual']:.1e}, {result['epochs']} epochs in "
        f"{result['seconds']:.0f} s; logs, checkpoints and pictures in {result['out']}"
    )


if __name__ == "__main__":
    main()
