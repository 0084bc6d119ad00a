"""Which unitary systems can be learned from their inputs and outputs: W in all of U(N), against the restricted form.

The states of a unitary RNN with a hidden W_sys are the target of a network that differs from it in W alone. ``python
examples/system_identification.py`` trains all dimensions at once, and for each both kinds of W_sys, all starts and both
models as one batch of matrices, and prints the table of Wisdom et al., 2016 (table 1). The full model takes Cayley
steps of fixed length λ, the restricted one RMSprop steps on its 7N parameters; both start from the same restricted
matrices, which are also tested as they are ("frozen"). For every dimension both may choose their rate, λ or lr, from
the same ``--rates``, by the validation error after ``--search`` iterations; it then falls to zero along half a cosine.

W_u is a random restricted W, W_g the product of two. Errors are divided by E|h|²: predicting zero has error 1.
``--capacity`` trains nothing, and asks how near to a given W the restricted form comes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from harness.cli import claim, keep, parse, positive
from harness.identification import KINDS, Systems, capacity, draw_bars, draw_curves, table, take_step, verdict
from torch import Tensor
from tqdm import tqdm

from manopt_torch import ManifoldParameter, Unitary
from manopt_torch.optim import RiemannianSGD

MODELS = ("full", "restricted")
NUMBERS = (
    ("starts", 6, "initial values of each network"),
    ("steps", 150, "length T of a sequence"),
    ("batch", 20, "sequences per step"),
    ("train", 20000, "sequences"),
    ("validation", 200, "sequences"),
    ("test", 1000, "sequences"),
    ("search", 100, "iterations with each rate, before the training"),
    ("iterations", 2500, "of the training"),
    ("every", 50, "iterations between two validations"),
    ("threads", 1, "of torch"),
)
FLAGS = {
    "resume": "continue the run in --out (the newest under runs/)",
    "paper": "the published protocol: 100 epochs of 20,000 sequences, rate 0.001 for both, no search",
    "smoke": "sizes that run in seconds and learn nothing",
    "capacity": "how near to a given W the restricted form comes, from so many starts; no training",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "iterations": 40000, "batch": 50, "validation": 1000, "rates": [1e-3], "every": 400, "schedule": "constant"
    },
    "smoke": {
        "dimensions": [2, 4], "starts": 2, "steps": 10, "batch": 5, "train": 20, "validation": 10, "test": 10,
        "rates": [1e-3, 1e-2], "search": 2, "iterations": 4, "every": 2,
    },
}  # fmt: skip


class Training:
    """All networks, M = 2 models each, with rates (λ, lr) for each N; :meth:`load` of a :meth:`state` resumes it.

    The rates fall to zero over ``total`` iterations, or are constant if that is None.
    """

    def __init__(self, args: argparse.Namespace, rates: list[list[float]], total: int | None = None) -> None:
        self.rates, self.total, self.done = rates, total, 0
        self.systems = [Systems(N, args) for N in args.dimensions]
        self.full = [ManifoldParameter(system.restricted.matrix().detach(), Unitary()) for system in self.systems]
        λ, lr = zip(*rates, strict=True)
        self.optimizers = (
            RiemannianSGD(  # on U(N) the Cayley step of length λ has lr = 2λ
                [{"params": [W], "manifold": W.manifold, "lr": 2 * r} for W, r in zip(self.full, λ, strict=True)], lr=0
            ),
            torch.optim.RMSprop(
                [{"params": s.parameters(), "lr": r} for s, r in zip(self.systems, lr, strict=True)], alpha=0.9
            ),
        )
        self.parts: list[Any] = [*self.systems, *self.optimizers]
        self.best = self.weights()
        self.curve = self.evaluate(self.best, "validation")[1].unsqueeze(0)

    def weights(self) -> list[Tensor]:
        """(2, M, S, N, N) for each N."""
        pairs = zip(self.full, self.systems, strict=True)
        return [torch.stack([full.detach(), system.restricted.matrix().detach()], 1) for full, system in pairs]

    def evaluate(self, weights: list[Tensor], part: str) -> tuple[Tensor, Tensor]:
        """Errors (D, 2, M, S) as they are and normalised, on one of the parts of the data."""
        errors = [system.evaluate(weight, part) for system, weight in zip(self.systems, weights, strict=True)]
        mse, normalised = zip(*errors, strict=True)
        return torch.stack(mse), torch.stack(normalised)

    def advance(self, iterations: int) -> None:
        """Train, then validate: the curve (V, D, 2, M, S) grows, and every network's best W is kept."""
        for _ in range(iterations):
            for full, system in zip(self.full, self.systems, strict=True):
                weight = torch.stack([full, system.restricted.matrix()], 1)
                system.mse(weight, self.done).sum().backward()  # no network's gradient depends on another's error
            for optimizer in self.optimizers:
                take_step(optimizer, self.done, self.total)
            self.done += 1
        weights = self.weights()
        error = self.evaluate(weights, "validation")[1]
        better = (error < self.curve.amin(0))[..., None, None]
        self.best = [torch.where(*triple) for triple in zip(better, weights, self.best, strict=True)]
        self.curve = torch.cat([self.curve, error.unsqueeze(0)])

    def state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("rates", "done", "best", "curve")},
            "full": [W.detach() for W in self.full],
            "parts": [part.state_dict() for part in self.parts],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.best, self.curve = state["done"], state["best"], state["curve"]
        for W, kept in zip(self.full, state["full"], strict=True):
            W.data.copy_(kept)
        for part, kept in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(kept)


