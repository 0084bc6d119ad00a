"""Covariance matrices with labels and folds: regions of scikit-learn's digits, and windows of an EMG recording."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from harness.plots import confusion_matrix
from manopt_torch import nn as manifold_nn

#: samples of a window of the EMG, and the share of the mean variance added to the diagonal of all covariances
WINDOW, SHRINKAGE = 200, 1e-3
#: inverse strengths of the ridge penalty of the baseline, one of which is chosen by cross-validation
STRENGTHS = [1e-2, 1e-1, 1e0, 1e1, 1e2]
EMG = "emg.csv"
METHODS = ("log-Euclidean", "SPD net", "frozen BiMap")


class Covariances(NamedTuple):
    """``x`` (N, n, n), float32; ``y`` (N,); ``fold`` (N,), the part that each is tested in; names of both."""

    name: str
    x: Tensor
    y: Tensor
    fold: Tensor
    classes: list[str]
    folds: list[str]


def load(folder: Path | None, seed: int, folds: int = 5) -> Covariances:
    """The digits in random folds, or the EMG in ``folder``, a fold for each session."""
    return digits(seed, folds) if folder is None else emg(folder)


def digits(seed: int, folds: int) -> Covariances:
    """Covariances (8, 8) over the 64 pixels of an image (Tuzel, Porikli, Meer, 2006, "Region covariance") of position,
    grey value, first and second derivatives: x, y, I, I_x, I_y, I_xx, I_yy, I_xy, each of variance 1 in all images."""
    images, labels = load_digits(return_X_y=True)
    grey = images.reshape(-1, 8, 8)
    down, across = np.gradient(grey, axis=(1, 2))
    second = [*np.gradient(across, axis=(1, 2)), np.gradient(down, axis=1)]
    rows, columns = np.broadcast_arrays(*np.meshgrid(np.arange(8.0), np.arange(8.0), indexing="ij"))
    places = [np.broadcast_to(place, grey.shape) for place in (columns, rows)]
    features = np.stack([*places, grey, across, down, *second], -1).reshape(len(grey), 64, 8)
    features = features / features.std((0, 1))
    order = np.random.default_rng(seed).permutation(len(labels))
    fold = np.empty(len(labels), dtype=np.int64)
    fold[order] = np.arange(len(labels)) % folds
    names = [str(k) for k in range(folds)]
    return Covariances("digits", *_pooled(features, labels, fold), [str(k) for k in range(10)], names)


def emg(folder: Path) -> Covariances:
    """Windows of 200 samples, one after the other, of 8 channels with one label and session.

    The columns of ``emg.csv`` are time, c0 to c7, label, exp (the session).
    """
    file = folder / EMG
    if not file.is_file():
        raise SystemExit(
            f"{file} does not exist: --data takes the folder of {EMG}, geomstats/datasets/data/emg in the wheel of "
            "geomstats 2.8.0"
        )
    with file.open(newline="") as lines:
        rows = list(csv.reader(lines))[1:]
    windows, labels, sessions = [], [], []
    for (label, session), group in itertools.groupby(rows, key=lambda row: (row[-2], row[-1])):
        run = np.array([row[1:-2] for row in group], dtype=np.float64)
        for start in range(0, len(run) - WINDOW + 1, WINDOW):
            windows.append(run[start : start + WINDOW])
            labels.append(label)
            sessions.append(session)
    classes, y = np.unique(labels, return_inverse=True)
    folds, fold = np.unique(sessions, return_inverse=True)
    return Covariances("EMG", *_pooled(np.stack(windows), y, fold), classes.tolist(), folds.tolist())


def _pooled(
    features: NDArray[np.floating], y: NDArray[np.integer], fold: NDArray[np.integer]
) -> tuple[Tensor, Tensor, Tensor]:
    """Covariances in units of their mean variance."""
    x = manifold_nn.CovariancePool(SHRINKAGE, 0.0)(torch.from_numpy(features))
    level = x.diagonal(dim1=-2, dim2=-1).mean()
    return (x / level).float(), torch.from_numpy(y), torch.from_numpy(fold)


def baseline(data: Covariances, test: Tensor) -> Tensor:
    """Predictions for ``test`` (a mask) of logistic regression on log X as a vector, its penalty by leave-one-fold-out
    cross-validation in the rest."""
    vectors = manifold_nn.LogEig(vectorize=True)(data.x.double()).numpy()
    train = ~test.numpy()
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    groups = data.fold.numpy()[train]
    split = GroupKFold(len(np.unique(groups)))
    search = GridSearchCV(model, {"logisticregression__C": STRENGTHS}, cv=split)
    search.fit(vectors[train], data.y.numpy()[train], groups=groups)
    return torch.from_numpy(search.predict(vectors[test.numpy()]))


def draw(data: Covariances, predictions: Tensor, picture: Path) -> None:
    """Confusion matrix of the predictions for all folds."""
    confusion_matrix(data.y.numpy(), predictions.numpy(), len(data.classes), picture)


def table(data: Covariances, done: list[dict[str, Any]]) -> list[str]:
    """Accuracies in percent, of folds and in the mean, and the difference from the first method."""
    lines = [f"| {data.name} | {' | '.join(data.folds)} | mean | − {METHODS[0]} | seconds per fold |"]
    lines += [f"|{' --- |' * (len(done) + 4)}"]
    for method in METHODS:
        accuracies = [100 * fold[method]["accuracy"] for fold in done]
        gain = mean(accuracies) - mean(100 * fold[METHODS[0]]["accuracy"] for fold in done)
        seconds = mean(fold[method]["seconds"] for fold in done)
        cells = [*(f"{a:.1f}" for a in accuracies), f"{mean(accuracies):.1f}", f"{gain:+.1f}", f"{seconds:.0f}"]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    residual = max(fold[method]["residual"] for fold in done for method in METHODS)
    return [*lines, "", f"accuracy in percent, {len(data.y)} matrices; residual of constrained weights {residual:.1e}"]
