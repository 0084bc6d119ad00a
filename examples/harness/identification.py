"""What system_identification.py is about: batches of systems to identify, published errors, tables and pictures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from manopt_torch import Unitary
from manopt_torch.nn.factors import phases, restricted, unit
from manopt_torch.nn.recurrence import unitary_recurrence
from manopt_torch.nn.unitary_maps import RestrictedUnitary

#: kinds of W_sys: a random restricted matrix, and the product of two
KINDS = ("W_u", "W_g")
#: numbers of the first batch of each part, out of ten million for one seed
PARTS = {"train": 0, "validation": 4_000_000, "test": 8_000_000}
#: normalised MSE by W_sys, model and N (Wisdom et al., 2016, table 1), quoted, not re-checked
PUBLISHED = {
    ("W_u", "restricted"): {4: 4.81e-1, 6: 6.75e-3, 7: 3.53e-1, 8: 3.51e-1, 16: 7.30e-1},
    ("W_u", "full"): {4: 1.28e-1, 6: 3.03e-1, 7: 2.16e-1, 8: 5.04e-2, 16: 1.28e-1},
    ("W_g", "restricted"): {4: 3.21e-4, 6: 3.36e-1, 7: 3.36e-1, 8: 2.69e-1, 16: 7.60e-1},
    ("W_g", "full"): {4: 8.72e-2, 6: 3.86e-1, 7: 2.62e-1, 8: 7.22e-2, 16: 1.00e-6},
}
#: how they are named in tables and pictures
QUOTED = "published (quoted, not re-checked)"
#: the ratio full / restricted to reach at the largest N
RATIO = 0.7
#: of the capacity: what counts as zero, steps at most, bounds of the damping, gradients that end a descent
REACHED, DESCENT, DAMPING, STATIONARY = 1e-6, 300, (1e-14, 1e6), 1e-12


class Systems(nn.Module):
    """Two systems h_t = σ(W h_{t-1} + x_t) from h_0 = 0, and networks that are to imitate them, as one batch.

    ``weight``, the systems' own W: (2, N, N), one of each of ``KINDS``. ``restricted`` holds the networks' restricted
    matrices, a batch (2, S) of S starts. All these matrices have the same permutation, so that W_u is within reach of
    the restricted model. ``bias`` (2, N) of modReLU, uniform on [-0.11, -0.09], is the systems' and the networks'.

    Inputs are circular complex Gaussian white noise of unit variance, drawn anew for every batch from ``args.seed``,
    the part and the number of the batch; both systems hear the same noise.

    Uses of ``args``: starts, steps, batch, seed, and how many sequences train, validation and test have.
    """

    def __init__(self, size: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.size, self.args = size, args
        torch.manual_seed(args.seed)
        self.restricted = RestrictedUnitary(size, batch_shape=(2, args.starts))
        factors = RestrictedUnitary(size, batch_shape=(3,))
        for buffer in (factors.permutation, self.restricted.permutation):
            buffer.copy_(self.restricted.permutation[0, 0].expand_as(buffer).clone())
        with torch.no_grad():
            A, B, C = factors.matrix()
        self.weight = torch.stack([A, B @ C])
        self.bias = torch.empty(2, size).uniform_(-0.11, -0.09)

    def states(self, weight: Tensor, input: Tensor) -> Tensor:
        """(T, 2, M, S, B, N), for weights (2, M, S, N, N) of M models and input (T, B, N)."""
        batch = weight.shape[:-2]
        V = torch.eye(self.size, dtype=weight.dtype).expand_as(weight)
        b = self.bias[:, None, None].expand(*batch, -1)
        x = input[:, None, None, None].expand(-1, *batch, -1, -1)
        return unitary_recurrence(x, V, weight, b, input.new_zeros(*batch, *input.shape[1:]))

    def batch(self, part: str, number: int) -> tuple[Tensor, Tensor]:
        """The input (T, B, N) with this ``number`` of one of the ``PARTS``, and the target (T, 2, 1, 1, B, N)."""
        args = self.args
        generator = torch.Generator().manual_seed(args.seed * 10_000_000 + PARTS[part] + number)
        noise = torch.randn(args.steps, args.batch, self.size, 2, generator=generator)
        input = torch.view_as_complex(noise) / math.sqrt(2)
        with torch.no_grad():
            return input, self.states(self.weight[:, None, None], input)

    def mse(self, weight: Tensor, number: int) -> Tensor:
        """Mean square error (2, M, S) of the networks on a training batch, differentiable in ``weight``."""
        input, target = self.batch("train", number % (self.args.train // self.args.batch))
        return mean_square(self.states(weight, input) - target)

    @torch.no_grad()
    def evaluate(self, weight: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """Mean square errors (2, M, S) over all of ``part``, and the same divided by the systems' mean square."""
        batches = getattr(self.args, part) // self.args.batch
        error = power = torch.zeros(())
        for number in range(batches):
            input, target = self.batch(part, number)
            error = error + mean_square(self.states(weight, input) - target) / batches
            power = power + mean_square(target) / batches
        return error, error / power


