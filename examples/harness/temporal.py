"""What the examples of temporal networks tell: errors of predictions, a line of the table, what is generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from harness.boltzmann import draw_images
from harness.sequences import KEYS, SequenceSets, draw_rolls, write_midi
from manopt_torch.stochastic import TemporalTruGRBM

#: test sequences that are predicted at a time: the longest of MuseData's has 4273 frames, each of them many samples
SEQUENCES = 10


class Result(NamedTuple):
    """Errors and the bound for each frame, NaN where there is none; the ends of the boxes; minutes of training."""

    name: str
    error: float
    sampled: float = math.nan
    bound: float = math.nan
    model: TemporalTruGRBM | None = None
    minutes: float = math.nan

    def row(self) -> str:
        """A line of the table."""
        numbers = ["" if math.isnan(v) else f"{v:.3f}" for v in (self.error, self.sampled, self.bound)]
        ends = ["", ""]
        if self.model is not None and self.model.rbm.unit_kind == "trug":
            ends = [f"{e.min():.2f} … {e.max():.2f}" for e in (self.model.xi1, self.model.xi2)]
        return f"| {' | '.join([self.name, *numbers, *ends, f'{self.minutes:.1f}'.replace('nan', '')])} |"


def error(test: list[Tensor], predict: Callable[[PackedSequence], PackedSequence]) -> float:
    """The mean of ‖x_t − x̂_t‖² over all frames but the first of every sequence."""
    squares = []
    for start in range(0, len(test), SEQUENCES):
        part = test[start : start + SEQUENCES]
        found = unpack_sequence(predict(pack_sequence(part, enforce_sorted=False)))
        squares += [(x - y)[1:].square().sum(1) for x, y in zip(part, found, strict=True)]
    return torch.cat(squares).mean().item()


def trivial(sets: SequenceSets, count: int) -> list[Result]:
    """The frame before, and the training mean; its likelihood, as of independent units, on ``count`` sequences."""
    whole, last = torch.cat(sets.train), torch.cat([x[:-1] - x[1:] for x in sets.test])
    mean, test = whole.mean(0), torch.cat(sets.test[:count])
    smooth = ((whole.sum(0) + 0.5) / (len(whole) + 1)).expand_as(test) if sets.binary else mean
    bound = -binary_cross_entropy(smooth, test, reduction="sum").item() / len(test) if sets.binary else math.nan
    rest = torch.cat([x[1:] for x in sets.test])
    copied = Result("the frame before", last.square().sum(1).mean().item())
    return [copied, Result("the training mean", (rest - mean).square().sum(1).mean().item(), bound=bound)]


def show(results: list[Result], sets: SequenceSets, frames: int, seed: int, films: bool, out: Path) -> None:
    """What the networks generate after ten frames of the first test sequence: films, or rolls and MIDI files."""
    start = sets.test[0][:10, None]
    rolls = {"data": sets.test[0][10 : 10 + frames]}
    for result in results:
        if result.model is not None:
            generator = torch.Generator().manual_seed(seed)
            rolls[result.name] = result.model.generate(frames, start=start, generator=generator)[:, 0]
    if films:
        every = max(1, frames // 20)
        few = {name: roll[::every] for name, roll in rolls.items()}
        draw_images(few, f"one frame in {every}", out / "generated.png", cmap="gray_r", vmin=0, vmax=1)
    else:
        draw_rolls(rolls, out / "generated.png")
    if sets.binary and start.shape[-1] == KEYS:
        for name, roll in rolls.items():
            write_midi(roll, out / f"{name}.mid")
