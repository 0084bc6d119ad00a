"""How far gradients reach back: ‖∂L/∂h_t‖ against t, for recurrent networks as they start.

``python examples/gradient_flow.py`` draws it for sequences of 1,000 steps, and writes the picture and the numbers to a
new folder under runs/gradient_flow. L is the cross-entropy of one answer after the last step. With W unitary nothing
but modReLU's threshold changes the norm: with b = 0, where it is the identity, the line is flat.

Arjovsky, Shah and Bengio, 2016, fig. 2; Wisdom et al., 2016.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from harness.cli import new_folder, positive
from harness.models import MODELS, SequenceModel
from matplotlib.figure import Figure
from torch import Tensor

#: inputs and classes of the sequences of random symbols
CLASSES = 9
#: lines that may lie upon each other: each is seen beside or through the next
STYLES: dict[str, dict[str, Any]] = {
    "full": {"color": "C0", "linewidth": 5, "alpha": 0.4},
    "orthogonal": {"color": "C4", "linewidth": 3, "alpha": 0.6},
    "restricted": {"color": "C1", "linewidth": 1.5},
    "frozen": {"color": "k", "linestyle": ":"},
    "rnn": {"color": "C2", "linestyle": "--"},
    "lstm": {"color": "C3", "linestyle": "-."},
}
#: the lowest norm that a picture shows
FLOOR = 1e-30


def gradient_norms(model: SequenceModel, inputs: Tensor, labels: Tensor) -> list[float]:
    """‖∂L/∂h_t‖ for t = 1 … T, the state h_t of all sequences (B, T, M) as one vector; of an LSTM that is (h_t, c_t).

    L is the cross-entropy (a mean over B) of ``labels`` after step T. The network is unrolled step by step.
    """
    states, hx = [], None
    for x in inputs.unbind(1):
        _, hx = model.rnn(x.unsqueeze(1), hx)
        states.append(hx if isinstance(hx, tuple) else (hx,))
    loss = F.cross_entropy(model.readout(states[-1][0][-1]), labels)
    parts = [part for state in states for part in state]
    grads = torch.autograd.grad(loss, parts, allow_unused=True)  # c_T of an LSTM has no part in the answer
    squares = [0.0 if g is None else torch.linalg.vector_norm(g).item() ** 2 for g in grads]
    width = len(states[0])
    return [sum(squares[i : i + width]) ** 0.5 for i in range(0, len(squares), width)]


def picture(norms: dict[str, list[float]], file: Path) -> None:
    """‖∂L/∂h_t‖ over t, on a logarithmic scale."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in sorted(norms, key=list(STYLES).index):
        axes.semilogy(range(1, len(norms[name]) + 1), norms[name], label=name, **STYLES[name])
    shown = [value for values in norms.values() for value in values if value > FLOOR]  # of an RNN some are 0
    axes.set(xlabel="t", ylabel=r"$\|\partial L / \partial h_t\|$")
    axes.set_ylim(max(min(shown, default=FLOOR) / 10, FLOOR), max(shown, default=1.0) * 30)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(norms))
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Command line: see ``--help``. Returns the norms by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=["full", "restricted", "rnn", "lstm"], choices=MODELS, help="(%(default)s)")
    add("--length", type=positive, default=1000, metavar="T", help="steps (%(default)s)")
    add("--hidden", type=positive, default=128, help="units N of all models (%(default)s)")
    add("--batch", type=positive, default=20, help="sequences (%(default)s)")
    add("--seed", type=int, default=0, help="of initial values and sequences (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--smoke", action="store_true", help="sizes that run in seconds")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, argparse.Namespace(length=20, hidden=6, batch=2))
    norms = {}
    for name in args.models:
        L.seed_everything(args.seed, verbose=False)
        symbols = torch.randint(CLASSES, (args.batch, args.length + 1))
        inputs, labels = F.one_hot(symbols[:, :-1], CLASSES).double(), symbols[:, -1]
        model = SequenceModel(
            name, CLASSES, args.hidden, CLASSES, start="haar", last=True
        ).double()  # norms that float32 lacks
        norms[name] = gradient_norms(model, inputs, labels)
        print(f"{name:10}  ‖∂L/∂h_T‖ = {norms[name][-1]:.2e}   ‖∂L/∂h_1‖ = {norms[name][0]:.2e}", flush=True)
    out = args.out or new_folder(Path("runs") / "gradient_flow")
    out.mkdir(parents=True, exist_ok=True)
    picture(norms, out / "gradient_flow.png")
    with (out / "gradient_flow.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["t", *norms])
        rows.writerows([t, *values] for t, values in enumerate(zip(*norms.values(), strict=True), 1))
    print(f"picture and numbers in {out}")
    return norms


if __name__ == "__main__":
    main()
