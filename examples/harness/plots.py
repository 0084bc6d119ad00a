"""Pictures of a run, drawn without a display."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray


def read_logs(logs: Path) -> dict[str, dict[int, float]]:
    """Every logged quantity by epoch.

    ``logs`` is the folder of Lightning's CSV logs; a resumed run has several versions in it, of which the last counts.
    """
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for version in sorted(logs.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        with version.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("epoch", "step"):
                        curves[name][int(row["epoch"])] = float(value)
    return curves


def learning_curve(
    logs: Path,
    picture: Path,
    *,
    loss: str = "cross-entropy",
    score: str | None = "accuracy",
    every: int | None = None,
    baseline: tuple[str, float] | None = None,
) -> None:
    """Loss of training and validation, and the validation ``score`` if there is one, over epochs.

    Over iterations if an epoch has ``every`` of them. ``baseline``, a name and a loss, is drawn as a dotted line,
    and the losses on a logarithmic scale.
    """
    curves = read_logs(logs)
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    drawn = [(left, "train_loss", "training loss", "C0-"), (left, "val_loss", "validation loss", "C1-")]
    if score:
        right = left.twinx()
        right.set(ylabel=score, ylim=(0, 1.05))
        drawn.append((right, f"val_{score}", f"validation {score}", "C2--"))
    for axes, name, label, style in drawn:
        x = [(epoch + 1) * (every or 1) for epoch in curves[name]]
        axes.plot(x, list(curves[name].values()), style, label=label)
    left.set(xlabel="iterations" if every else "epoch", ylabel=loss)
    if baseline:
        left.axhline(baseline[1], color="0.3", linestyle=":", label=baseline[0])
        left.set_yscale("log")
    else:
        left.set_ylim(0, None)
    left.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=2 if baseline else 3)
    figure.savefig(picture, dpi=120)


def confusion_matrix(
    labels: NDArray[np.integer], predictions: NDArray[np.integer], classes: int, picture: Path
) -> None:
    """Counts of (label, prediction), rows are labels."""
    counts = np.zeros((classes, classes), dtype=int)
    np.add.at(counts, (labels, predictions), 1)
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(counts, cmap="Blues")
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if count > counts.max() / 2 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color)
    axes.set(xlabel="prediction", ylabel="label", xticks=range(classes), yticks=range(classes))
    axes.set_title(f"test accuracy {counts.trace() / counts.sum():.3f}")
    figure.savefig(picture, dpi=120)


def draw_lines(curves: Mapping[str, Sequence[tuple[float, float]]], picture: Path, *, xlabel: str, ylabel: str) -> None:
    """Each curve, pairs (x, y), under its name, y on a logarithmic scale."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
