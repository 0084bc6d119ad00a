"""Single units with learned activations, several seeds at once: parity of n bits, and how long a charge lasts."""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manopt_torch.nn import KernelActivation

#: a coefficient that counts is above
SMALL = 0.01
#: the charging problem: steps, charges and the largest of them
LENGTH, CHARGES, LARGEST = 30, 3, 10
UNITS = ("kernel", "frozen centers", "relu")


def parity(bits: int) -> tuple[Tensor, Tensor]:
    """All patterns (2ⁿ, n) and whether they have an odd number of ones, (2ⁿ,)."""
    patterns = torch.tensor(list(itertools.product((0.0, 1.0), repeat=bits)))
    return patterns, patterns.sum(1) % 2


def charging(x: Tensor) -> Tensor:
    """1 while charge is left: the charge is c_t = max(c_{t−1} − 1, 0) + x_t, for x (T, ...)."""
    charge, out = torch.zeros_like(x[0]), []
    for own in x:
        charge = (charge - 1).clamp(min=0) + own
        out.append((charge > 0).float())
    return torch.stack(out)


def charges(batch: int, generator: torch.Generator) -> Tensor:
    """(T, batch): three charges from 1 to 10, in different steps."""
    places = torch.rand(LENGTH, batch, generator=generator).argsort(0)[:CHARGES]
    sizes = torch.randint(1, LARGEST + 1, places.shape, generator=generator)
    return torch.zeros(LENGTH, batch).scatter_(0, places, sizes.float())


class Units(nn.Module):
    """Units that share nothing, one for each seed: x (..., inputs), h (..., seeds) to f(w·x + u h + b) (..., seeds)."""

    def __init__(self, inputs: int, kind: str, args: Namespace, coefficients: float) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        self.weight, self.back = (nn.Parameter(nn.init.trunc_normal_(torch.empty(args.seeds, n))) for n in (inputs, 1))
        self.bias = nn.Parameter(torch.zeros(args.seeds))
        self.f: nn.Module = nn.ReLU()
        if kind != "relu":
            self.f = KernelActivation(
                args.seeds,
                args.centers,
                learn_centers=kind != "frozen centers",
                normalize=False,
                coefficients=coefficients,
            )

    def forward(self, x: Tensor, h: Tensor | float = 0.0) -> Tensor:
        return self.f(nn.functional.linear(x, self.weight, self.bias) + self.back[:, 0] * h)

    def scan(self, x: Tensor) -> Tensor:
        """The states (T, batch, seeds) that x (T, batch) leads to."""
        driven, h, out = nn.functional.linear(x[..., None], self.weight, self.bias), x.new_zeros(()), []
        f = self.f.prepared() if isinstance(self.f, KernelActivation) else self.f
        for own in driven:
            h = f(own + self.back[:, 0] * h)
            out.append(h)
        return torch.stack(out)

    def coefficients(self) -> Tensor:
        """How many |χₖ| are not small, of each seed."""
        chi = self.f.chi.detach() if isinstance(self.f, KernelActivation) else torch.zeros(len(self.weight), 0)
        return (chi.abs() > SMALL).sum(1)

    def penalty(self) -> Tensor | float:
        """Σ |χ| of all."""
        return self.f.l1() if isinstance(self.f, KernelActivation) else 0.0


class Learned(NamedTuple):
    """Units after training; of each seed the share of right answers, and the step since which all are, or NaN."""

    units: Units
    right: Tensor
    since: Tensor


def learn_parity(bits: int, kind: str, penalty: float, args: Namespace) -> Learned:
    """Full batches of all patterns, squared error."""
    units, (x, y) = Units(bits, kind, args, coefficients=1.0), parity(bits)
    optimizer, since = torch.optim.Adam(units.parameters(), lr=args.lr), torch.full((args.seeds,), torch.nan)
    for step in range(1, args.steps + 1):
        f = units(x)
        right = ((f > 0.5) == (y > 0.5)[:, None]).float().mean(0)
        since = torch.where(right < 1, torch.nan, since.nan_to_num(step))
        optimizer.zero_grad()
        ((f - y[:, None]).square().mean(0).sum() + penalty * units.penalty()).backward()
        optimizer.step()
    return Learned(units, right, since)


def learn_charging(kind: str, args: Namespace) -> Learned:
    """Fresh sequences, the squared error of sigmoid(v h_t + c), a rate that falls; right on 1,000 other sequences."""
    units, generator = Units(1, kind, args, coefficients=0.0), torch.Generator().manual_seed(args.seed)
    v, c = nn.Parameter(nn.init.trunc_normal_(torch.empty(args.seeds))), nn.Parameter(torch.zeros(args.seeds))
    optimizer = torch.optim.Adam([*units.parameters(), v, c], lr=args.lr)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.charging_steps)

    def answers(batch: int) -> tuple[Tensor, Tensor]:
        x = charges(batch, generator)
        return torch.sigmoid(v * units.scan(x / LARGEST) + c), charging(x)[..., None]

    for _ in range(args.charging_steps):
        p, y = answers(100)
        optimizer.zero_grad()
        (p - y).square().mean((0, 1)).sum().backward()
        optimizer.step()
        rate.step()
    with torch.no_grad():
        p, y = answers(1000)
    return Learned(units, ((p > 0.5) == (y > 0.5)).float().mean((0, 1)), torch.full_like(v, torch.nan))
