"""Pictures of a run, drawn without a display."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray


def learning_curve(logs: Path, picture: Path) -> None:
    """Loss of training and validation, and validation accuracy, over epochs.

    ``logs`` is the folder of Lightning's CSV logs; a resumed run has several versions in it, of which the last counts.
    """
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for version in sorted(logs.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        with version.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("epoch", "step"):
                        curves[name][int(row["epoch"])] = float(value)
    figure = Figure(figsize=(7, 4), layout="constrained")
    loss = figure.subplots()
    accuracy = loss.twinx()
    for axes, name, label, style in (
        (loss, "train_loss", "training loss", "C0-"),
        (loss, "val_loss", "validation loss", "C1-"),
        (accuracy, "val_accuracy", "validation accuracy", "C2--"),
    ):
        axes.plot([epoch + 1 for epoch in curves[name]], list(curves[name].values()), style, label=label)
    loss.set(xlabel="epoch", ylabel="cross-entropy", ylim=(0, None))
    accuracy.set(ylabel="accuracy", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=3)
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
