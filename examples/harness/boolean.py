"""Boolean functions of the first two bits of long sequences: the task, two networks, one run, what flows through."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.cli import keep
from manopt_torch.nn import KernelRNN

FUNCTIONS = {"or": torch.logical_or, "and": torch.logical_and, "xor": torch.ne, "equiv": torch.eq}
MODELS = ("kbrn", "lstm")
#: success: this accuracy over so many batches in a row; checkpoints are that often
ACCURACY, EPOCH, CHECKPOINT = 0.99, 10, 50


class Cell(NamedTuple):
    """One run."""

    args: Namespace
    file: Path
    function: str
    length: int
    model: str
    seed: int


def boolean_task(function: str, length: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bits (T, batch, 1), and the function of the first two: (batch,) of 0 and 1."""
    bits = torch.randint(2, (length, batch, 1), generator=generator)
    return bits.float(), FUNCTIONS[function](bits[0, :, 0].bool(), bits[1, :, 0].bool()).float()


class Reader(nn.Module):
    """Probability of 1 from the last state."""

    def __init__(self, model: str, hidden: int, centers: int) -> None:
        super().__init__()
        self.rnn = KernelRNN(1, hidden, centers) if model == "kbrn" else nn.LSTM(1, hidden)
        self.read = nn.Linear(hidden, 1)
        if model == "kbrn":
            nn.init.trunc_normal_(self.read.weight)
            nn.init.zeros_(self.read.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.read(self.rnn(x)[0][-1]))[:, 0]


def train(cell: Cell) -> dict[str, Any]:
    """One run, until success or ``args.iterations``; goes on from its checkpoint if there is one."""
    args, file, function, length, model, seed = cell
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    reader, generator = Reader(model, args.hidden, args.centers), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(reader.parameters(), lr=args.lr)
    past: dict[str, Any] = {"right": [], "seconds": 0.0}
    if file.is_file():
        past = torch.load(file, weights_only=True)
        reader.load_state_dict(past["reader"])
        optimizer.load_state_dict(past["optimizer"])
        generator.set_state(past["generator"])
    right, start = past["right"], time.perf_counter() - past["seconds"]

    def solved() -> bool:
        return len(right) >= EPOCH and statistics.fmean(right[-EPOCH:]) > ACCURACY

    def checkpoint() -> None:
        states = {
            "reader": reader.state_dict(),
            "optimizer": optimizer.state_dict(),
            "generator": generator.get_state(),
        }
        keep({**states, "right": right, "seconds": time.perf_counter() - start}, file)

    while not solved() and len(right) < args.iterations:
        x, y = boolean_task(function, length, args.batch, generator)
        p = reader(x)
        optimizer.zero_grad()
        (p - y).square().mean().backward()
        nn.utils.clip_grad_norm_(reader.parameters(), args.clip)
        optimizer.step()
        right.append(((p > 0.5) == y.bool()).float().mean().item())
        if len(right) % CHECKPOINT == 0:
            checkpoint()
    checkpoint()
    x, y = boolean_task(function, length, 2000, torch.Generator().manual_seed(10**6 + seed))
    with torch.no_grad():
        fresh, running = (((reader.train(mode)(x) > 0.5) == y.bool()).float().mean().item() for mode in (True, False))
    found = {"iterations": len(right), "solved": solved(), "fresh": fresh, "running": running}
    return {**found, "seconds": time.perf_counter() - start}


def gains(reader: Reader, x: Tensor) -> Tensor:
    """|f′(a_t)| of each unit of a KBRN (T, batch, hidden), a_t after normalization; of an LSTM its forget gate, what
    c_t passes on of c_{t−1}."""
    steps, rnn = [], reader.rnn
    h = c = x.new_zeros(x.shape[1], reader.read.in_features)
    for own in x:
        if isinstance(rnn, KernelRNN):
            a = nn.functional.linear(torch.cat([own, h], 1), rnn.weight, rnn.bias)
            a = rnn.activation.normalized(a).detach().requires_grad_()
            h = rnn.activation.function(a)
            steps.append(torch.autograd.grad(h.sum(), a)[0].abs())
        else:
            into, across, *biases = rnn.parameters()
            i, f, g, o = (own @ into.mH + h @ across.mH + sum(biases)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            steps.append(f.sigmoid())
        h = h.detach()
    return torch.stack(steps).detach()
