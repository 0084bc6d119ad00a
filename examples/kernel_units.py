"""What one unit computes once its activation is learned: parity of n bits, and how long a charge lasts.

``python examples/kernel_units.py`` trains single units f(w·x + b), f(a) = −∑ χₖ |a − cₖ| with d = 50 terms, for the
parity of 2 and 4 bits, from several seeds at once; with λ ∑ |χₖ| in the loss fewer coefficients remain. Beside them are
units whose centers stay where they were, and a rectified linear one, which cannot: the parity of a sum is not monotone.
Then one unit reads a sequence of charges, h_t = f(w x_t + u h_{t−1} + b), and says while some of the charge is left,
which falls by one in every step. A table and a picture of the functions go to a new folder under runs/kernel_units.

Marra, Zanca, Betti and Gori, 2018 (Adam, 0.01; λ = 7.5·10⁻⁴).
"""

from __future__ import annotations

import argparse
import math
import statistics
from argparse import Namespace
from pathlib import Path

import torch
from harness.cli import new_folder, positive
from harness.units import SMALL, UNITS, Learned, learn_charging, learn_parity, parity
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

#: λ of the table
PENALTIES = (0.0, 7.5e-4)
COLUMNS = ("task", "unit", "λ", "right: least, median, most", "all right", "steps", f"coefficients above {SMALL}")
#: what is drawn
SHOWN = (
    *((f"parity of {n}", "kernel", penalty) for n in (2, 4) for penalty in PENALTIES),
    *((task, "frozen centers", 0.0) for task in ("parity of 2", "parity of 4")),
    *(("charging", kind, 0.0) for kind in ("kernel", "relu")),
)


def row(task: str, kind: str, penalty: float, found: Learned, args: Namespace) -> str:
    """One line of the table."""
    steps = sorted(s for s in found.since.tolist() if not math.isnan(s))
    count = sorted(found.units.coefficients().tolist())
    shares = sorted(found.right.tolist())
    cells = [task, kind, f"{penalty:g}", f"{shares[0]:.3f} {statistics.median(shares):.3f} {shares[-1]:.3f}"]
    cells.append(f"{len(steps)} of {args.seeds}" if task != "charging" else "")
    cells.append(f"{steps[0]:g} {statistics.median(steps):g} {steps[-1]:g}" if steps else "")
    cells.append(f"{count[0]} {count[-1]} of {args.centers}" if kind != "relu" else "")
    return f"| {' | '.join(cells)} |"


@torch.no_grad()
def draw(axes: Axes, title: str, found: Learned, inputs: Tensor) -> None:
    """f of the seed with most right answers over all a from −3 to 3, and the a that ``inputs`` lead to."""
    best, f = int(found.right.argmax()), found.units.f
    a = torch.linspace(-3, 3, 601)[:, None].expand(-1, len(found.right))
    axes.plot(a[:, best], f(a)[:, best])
    seen = nn.functional.linear(inputs, found.units.weight, found.units.bias)
    axes.plot(seen[:, best], f(seen)[:, best], "ko", markersize=4)
    axes.set_title(f"{title}\nright: {found.right[best]:.3f}", fontsize=9)
    axes.set(xlabel="a", xlim=(-3, 3))
    axes.grid(alpha=0.3)


def main(argv: list[str] | None = None) -> dict[tuple[str, str, float], Learned]:
    """Command line: see ``--help``. Returns what was learned by task, unit and λ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--centers", type=positive, default=50, metavar="d", help="terms of each function (%(default)s)")
    add("--seeds", type=positive, default=8, help="units of each kind (%(default)s)")
    add("--steps", type=positive, default=3000, help="of parity (%(default)s)")
    add("--charging-steps", type=positive, default=1000, help="batches of 100 sequences (%(default)s)")
    add("--lr", type=float, default=0.01, help="of Adam (%(default)s)")
    add("--seed", type=int, default=0, help="of all initial values and sequences (%(default)s)")
    add("--threads", type=positive, default=1, help="of torch (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, Namespace(centers=5, seeds=2, steps=3, charging_steps=2))
    torch.set_num_threads(args.threads)
    names = [
        (f"parity of {n}", kind, penalty)
        for n in (2, 4)
        for kind in UNITS
        for penalty in PENALTIES
        if not penalty or kind != "relu"
    ]
    names += [("charging", kind, 0.0) for kind in UNITS]
    table, found = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"], {}
    print(*table, sep="\n", flush=True)
    for task, kind, penalty in names:
        learned = learn_parity(int(task[-1]), kind, penalty, args) if task[-1].isdigit() else learn_charging(kind, args)
        found[task, kind, penalty] = learned
        table.append(row(task, kind, penalty, learned, args))
        print(table[-1], flush=True)
    out = args.out or new_folder(Path("runs") / "kernel_units")
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(table) + "\n")
    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes, (task, kind, penalty) in zip(figure.subplots(2, 4).flat, SHOWN, strict=True):
        inputs = torch.zeros(0, 1) if task == "charging" else parity(int(task[-1]))[0]
        draw(axes, f"{task}, {kind}, λ = {penalty:g}", found[task, kind, penalty], inputs)
    figure.savefig(out / "shapes.png", dpi=120)
    print(f"table and picture in {out}")
    return found


if __name__ == "__main__":
    main()
