"""Regression in the examples: tables of numbers and their splits, ridge regression, what is told of the results."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from torch import Tensor

from manopt_torch.nn import TruG

#: the columns that are targets, by the name of the file; the last one otherwise
TARGETS = {"naval-propulsion": slice(-2, None), "protein-structure": slice(0, 1)}
#: random splits of a set, by the name of the file; 20 otherwise
SPLITS = {"protein-structure": 5}
#: part of a set that is the test set, and part of the rest by which rates and epochs are chosen
HELD_OUT = 0.1


class Table(NamedTuple):
    """A set: x (N, dx) and y (N, D), as they are in the file."""

    name: str
    x: Tensor
    y: Tensor


class Parts(NamedTuple):
    """One split, (x, y) of each part, standardised by training and validation rows; ``scale`` (D,) takes y back."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    scale: Tensor

    @property
    def known(self) -> tuple[Tensor, Tensor]:
        """All rows but those of the test."""
        x, y = (torch.cat(pair) for pair in zip(self.train, self.validation, strict=True))
        return x, y


def read_table(file: Path | None) -> Table:
    """A .csv file with one line of names; scikit-learn's diabetes without a file."""
    if file is None:
        x, y = load_diabetes(return_X_y=True)
        return Table("diabetes", torch.as_tensor(x), torch.as_tensor(y)[:, None])
    if not file.is_file():
        raise SystemExit(f"{file} is not there: --data takes a .csv file of numbers under one line of names")
    rows = torch.as_tensor(np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2))
    if len(rows) < 20 or rows.shape[1] < 2:
        raise SystemExit(f"{file} has {len(rows)} rows of {rows.shape[1]} numbers, needs 20 rows of 2 at least")
    columns = list(range(rows.shape[1]))
    targets = columns[TARGETS.get(file.stem, slice(-1, None))]
    return Table(file.stem, rows[:, [c for c in columns if c not in targets]], rows[:, targets])


def split(table: Table, seed: int, index: int) -> Parts:
    """The random split number ``index``, in float32."""
    state = np.random.SeedSequence((seed, index)).generate_state(1)
    order = torch.randperm(len(table.x), generator=torch.Generator().manual_seed(int(state[0])))
    test = round(HELD_OUT * len(order))
    validation = test + round(HELD_OUT * (len(order) - test))
    columns = []
    for values in (table.x, table.y):
        known = values[order[test:]]
        scale = known.std(0, correction=0)
        columns.append(((values - known.mean(0)) / torch.where(scale > 0, scale, 1.0), scale))
    (x, _), (y, scale) = columns
    rows = (order[validation:], order[test:validation], order[:test])
    train, tuning, test_rows = ((x[i].float(), y[i].float()) for i in rows)
    return Parts(train, tuning, test_rows, scale)


def rmse(predicted: Tensor, part: tuple[Tensor, Tensor], scale: Tensor) -> float:
    """In the units of y; of several targets the root of the mean over all."""
    return ((predicted - part[1]) * scale).square().mean().sqrt().item()


def ridge(parts: Parts) -> float:
    """Of ridge regression, its penalty chosen by leave-one-out on training and validation rows."""
    x, y = (t.double().numpy() for t in parts.known)
    found = RidgeCV(alphas=np.logspace(-4, 4, 33)).fit(x, y).predict(parts.test[0].double().numpy())
    return rmse(torch.as_tensor(found).view_as(parts.test[1]), parts.test, parts.scale)


class Result(NamedTuple):
    """A method on all splits: errors, how far |ξ₁ − start| and |ξ₂ − start| went on average, minutes of one split."""

    name: str
    errors: list[float]
    moved: list[list[float]]
    minutes: float

    def row(self) -> str:
        """A line of the table: mean and standard error over the splits."""
        mean, error = np.mean(self.errors), standard_error(self.errors)
        ends = [f"{np.mean(way):.2f}" for way in zip(*self.moved, strict=True)] if any(self.moved) else ["", ""]
        return f"| {' | '.join([self.name, f'{mean:#.4g}', f'{error:.2g}', *ends, f'{self.minutes:.2f}'])} |"


def standard_error(values: list[float]) -> float:
    """Of the mean; NaN for one value."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def paired(name: str, errors: list[float], fixed: list[float]) -> str:
    """The mean of the differences over splits, with the 95% t interval of independent ones."""
    differences = [a - b for a, b in zip(errors, fixed, strict=True)]
    mean, count = float(np.mean(differences)), len(differences)
    said = f"{name} − fixed, RMSE: {mean:+.3g}"
    if count < 2:
        return f"{said}; one split has no interval"
    half = float(scipy.stats.t.ppf(0.975, count - 1)) * standard_error(differences)
    lower = sum(d < 0 for d in differences)
    return f"{said}, 95% t interval [{mean - half:+.3g}, {mean + half:+.3g}], lower in {lower} of {count} splits"


def moved(units: TruG) -> list[float]:
    """The means over units of |ξ₁ − start| and |ξ₂ − start|; of an infinite end 0."""
    start = copy.deepcopy(units)
    start.reset_parameters()
    pairs = zip(units.truncation_points(), start.truncation_points(), strict=True)
    return [(now - then).detach().abs().nan_to_num(0.0).mean().item() for now, then in pairs]


def draw(results: list[Result], ends: dict[str, list[list[float]]], sigma2: float, title: str, file: Path) -> None:
    """Errors on all splits, and E[h | z] of the units of the last one."""
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, result in enumerate(results):
        left.plot([i + 0.1 * math.sin(7.0 * k) for k in range(len(result.errors))], result.errors, ".", alpha=0.6)
    left.set_xticks(range(len(results)), [r.name for r in results], rotation=20, fontsize=8)
    left.set_ylabel("RMSE")
    left.set_title(title)
    for color, result in enumerate(results):
        if result.name in ends:
            low, high = map(torch.tensor, ends[result.name])
            z = torch.linspace(-4, 4, 200)[:, None].expand(-1, len(low))
            unit = TruG(len(low), sigma2, lower=low, upper=high, learn=None)
            right.plot(z[:, 0], unit(z), color=f"C{color}", alpha=0.4)[0].set_label(result.name)
    right.set_xlabel("z")
    right.set_title("E[h | z] of the units, last split")
    if ends:
        right.legend(fontsize=7)
    figure.savefig(file, dpi=120)
