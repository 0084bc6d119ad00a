"""Sequences in the examples of temporal networks: bouncing balls, files, piano rolls as picture and MIDI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mido
import numpy as np
import scipy.io
import torch
from matplotlib.figure import Figure
from torch import Tensor

#: balls: the side of the box and their radius, in units of length, and the way of each in one frame
BOX, RADIUS, SPEED = 10.0, 1.2, 0.5
#: steps of the motion within a frame
SUBSTEPS = 5
#: the lowest of 88 piano keys, and quarter notes at 120 per minute for each step of a roll
LOWEST_KEY, KEYS, TICKS = 21, 88, 240


class SequenceSets(NamedTuple):
    """Sequences (T, n) of different T, and whether all entries are 0 or 1."""

    train: list[Tensor]
    valid: list[Tensor]
    test: list[Tensor]
    binary: bool


def bouncing_balls(count: int, steps: int, side: int, balls: int = 3, seed: int = 0) -> Tensor:
    """(count, steps, side²) of 0 and 1: equal balls in a square box, elastic collisions (Sutskever et al., 2007).

    A pixel is 1 where its centre is within a ball.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.empty(count, balls, 2).uniform_(RADIUS, BOX - RADIUS, generator=generator)
    pairs = torch.triu_indices(balls, balls, 1)
    while True:  # draw those anew that overlap
        apart = (
            (places[:, pairs[0]] - places[:, pairs[1]]).norm(dim=-1).amin(1) if balls > 1 else torch.ones(count) * BOX
        )
        bad = apart < 2 * RADIUS
        if not bad.any():
            break
        places[bad] = torch.empty(int(bad.sum()), balls, 2).uniform_(RADIUS, BOX - RADIUS, generator=generator)
    velocity = torch.nn.functional.normalize(torch.randn(count, balls, 2, generator=generator), dim=-1) * SPEED
    centres = (torch.arange(side) + 0.5) * (BOX / side)
    pixels = torch.cartesian_prod(centres, centres)
    frames = []
    for _ in range(steps):
        frames.append(((places[:, :, None] - pixels).norm(dim=-1) < RADIUS).any(1).float())
        for _ in range(SUBSTEPS):
            places = places + velocity / SUBSTEPS
            velocity = torch.where(places < RADIUS, velocity.abs(), velocity)
            velocity = torch.where(places > BOX - RADIUS, -velocity.abs(), velocity)
            for i, j in pairs.mT.tolist():  # equal masses exchange what they have along the line between them
                line = places[:, i] - places[:, j]
                distance = line.norm(dim=-1, keepdim=True)
                line = line / distance
                along = ((velocity[:, i] - velocity[:, j]) * line).sum(-1, keepdim=True)
                push = torch.where((distance < 2 * RADIUS) & (along < 0), along * line, 0.0)
                velocity[:, i] -= push
                velocity[:, j] += push
    return torch.stack(frames, 1)


def read_sequences(file: Path) -> SequenceSets:
    """The sets of a .mat or .npz file: traindata, validdata (may be absent), testdata, also written train_data etc.

    In .mat each is a cell array of matrices (T, n), in .npz an array (N, T, n). What is not binary is brought to mean
    0 and variance 1 by the training set.

    Raises:
        SystemExit: for a file that is not there, of another kind, or without these keys.
    """
    if not file.is_file() or file.suffix not in (".mat", ".npz"):
        raise SystemExit(f"--data {file}: needs a .mat or .npz file with traindata and testdata (and validdata)")
    found = scipy.io.loadmat(file) if file.suffix == ".mat" else dict(np.load(file))
    sets = {}
    for name in ("train", "valid", "test"):
        value = found.get(f"{name}data", found.get(f"{name}_data", []))
        rows = value.ravel() if isinstance(value, np.ndarray) and value.dtype.kind == "O" else value
        sets[name] = [torch.as_tensor(np.asarray(row, np.float32)) for row in rows]
    if not sets["train"] or not sets["test"]:
        raise SystemExit(f"--data {file}: has {', '.join(k for k in found if k[0] != '_')}, needs traindata, testdata")
    whole = torch.cat(sets["train"])
    if binary := bool(((whole == 0) | (whole == 1)).all()):
        return SequenceSets(**sets, binary=binary)
    scale = whole.std(0)
    scale[scale == 0] = 1
    return SequenceSets(**{k: [(x - whole.mean(0)) / scale for x in v] for k, v in sets.items()}, binary=False)


def draw_rolls(rolls: Mapping[str, Tensor], file: Path) -> None:
    """Each (T, n) under its name, time to the right, the first unit lowest."""
    figure = Figure(figsize=(9, 2.2 * len(rolls)), layout="constrained")
    for axes, (name, roll) in zip(figure.subplots(len(rolls), 1, squeeze=False)[:, 0], rolls.items(), strict=True):
        axes.imshow(roll.mH.numpy(), origin="lower", aspect="auto", cmap="gray_r", interpolation="nearest")
        axes.set_title(name, fontsize=8)
    figure.savefig(file, dpi=120)


def write_midi(roll: Tensor, file: Path) -> None:
    """A piano roll (T, 88) of 0 and 1; a key that goes on sounding is held."""
    track = mido.MidiTrack()
    waited = 0
    before = torch.zeros(KEYS)
    for now in [*roll, torch.zeros(KEYS)]:
        for key in (now != before).nonzero()[:, 0].tolist():
            kind = "note_on" if now[key] else "note_off"
            track.append(mido.Message(kind, note=LOWEST_KEY + key, velocity=64, time=waited))
            waited = 0
        waited += TICKS
        before = now
    midi = mido.MidiFile()
    midi.tracks.append(track)
    midi.save(file)
