"""Leaky ReLU and its family: one neuron, 50 layers, learned and random slopes, linear pieces.

``python examples/activations.py`` prints two tables, and writes them, a picture and a page with sliders for the neuron
(one HTML file that needs no other) to a new folder under runs/activations:

    forms       max(x, αx) is leaky ReLU only for α ≤ 1
    neuron      v LReLU_α(w x + b) whose kink is right of all inputs, by gradient descent, for several α
    50 layers   z ← W f(z): root mean square of layer 50 over that of layer 1, with the gain of ReLU (√2), with that of
                the slope (√(2/(1 + α²))), SELU with the initial weights of LeCun; a mean over many networks
    PReLU       w and α of PReLU_α(w x) fitted to 1.5 and 0.1, with weight decay here and there
    RReLU       slopes in training, and in evaluation
    pieces      of the plane on which a net of one hidden layer and two inputs is linear: as many for all α but 1

Maas, Hannun and Ng, 2013; He, Zhang, Ren and Sun, 2015; Xu, Wang, Chen and Li, 2015; Klambauer et al., 2017.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from harness import activations as family
from harness.activations import Signal, Trajectory
from harness.cli import at_least, new_folder, positive
from matplotlib.figure import Figure
from torch import Tensor

#: of the neuron, of the layers, and of the nets whose pieces are counted
NEURON = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3)
LAYERS = (0.01, 0.1, 0.2, 0.3)
PIECES = (0.0, 0.01, 0.3, 2.0, -1.0, 1.0)
#: slopes of the page
PAGE = tuple(i / 100 for i in range(51))
#: figures of the literature: left slope of the neuron by α, growth over 50 layers
PUBLISHED_SLOPE, PUBLISHED_GROWTH = {0.1: "0.116"}, {"leaky 0.3, gain of ReLU": "8.3"}
NEURON_COLUMNS = ("α", "error", "w", "b", "v", "left slope αvw", "published", "first active at step")
COLUMNS = ("what", "of", "measured", "by formula", "published")


class Found(NamedTuple):
    """All that was computed."""

    neurons: Trajectory
    kinds: list[Signal]
    powers: Tensor
    prelu: dict[str, Tensor]
    pieces: dict[float, tuple[int, int]]


def markdown(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [columns, ("---",) * len(columns), *rows])


def neuron_table(run: Trajectory) -> str:
    """One row for each slope: the neuron after the last step."""
    rows = []
    for i, (slope, revived) in enumerate(zip(run.slopes.tolist(), run.revived(), strict=True)):
        mse, w, b, v = (series[-1, i].item() for series in run[1:])
        numbers = (f"{slope:g}", f"{mse:.3g}", f"{w:.4f}", f"{b:.4f}", f"{v:.4f}", f"{slope * v * w:.4f}")
        rows.append((*numbers, PUBLISHED_SLOPE.get(slope, ""), "never" if revived is None else str(revived)))
    return markdown(NEURON_COLUMNS, rows)


def table(found: Found, args: Namespace) -> str:
    """The other experiments."""
    x = torch.tensor(-3.0)
    right, maximum, _ = family.forms(x, 2.0).values()
    rows = [("max(x, αx)", "α = 2, x = −3", f"{maximum:g}", f"{right:g}", "")]
    for kind, rms, error in zip(found.kinds, *family.growth(found.powers), strict=True):
        expected = "" if kind.growth is None else f"{kind.growth**0.5:.4g}"
        measured = f"{rms:.3g} ± {error:.1g}"
        rows.append(("RMS, layer 50 / 1", kind.name, measured, expected, PUBLISHED_GROWTH.get(kind.name, "")))
    for decay, run in found.prelu.items():
        for step in (20, len(run) - 1):
            w, slope = run[min(step, len(run) - 1)].tolist()
            measured = f"w {w:.6f}, α {slope:.6f}, αw {slope * w:.5f}"
            rows.append((f"PReLU after {step} steps", f"decay {decay}", measured, "", ""))
    x, f, slope = family.random_slopes(args.samples, args.seed)
    own = (f / x)[x < 0]
    rows.append(("RReLU, slopes in training", f"{len(own)} inputs", f"{own.min():.4f} … {own.max():.4f}", "⅛ … ⅓", ""))
    rows.append(("RReLU, their mean", "training", f"{own.mean():.4f}", f"{11 / 48:.4f}", ""))
    rows.append(("RReLU, slope", "evaluation", f"{slope:.4f}", f"{11 / 48:.4f}", ""))
    expected = str(1 + family.HIDDEN * (family.HIDDEN + 1) // 2)
    for alpha, (patterns, gradients) in found.pieces.items():
        one = "1" if alpha == 1 else expected
        rows.append(
            ("sign patterns, gradients", f"α = {alpha:g}", f"{patterns}, {gradients}", f"{expected}, {one}", "")
        )
    return markdown(COLUMNS, rows)


def draw(found: Found, args: Namespace, file: Path) -> None:
    """Two rows of four panels."""
    figure = Figure(figsize=(17, 8), layout="constrained")
    right, wrong, curves, shapes, layers, learned, noisy, relief = figure.subplots(2, 4).flat
    family.draw_forms(right, 0.2)
    family.draw_forms(wrong, 2.0)
    family.draw_neurons(curves, shapes, found.neurons)
    for kind, power in zip(found.kinds, found.powers.mean(1).unbind(1), strict=True):
        if kind.name.startswith(("ReLU", "leaky 0.2", "leaky 0.3", "SELU")):
            layers.semilogy(range(1, len(power) + 1), power.sqrt().numpy(), label=kind.name)
    layers.set(title=f"{args.seeds} networks of {args.width} units", xlabel="layer", ylabel="RMS", ylim=(1e-2, 20))
    for decay, values in found.prelu.items():
        learned.plot(values[:81, 1].numpy(), label=f"decay {decay}")
    learned.axhline(family.TRUE[1], color="k", linestyle=":")
    learned.set(title="PReLU: α, fitted to 0.1", xlabel="step", ylim=(0.095, 0.12))
    x, f, slope = family.random_slopes(min(args.samples, 1000), args.seed)
    noisy.plot(x.numpy(), f.numpy(), ".", markersize=3, label="training")
    noisy.plot([-3, 0, 3], [-3 * slope, 0, 3], "k", label="evaluation")
    noisy.set(title="RReLU", xlabel="x")
    for axes in figure.axes[:-1]:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    family.draw_relief(relief, family.Relief(0.3, args.seed))
    relief.set_title(f"{family.HIDDEN} units of two inputs: {found.pieces[0.3][0]} linear pieces")
    figure.savefig(file, dpi=100)


def main(argv: list[str] | None = None) -> Found:
    """Command line: see ``--help``. Returns all that was computed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=at_least(20), default=3000, help="of the neuron and of PReLU (%(default)s)")
    add("--width", type=positive, default=256, metavar="n", help="units of each of the 50 layers (%(default)s)")
    add("--seeds", type=at_least(2), default=400, help="networks of 50 layers (%(default)s)")
    add("--samples", type=positive, default=10000, help="inputs of RReLU (%(default)s)")
    add("--seed", type=int, default=0, help="of all that is random (%(default)s)")
    add("--threads", type=positive, default=1, help="of torch (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--smoke", action="store_true", help="sizes that run in seconds")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, Namespace(steps=100, width=16, seeds=4, samples=200))
    torch.set_num_threads(args.threads)
    kinds = family.signals(LAYERS)
    found = Found(
        family.train_neurons(NEURON, args.steps),
        kinds,
        family.propagate(kinds, args.width, args.seeds, args.seed),
        {decay: family.train_prelu(decay, args.steps) for decay in family.DECAYS},
        {slope: family.pieces(family.Relief(slope, args.seed)) for slope in PIECES},
    )
    text = f"{neuron_table(found.neurons)}\n{table(found, args)}"
    print(text, end="")
    out = args.out or new_folder(Path("runs") / "activations")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tables.md").write_text(text, encoding="utf-8")
    draw(found, args, out / "activations.png")
    kept = sorted({round((args.steps + 1) ** (i / 100)) - 1 for i in range(101)})
    (out / "neuron.html").write_text(family.page(family.train_neurons(PAGE, args.steps), kept), encoding="utf-8")
    print(f"tables, picture and page in {out}")
    return found


if __name__ == "__main__":
    main()