def means(curve: Tensor) -> str:
    """The last validation error of each model, in the geometric mean over dimensions, kinds and starts."""
    found = curve[-1].log().mean((0, 1, 3)).exp().tolist()
    return ", ".join(f"{model} {value:.3f}" for model, value in zip(MODELS, found, strict=True))


def search(args: argparse.Namespace) -> list[list[float]]:
    """For each N and model the rate with the lowest error after a short training, in the mean of logarithms."""
    errors = []
    for rate in args.rates if len(args.rates) > 1 else []:
        short = Training(args, [[rate, rate]] * len(args.dimensions))
        short.advance(args.search)
        errors.append(short.curve[-1].log().mean((1, 3)))
        print(f"rate {rate:g}: mean error {means(short.curve)}", flush=True)
    best = torch.stack(errors).argmin(0) if errors else torch.zeros(len(args.dimensions), 2, dtype=torch.int64)
    return [[args.rates[i] for i in pair] for pair in best.tolist()]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Search, train, and test once with each network's best W; results in a folder."""
    start, out = time.perf_counter(), claim(args)
    torch.set_num_threads(args.threads)
    last = out / "checkpoints" / "last.ckpt"
    last.parent.mkdir(exist_ok=True)
    kept = torch.load(last, weights_only=True) if args.resume else None
    training = Training(
        args, kept["rates"] if kept else search(args), args.iterations if args.schedule == "cosine" else None
    )
    if kept:
        training.load(kept)
    for epoch in tqdm(range(training.done // args.every, args.epochs), disable=None):
        training.advance(args.every)
        keep({**training.state(), "epoch": epoch}, last)
        if (epoch + 1) % max(1, args.epochs // 20) == 0:
            tqdm.write(
                f"iteration {training.done}: mean error {means(training.curve)}, {time.perf_counter() - start:.0f} s"
            )
    frozen = [Systems(N, args).restricted.matrix().detach().unsqueeze(1) for N in args.dimensions]
    mse, error = training.evaluate([torch.cat(pair, 1) for pair in zip(training.best, frozen, strict=True)], "test")
    chosen = torch.cat([training.curve.amin(0), training.curve[0, :, :, :1]], 2).argmin(-1)
    best, models = error.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), (*MODELS, "frozen")
    rates = [", ".join(f"{rate:g}" for rate in model) for model in zip(*training.rates, strict=True)]
    text = [
        f"normalised MSE in the test, of the start that is best in validation (in brackets the mean of {args.starts}):",
        table(error, chosen, args.dimensions, models, published=True),
        "MSE, not divided by E|h|²:",
        table(mse, chosen, args.dimensions, models, published=False),
        f"rates by N: λ = {rates[0]} (full), lr = {rates[1]} (restricted); {training.done} iterations",
        *(verdict(kind, args.dimensions[-1], best[-1, k]) for k, kind in enumerate(KINDS)),
        f"residual of the full W: {max(W.manifold.residual(W.detach()).max().item() for W in training.full):.1e}",
    ]
    print(*text, sep="\n")
    (out / "results.md").write_text("\n\n".join(text) + "\n")
    draw_curves(training.curve, args.every, args.dimensions, MODELS, out / "curves.png")
    draw_bars(best, args.dimensions, models, out / "bars.png")
    print(f"{time.perf_counter() - start:.0f} s; table, curves.png and bars.png in {out}")
    return {"best": best, "curve": training.curve, "out": out}


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(experiment="system_identification")
    add = parser.add_argument
    add("--dimensions", type=positive, nargs="+", default=[4, 6, 7, 8, 16], metavar="N", help="(%(default)s)")
    add("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3, 1e-2], metavar="RATE", help="(%(default)s)")
    for name, default, meaning in NUMBERS:
        add(f"--{name}", type=positive, default=default, help=f"{meaning} (%(default)s)")
    add("--schedule", default="cosine", choices=("cosine", "constant"), help="of the rates (%(default)s)")
    add("--seed", type=int, default=0, help="of systems, starts and noise (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    for name, meaning in FLAGS.items():
        add(f"--{name}", action="store_true", help=meaning)
    args = parse(parser, argv, PRESETS)
    if args.batch > min(args.train, args.validation, args.test):
        parser.error(f"--batch {args.batch} is more than --train, --validation or --test has")
    args.dimensions.sort()
    (capacity if args.capacity else run)(args)


if __name__ == "__main__":
    main()
