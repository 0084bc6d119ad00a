"""Which unitary systems can be learned from their inputs and outputs: W in all of U(N), against the restricted form.

The states of a unitary RNN with a hidden W_sys are the target of a network that differs from it in W alone. ``python
examples/system_identification.py`` trains all dimensions at once, and for each both kinds of W_sys, all starts and both
models as one batch of matrices, and prints the table of Wisdom et al., 2016 (table 1). The full model takes Cayley
steps of fixed length λ, the restricted one RMSprop steps on its 7N parameters; both start from the same restricted
matrices, which are also tested as they are ("frozen"). Both may choose their rate, λ or lr, from the same ``--rates``,
by the validation error after ``--search`` iterations.

W_u is a random restricted W, W_g the product of two. Errors are divided by E|h|²: predicting zero has error 1.
``--capacity`` trains nothing, and asks how near to a given W the restricted form comes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from harness.cli import claim, parse, positive
from harness.identification import KINDS, Systems, draw_bars, draw_curves, table, verdict
from torch import Tensor
from tqdm import tqdm

from manopt_torch import ManifoldParameter, Unitary
from manopt_torch.nn.factors import phases, restricted, unit
from manopt_torch.nn.unitary_maps import RestrictedUnitary
from manopt_torch.optim import RiemannianSGD

MODELS = ("full", "restricted")
#: the ratio full / restricted to reach at the largest N
RATIO = 0.7
#: of ``--capacity``: what it takes for zero, its steps at most, bounds of its damping, gradients that end it
REACHED, DESCENT, DAMPING, STATIONARY = 1e-6, 300, (1e-14, 1e6), 1e-12


class Training:
    """All networks, M = 2 models each, with their rates ``(λ, lr)``; :meth:`load` of a :meth:`state` resumes it."""

    def __init__(self, args: argparse.Namespace, rates: tuple[float, float]) -> None:
        self.rates, self.done = rates, 0
        self.systems = [Systems(N, args) for N in args.dimensions]
        self.full = [ManifoldParameter(system.restricted.matrix().detach(), Unitary()) for system in self.systems]
        self.optimizers = (
            RiemannianSGD(self.full, lr=2 * rates[0]),  # on U(N) the Cayley step of length λ has lr = 2λ
            torch.optim.RMSprop([p for s in self.systems for p in s.parameters()], lr=rates[1], alpha=0.9),
        )
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
                optimizer.step()
                optimizer.zero_grad()
            self.done += 1
        weights = self.weights()
        error = self.evaluate(weights, "validation")[1]
        better = (error < self.curve.amin(0))[..., None, None]
        self.best = [torch.where(*triple) for triple in zip(better, weights, self.best, strict=True)]
        self.curve = torch.cat([self.curve, error.unsqueeze(0)])

    def state(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("rates", "done", "best", "curve")}
        optimizers, systems = ([part.state_dict() for part in parts] for parts in (self.optimizers, self.systems))
        return {**values, "full": [W.detach() for W in self.full], "systems": systems, "optimizers": optimizers}

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.best, self.curve = state["done"], state["best"], state["curve"]
        for W, kept in zip(self.full, state["full"], strict=True):
            W.data.copy_(kept)
        for system, kept in zip(self.systems, state["systems"], strict=True):
            system.load_state_dict(kept)
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)


def search(args: argparse.Namespace) -> tuple[float, float]:
    """The rate of each model with the lowest geometric mean of all its validation errors after a short training."""
    if len(args.rates) == 1:
        return args.rates[0], args.rates[0]
    means = []
    for rate in tqdm(args.rates, "rates", disable=None):
        short = Training(args, (rate, rate))
        short.advance(args.search)
        means.append(short.curve[-1].log().mean((0, 1, 3)).exp())
        print(f"rate {rate:g}: mean error {_named(means[-1])}", flush=True)
    full, restricted = torch.stack(means).argmin(0).tolist()
    return args.rates[full], args.rates[restricted]


def _named(errors: Tensor) -> str:
    return ", ".join(f"{model} {error:.3f}" for model, error in zip(MODELS, errors.tolist(), strict=True))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Search, train, and test once with each network's best W; results in a folder."""
    start, out = time.perf_counter(), claim(args)
    torch.set_num_threads(args.threads)
    last = out / "checkpoints" / "last.ckpt"
    last.parent.mkdir(exist_ok=True)
    kept = torch.load(last, weights_only=True) if args.resume else None
    training = Training(args, tuple(kept["rates"]) if kept else search(args))
    if kept:
        training.load(kept)
    with tqdm(total=args.iterations, initial=training.done, disable=None) as progress:
        while training.done < args.iterations:
            steps = min(args.every, args.iterations - training.done)
            training.advance(steps)
            torch.save({**training.state(), "epoch": len(training.curve) - 2}, last)
            progress.update(steps)
            if progress.disable and training.done % (args.every * max(1, args.iterations // args.every // 20)) == 0:
                means = training.curve[-1].log().mean((0, 1, 3)).exp()
                print(
                    f"iteration {training.done}: mean error {_named(means)}, {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    frozen = [Systems(N, args).restricted.matrix().detach().unsqueeze(1) for N in args.dimensions]
    weights = [torch.cat(pair, 1) for pair in zip(training.best, frozen, strict=True)]
    mse, error = training.evaluate(weights, "test")
    validation = torch.cat([training.curve.amin(0), training.curve[0, :, :, :1]], 2)
    chosen, models = validation.argmin(-1), (*MODELS, "frozen")
    best = error.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    text = [
        f"normalised MSE in the test, of the start that is best in validation (in brackets the mean of {args.starts}):",
        table(error, chosen, args.dimensions, models, published=True),
        "MSE, not divided by E|h|²:",
        table(mse, chosen, args.dimensions, models, published=False),
        f"rates: λ = {training.rates[0]:g} (full), lr = {training.rates[1]:g} (restricted); {training.done} iterations",
        *(verdict(kind, args.dimensions[-1], best[-1, k], RATIO) for k, kind in enumerate(KINDS)),
        f"residual of the full W: {max(W.manifold.residual(W.detach()).max().item() for W in training.full):.1e}",
    ]
    print(*text, sep="\n")
    (out / "results.md").write_text("\n\n".join(text) + "\n")
    draw_curves(training.curve, args.every, args.dimensions, MODELS, out / "curves.png")
    draw_bars(best, args.dimensions, models, out / "bars.png")
    print(f"{time.perf_counter() - start:.0f} s; table, curves.png and bars.png in {out}")
    return {"best": best, "curve": training.curve, "out": out}


def distances(target: Tensor, starts: RestrictedUnitary) -> Tensor:
    """‖W(θ) − target‖_F (S,), sorted, after descents over θ from S starts.

    Damped Gauss-Newton steps: the damping of a start falls threefold after a step that descends, and grows fourfold
    after one that does not, which is taken back (Levenberg, 1944; Marquardt, 1963).
    """
    N, permutation, rows = starts.size, starts.permutation[0], torch.eye(starts.size, dtype=target.dtype)

    def residual(x: Tensor) -> Tensor:
        """(..., 2N²), for parameters (..., 7N)."""
        theta, re, im = (part.unflatten(-1, (-1, N)) for part in x.split((3 * N, 2 * N, 2 * N), -1))
        W = restricted(rows, phases(theta), unit(torch.complex(re, im)), permutation).mT
        return torch.view_as_real(W - target).flatten(-3)

    v = starts.reflection.detach()
    x = torch.cat([part.flatten(1) for part in (starts.theta.detach(), v.real, v.imag)], 1)
    r, damping, identity = residual(x), torch.ones(len(x), 1, 1, dtype=x.dtype), torch.eye(7 * N, dtype=x.dtype)
    directions = identity.unsqueeze(1).repeat(1, len(x), 1)
    for _ in range(DESCENT):
        copies = x.repeat(7 * N, 1, 1)  # of all starts, one for each parameter
        J = torch.func.jvp(residual, (copies,), (directions,))[1].movedim(0, -1)
        g = (J.mT @ r.unsqueeze(-1)).squeeze(-1)
        candidate = x - torch.linalg.solve(J.mT @ J + damping * identity, g)
        new = residual(candidate)
        descends = new.norm(dim=1, keepdim=True) < r.norm(dim=1, keepdim=True)
        x, r = torch.where(descends, candidate, x), torch.where(descends, new, r)
        damping = torch.where(descends.unsqueeze(-1), damping / 3, damping * 4).clamp(*DAMPING)
        if g.abs().max() < STATIONARY:
            break
    return r.norm(dim=1).sort().values


@torch.no_grad()
def capacity(args: argparse.Namespace) -> dict[tuple[str, int], Tensor]:
    """Distances (S,) from targets of three kinds to the restricted matrices, by kind and N; a table."""
    found = {}
    print("| target | N | min(N², 7N − 7) of N² | nearest | median | starts within 1e-6 |", "|---" * 6 + "|", sep="\n")
    for N in args.dimensions:
        torch.manual_seed(args.seed)
        starts = RestrictedUnitary(N, batch_shape=(args.starts,), dtype=torch.complex128)
        factors = RestrictedUnitary(N, batch_shape=(3,), dtype=torch.complex128)
        for buffer in (starts.permutation, factors.permutation):
            buffer.copy_(starts.permutation[0].expand_as(buffer))
        A, B, C = factors.matrix()
        haar = Unitary().random(N, N, dtype=A.dtype)
        for kind, target in zip((*KINDS, "Haar"), (A, B @ C, haar), strict=True):
            d = found[kind, N] = distances(target, starts)
            print(
                f"| {kind} | {N} | {min(N * N, 7 * N - 7)} of {N * N} | {d[0]:.1e} | {d.median():.1e} | "
                f"{(d <= REACHED).sum()} of {len(d)} |",
                flush=True,
            )
    return found


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(experiment="system_identification")
    add = parser.add_argument
    add("--dimensions", type=positive, nargs="+", default=[4, 6, 7, 8, 16], metavar="N", help="(%(default)s)")
    add("--starts", type=positive, default=6, help="initial values of each network (%(default)s)")
    add("--steps", type=positive, default=150, help="length T of a sequence (%(default)s)")
    add("--batch", type=positive, default=20, help="sequences per step (%(default)s)")
    add("--train", type=positive, default=20000, help="sequences (%(default)s)")
    add("--validation", type=positive, default=200, help="sequences (%(default)s)")
    add("--test", type=positive, default=1000, help="sequences (%(default)s)")
    add("--rates", type=float, nargs="+", default=[1e-3, 1e-2], metavar="RATE", help="(%(default)s)")
    add("--search", type=positive, default=100, help="iterations with each rate (%(default)s)")
    add("--iterations", type=positive, default=2500, help="of the training (%(default)s)")
    add("--every", type=positive, default=50, help="iterations between two validations (%(default)s)")
    add("--seed", type=int, default=0, help="of systems, starts and noise (%(default)s)")
    add("--threads", type=positive, default=1, help="of torch (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="continue the run in --out (the newest under runs/)")
    add("--paper", action="store_true", help="the published protocol: 100 epochs, rate 0.001, no search")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    add("--capacity", action="store_true", help="how near to a given W the restricted form comes; no training")
    presets: dict[str, dict[str, Any]] = {
        "paper": {"iterations": 40000, "batch": 50, "validation": 1000, "rates": [1e-3], "every": 400},
        "smoke": {
            "dimensions": [2, 4], "starts": 2, "steps": 10, "batch": 5, "train": 20, "validation": 10, "test": 10,
            "rates": [1e-3, 1e-2], "search": 2, "iterations": 4, "every": 2,
        },
    }  # fmt: skip
    args = parse(parser, argv, presets)
    args.dimensions.sort()
    if args.capacity:
        capacity(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