def take_step(optimizer: torch.optim.Optimizer, step: int, total: int | None) -> None:
    """A step, and no gradients behind it; rates fall to zero along half a cosine of ``total`` steps, if not None."""
    for group in optimizer.param_groups:
        share = 1.0 if total is None else (1 + math.cos(math.pi * min(step / total, 1))) / 2
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
    optimizer.step()
    optimizer.zero_grad()


def mean_square(states: Tensor) -> Tensor:
    """Mean of |h|² over steps, sequences and units: (T, 2, M, S, B, N) to (2, M, S)."""
    return torch.view_as_real(states).square().mean((0, -3, -2, -1)) * 2


# ------------------------------------------------------------ capacity, apart from training
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


# ------------------------------------------------------------ tables and pictures
def table(errors: Tensor, chosen: Tensor, dimensions: Sequence[int], models: Sequence[str], published: bool) -> str:
    """Markdown of errors (D, 2, M, S): of the ``chosen`` starts (D, 2, M), and in brackets the mean of all.

    ``published`` errors, which are normalised, stand below; a dagger marks errors of the chosen start from 1 up.
    """
    lines = [f"| W_sys | model | {' | '.join(f'N = {N}' for N in dimensions)} |", "|---" * (2 + len(dimensions)) + "|"]
    for k, kind in enumerate(KINDS):
        for m, model in enumerate(models):
            found = [(errors[d, k, m, chosen[d, k, m]], errors[d, k, m].mean()) for d in range(len(dimensions))]
            marks = ["†" if published and best >= 1 else "" for best, _ in found]
            cells = [f"{best:.2e}{mark} ({mean:.2e})" for (best, mean), mark in zip(found, marks, strict=True)]
            lines.append(f"| {kind} | {model} | {' | '.join(cells)} |")
            if published and (kind, model) in PUBLISHED:
                old = [PUBLISHED[kind, model].get(N) for N in dimensions]
                cells = ["" if value is None else f"{value:.2e}" for value in old]
                lines.append(f"| {kind} | {model}, {QUOTED} | {' | '.join(cells)} |")
    marked = any("†" in line for line in lines)
    return "\n".join(lines) + ("\n\n† no better than predicting zero, which has error 1" if marked else "")


def verdict(kind: str, N: int, errors: Tensor) -> str:
    """One line: whether the first of ``errors``, full, is below ``RATIO`` times the second, restricted."""
    full, restricted = errors[:2].tolist()
    found = f"{kind}, N = {N}: full {full:.3f}, restricted {restricted:.3f}"
    if max(full, restricted) >= 1:
        return f"{found}; one of them is no better than predicting zero, so no ordering is claimed"
    reached = "reached" if full < RATIO * restricted else "missed"
    return f"{found}; their ratio {full / restricted:.3f} is to be below {RATIO}: {reached}"


def draw_curves(curve: Tensor, every: int, dimensions: Sequence[int], models: Sequence[str], picture: Path) -> None:
    """Normalised validation error (V, D, 2, M, S) over iterations: a panel for each kind and N, a line for a start."""
    figure = Figure(figsize=(3 * len(dimensions), 5.5), layout="constrained")
    panels = figure.subplots(2, len(dimensions), sharex=True, sharey="row", squeeze=False)
    for k, kind in enumerate(KINDS):
        for d, N in enumerate(dimensions):
            axes = panels[k, d]
            for m, model in enumerate(models):
                for s, line in enumerate(curve[:, d, k, m].unbind(-1)):
                    axes.plot(
                        np.arange(len(line)) * every, line.numpy(), f"C{m}", lw=0.8, label=model if s == 0 else None
                    )
            axes.axhline(1, color="gray", ls=":")
            axes.set(title=f"{kind}, N = {N}", yscale="log")
        panels[k, 0].set(ylabel="MSE / E|h|²")
    for axes in panels[1]:
        axes.set(xlabel="iterations")
    panels[0, 0].legend()
    figure.savefig(picture, dpi=120)


def draw_bars(best: Tensor, dimensions: Sequence[int], models: Sequence[str], picture: Path) -> None:
    """Normalised errors (D, 2, M) as bars, the published ones as black marks."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for k, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for m, model in enumerate(models):
            at = np.arange(len(dimensions)) + 0.25 * (m - (len(models) - 1) / 2)
            axes.bar(at, best[:, k, m].numpy(), 0.22, color=f"C{m}", label=model)
            known = PUBLISHED.get((KINDS[k], model), {})
            axes.plot(at, [known.get(N, math.nan) for N in dimensions], "k_", ms=12)
        axes.axhline(1, color="gray", ls=":")
        axes.set(title=f"{KINDS[k]}; black: {QUOTED}", xlabel="N", yscale="log")
        axes.set_xticks(range(len(dimensions)), [str(N) for N in dimensions])
    figure.axes[0].set(ylabel="MSE / E|h|², best start")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(models))
    figure.savefig(picture, dpi=120)
