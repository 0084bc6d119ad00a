"""What truncation makes of a Gaussian: the four nonlinearities of the TruG paper, and how far formulas for them carry.

``python examples/trug_figure.py`` draws figure 1 of Su, Liao and Carin (2017): E h against z at σ² = 0.2 on [0, ∞),
[−1, 1], [0, 1] and [0, 4], beside the function that each of them resembles. A table and a second picture show relative
errors in float64 of the mean and the variance of h against 60 digits, σ = 1, for

    textbook     z + (φ(a) − φ(b))/(Φ(b) − Φ(a)) as it stands
    published    the same, with φ(x)/Φ(x) replaced by (√(x² + 4) − x)/2 for x < −38; for one truncation point
    ours         manopt_torch.special

The replacement has a relative error of up to 5·10⁻⁷ (the paper's proposition 1). The mean is its difference from −x,
the variance a difference of differences: they have errors of 10⁻³ and of everything.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mpmath as mp  # type: ignore[import-untyped]
import numpy as np
import torch
from harness.cli import new_folder, positive
from matplotlib.figure import Figure
from torch import Tensor

from manopt_torch import special
from manopt_torch.nn import TruG

INF = math.inf
#: title, layer, the function it resembles and its name, range of z
PANELS: tuple[tuple[str, Callable[..., TruG], Callable[[Tensor], Tensor], str, tuple[float, float]], ...] = (
    ("(a) [0, ∞)", TruG.relu, torch.relu, "max(z, 0)", (-3, 3)),
    ("(b) [−1, 1]", TruG.tanh, torch.tanh, "tanh z", (-4, 4)),
    ("(c) [0, 1]", TruG.sigmoid, torch.sigmoid, "sigmoid z", (-6, 6)),
    ("(d) [0, 4]", TruG.ramp, lambda z: z.clamp(0, 4), "z clipped to [0, 4]", (-3, 7)),
)
#: the interval that the published approximation is for, and where it takes over
PUBLISHED = (0.0, INF)
SWITCH = -38.0
#: intervals of the table, and z
PLACES: tuple[tuple[tuple[float, float], tuple[float, ...]], ...] = (
    ((0.0, INF), (0.0, -5.0, -7.0, -9.0, -37.0, -40.0, -1e3, -1e4)),
    ((0.0, 1.0), (0.5, -7.0, -9.0, -40.0, -1e4)),
    ((-1.0, 0.0), (7.0, 9.0, 37.0, 40.0, 1e4)),
)
METHODS = ("textbook", "published", "ours")
COLUMNS = ("interval", "z/σ", *(f"{name}, {what}" for name in METHODS for what in ("mean", "variance")))


class Errors(NamedTuple):
    """Relative errors by method, NaN where it gives NaN or does not apply: (2, len(z)), mean and variance."""

    interval: tuple[float, float]
    z: Tensor
    by_method: dict[str, Tensor]


def exact(z: float, low: float, high: float) -> tuple[mp.mpf, mp.mpf]:
    """Mean and variance for σ = 1, with 60 digits left."""
    if abs(high - z) < abs(low - z):
        mean, variance = exact(-z, -high, -low)
        return -mean, variance
    with mp.workdps(100):
        ends = [mp.mpf(end) - z for end in (low, high)]
        inside = mp.erfc(ends[0] / mp.sqrt(2)) / 2 - mp.erfc(ends[1] / mp.sqrt(2)) / 2
        A, B = (mp.npdf(end) / inside for end in ends)
        return z + A - B, 1 + ends[0] * A - (ends[1] * B if B else 0) - (A - B) ** 2


def Phi(x: Tensor) -> Tensor:
    """The standard normal distribution function, to full relative accuracy where it is small."""
    return 0.5 * torch.special.erfc(-x * math.sqrt(0.5))


def textbook(z: Tensor, low: float, high: float) -> Tensor:
    """Mean and variance, (2, len(z)), by the formulas of the definition."""
    a, b = low - z, high - z
    inside = Phi(b) - Phi(a)
    A, B = (torch.exp(-0.5 * end.square()) / math.sqrt(2 * math.pi) / inside for end in (a, b))
    return torch.stack([z + A - B, 1 + a * A - (b * B if high < INF else 0) - (A - B).square()])


def approximate_ratio(x: Tensor) -> Tensor:
    """(√(x² + 4) − x)/2 for φ(x)/Φ(x), x well below 0."""
    return ((x.square() + 4).sqrt() - x) / 2


def published(z: Tensor, low: float, high: float) -> Tensor:
    """The same for the interval [0, ∞); NaN for others."""
    if (low, high) != PUBLISHED:
        return torch.full((2, len(z)), torch.nan)
    plain = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi) / Phi(z)
    ratio = torch.where(z < SWITCH, approximate_ratio(z), plain)
    return torch.stack([z + ratio, 1 - ratio * (z + ratio)])


def ours(z: Tensor, low: float, high: float) -> Tensor:
    """The same by this library."""
    found = special.moments(z, 1.0, low, high)
    return torch.stack([found.mean, found.variance])


def measure(interval: tuple[float, float], z: Tensor) -> Errors:
    """Relative errors of all methods at every z."""
    expected = torch.tensor([[float(v) for v in exact(x, *interval)] for x in z.tolist()], dtype=z.dtype).mH
    methods = zip(METHODS, (textbook, published, ours), strict=True)
    return Errors(interval, z, {name: (method(z, *interval) / expected - 1).abs() for name, method in methods})


def table(found: list[Errors]) -> str:
    """One row for each interval and z, in Markdown; "-" where a method does not apply."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for errors in found:
        low, high = (f"{end:g}".replace("-", "−").replace("inf", "∞") for end in errors.interval)
        for i, z in enumerate(errors.z.tolist()):
            cells = [
                "-" if name == "published" and errors.interval != PUBLISHED else f"{value:.1e}".replace("nan", "NaN")
                for name in METHODS
                for value in errors.by_method[name][:, i].tolist()
            ]
            rows.append((f"[{low}, {high}{')' if high == '∞' else ']'}", f"{z:g}", *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def nonlinearities(file: Path) -> None:
    """Figure 1 of the paper."""
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axes, (title, layer, resembled, name, ends) in zip(figure.subplots(1, 4), PANELS, strict=True):
        z = torch.linspace(*ends, 301, dtype=torch.float64)
        axes.plot(z, layer(learn=None)(z), "C0", label="E h")
        axes.plot(z, resembled(z), "k--", linewidth=1, label=name)
        axes.set(title=title, xlabel="z")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left")
    figure.savefig(file, dpi=120)


def accuracy(errors: Errors, file: Path) -> None:
    """The error of the published approximation with its bound, then those of mean and variance, against −z/σ."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    x = errors.z
    with mp.workdps(40):
        ratio = [float(approximate_ratio(v).item() * mp.ncdf(v.item()) / mp.npdf(v.item()) - 1) for v in x]
    bound = 2 * ((x.square() + 4).sqrt() - x) / ((x.square() + 8).sqrt() - 3 * x) - 1
    axes[0].plot(-x, np.abs(ratio), "C1", label="error")
    axes[0].plot(-x, bound, "k--", linewidth=1, label="bound of proposition 1")
    axes[0].axvline(-SWITCH, color="k", linestyle=":", label="published switch")
    axes[0].set(title="(√(x² + 4) − x)/2 for φ(x)/Φ(x)", ylabel="relative error")
    for panel, what, k in ((axes[1], "mean", 0), (axes[2], "variance", 1)):
        for name, style in (("textbook", "C2."), ("published", "C1x"), ("ours", "C0.")):
            panel.plot(-x, errors.by_method[name][k].clamp(1e-17, 10), style, markersize=4, label=name)
        panel.set(title=f"{what} on [0, ∞)")
    for panel in axes:
        panel.set(xscale="log", yscale="log", xlabel="−z/σ", ylim=(5e-18, 20))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> list[Errors]:
    """Command line: see ``--help``. Returns the errors at the places of the table, and last those of the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=positive, default=161, help="of each curve of errors (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    parser.add_argument("--smoke", action="store_true", help="few points")
    args = parser.parse_args(argv)
    points = 9 if args.smoke else args.points
    found = [measure(interval, torch.tensor(z, dtype=torch.float64)) for interval, z in PLACES]
    found.append(measure((0.0, INF), -torch.logspace(-1, 4, points, dtype=torch.float64)))
    print(table(found[:-1]), end="")
    out = args.out or new_folder(Path("runs") / "trug_figure")
    out.mkdir(parents=True, exist_ok=True)
    (out / "accuracy.md").write_text(table(found[:-1]))
    nonlinearities(out / "figure1.png")
    accuracy(found[-1], out / "accuracy.png")
    print(f"table and pictures in {out}")
    return found


if __name__ == "__main__":
    main()
