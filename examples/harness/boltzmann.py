"""Restricted Boltzmann machines in the examples: a set of pictures to learn, and pictures of what was learned."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from manopt_torch.stochastic import TruGRBM


def bars_and_stripes() -> Tensor:
    """(14, 9): all rows alike, or all columns."""
    rows = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)), dtype=torch.float64)
    stripes = rows[:, :, None].expand(8, 3, 3)
    return torch.cat([stripes, stripes.mT]).flatten(1).unique(dim=0)


def draw_images(rows: dict[str, Tensor], title: str, file: Path, **scale: Any) -> None:
    """One row of square pictures for each model."""
    figure = Figure(figsize=(9, 0.9 * len(rows) + 0.5), layout="constrained")
    figure.suptitle(title)
    for axes, (name, images) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        side = math.isqrt(images.shape[1])
        tiles = torch.nn.functional.pad(images.view(-1, side, side), (0, 1), value=math.nan)
        axes.imshow(torch.cat(list(tiles), 1).numpy(), **scale)
        axes.set_title(name, fontsize=7, pad=2)
        axes.set_axis_off()
    figure.savefig(file, dpi=150)


def draw_points(models: dict[str, TruGRBM], file: Path) -> None:
    """[ξ₁, ξ₂] of every unit, sorted by ξ₁, and where it began."""
    learned = {name: rbm for name, rbm in models.items() if rbm.units.learn}
    figure = Figure(figsize=(3 * len(learned), 3), layout="constrained")
    for axes, (name, rbm) in zip(figure.subplots(1, len(learned), squeeze=False)[0], learned.items(), strict=True):
        low, high = (end.detach() for end in (rbm.xi1, rbm.xi2))
        order = low.argsort()
        axes.vlines(range(len(low)), low[order], high[order])
        start = copy.deepcopy(rbm.units)
        start.reset_parameters()
        for end in (start.xi1, start.xi2):
            axes.axhline(end.detach()[0].item(), color="0.5", linestyle=":")
        axes.set_title(name.replace(", CD", "\nCD").replace(", exact", "\nexact"), fontsize=8)
        axes.set_xlabel("unit")
    figure.savefig(file, dpi=120)
