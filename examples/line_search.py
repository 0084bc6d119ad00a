"""Is a line search along the Cayley curve worth its evaluations? Beside steps of fixed length.

Wisdom et al. (2016) take Cayley steps of a fixed λ and remark that a search which satisfies the conditions of Armijo
and Wolfe could choose it. Here both find a hidden W of U(N) from 100 sequences of white noise and the states that W
makes of them, full batch, from the same start. ``python examples/line_search.py`` prints how many evaluations of cost
and gradient each needs to lower the error by given factors, in the median over starts, and draws the error over
evaluations. What steps of fixed length are given is the best λ of a grid, which the searches do not have to know.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness.cli import new_folder, positive
from harness.plots import draw_lines
from torch import Tensor

from manopt_torch import Unitary
from manopt_torch.nn.recurrence import unitary_recurrence
from manopt_torch.solvers import LBFGS, ConjugateGradient, GradientDescent, Solver, minimize
from manopt_torch.solvers.line_search import Armijo, HagerZhang, StrongWolfe

#: error / error of the start, whose evaluations are told
FACTORS = (1e-1, 1e-2, 1e-4)
#: λ of steps of fixed length
GRID = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
SOLVERS: dict[str, Solver] = {
    "steepest descent, Armijo": GradientDescent(Armijo()),
    "steepest descent, strong Wolfe": GradientDescent(StrongWolfe()),
    "steepest descent, Hager-Zhang": GradientDescent(HagerZhang()),
    "conjugate gradients": ConjugateGradient(),
    "L-BFGS": LBFGS(),
}

Curve = list[tuple[float, float]]  # evaluations so far, lowest error so far


def identification(size: int, steps: int, seed: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The mean square error of W, and a start near enough to the hidden one to be led to it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = Unitary().random(size, size, dtype=torch.complex128, generator=generator)
    noise = torch.randn(steps, 100, size, 2, dtype=torch.float64, generator=generator)
    x = torch.view_as_complex(noise) / math.sqrt(2)
    V, b, h0 = torch.eye(size, dtype=x.dtype), torch.full((size,), -0.1, dtype=torch.float64), x.new_zeros(100, size)
    target = unitary_recurrence(x, V, hidden, b, h0)
    u = Unitary().project(hidden, torch.randn(size, size, dtype=x.dtype, generator=generator))
    start = Unitary().retract(hidden, 0.5 * u / u.norm() * math.sqrt(size))
    return lambda W: torch.view_as_real(unitary_recurrence(x, V, W, b, h0) - target).square().mean(), start


def searched(cost: Callable[[Tensor], Tensor], start: Tensor, solver: Solver, budget: int) -> Curve:
    """The curve of a solver, until it has had its ``budget`` of evaluations."""
    curve: Curve = [(2, cost(start).item())]

    def follow(result: object) -> None:
        curve.append((result.nfev + result.njev, result.fun))  # type: ignore[attr-defined]
        if curve[-1][0] >= budget:
            raise StopIteration

    minimize(cost, Unitary(), start, solver, tolerance_grad=1e-12, max_iter=budget, callback=follow)
    return curve


def fixed(cost: Callable[[Tensor], Tensor], start: Tensor, rate: float, budget: int) -> Curve:
    """The curve of Cayley steps of length λ = ``rate``; a step costs one error and one gradient."""
    W = start
    curve: Curve = []
    for evaluations in range(2, budget + 1, 2):
        leaf = W.detach().requires_grad_()
        error = cost(leaf)
        curve.append((evaluations, min(error.item(), curve[-1][1] if curve else math.inf)))
        (gradient,) = torch.autograd.grad(error, leaf)
        W = Unitary().retract(W, -2 * rate * Unitary().rgrad(W, gradient))  # λ is lr / 2 on U(N)
    return curve


def needed(curve: Curve, factor: float) -> float:
    """Evaluations until the error is ``factor`` times that of the start; inf if they were not enough."""
    return next((float(n) for n, error in curve if error <= factor * curve[0][1]), math.inf)


def table(curves: dict[str, list[Curve]]) -> str:
    """Medians over starts, Markdown."""

    def cell(found: Sequence[Curve], factor: float) -> str:
        median = statistics.median(needed(curve, factor) for curve in found)
        return f"{median:.0f}" if math.isfinite(median) else "-"

    rows = [[name, *(cell(found, factor) for factor in FACTORS)] for name, found in curves.items()]
    header = ["evaluations until the error is", *(f"{factor:g} of the start's" for factor in FACTORS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("size", 8, "N of W"),
        ("steps", 20, "of a sequence"),
        ("starts", 5, "hidden matrices and starts"),
        ("budget", 400, "evaluations of cost and gradient, counted one each"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the picture goes (a new one under runs/)")
    parser.add_argument("--smoke", action="store_true", help="sizes that run in seconds")
    args = parser.parse_args(argv)
    if args.smoke:
        args.size, args.steps, args.starts, args.budget = 3, 5, 1, 40
    torch.set_num_threads(1)
    out = args.out or new_folder(Path("runs") / "line_search")
    out.mkdir(parents=True, exist_ok=True)
    problems = [identification(args.size, args.steps, args.seed + i) for i in range(args.starts)]
    runs = {rate: [fixed(*problem, rate, args.budget) for problem in problems] for rate in GRID}
    order = sorted(GRID, key=lambda rate: statistics.median(curve[-1][1] for curve in runs[rate]))
    curves = {f"fixed λ = {rate:g}": runs[rate] for rate in order[:3]}
    for name, solver in SOLVERS.items():
        curves[name] = [searched(*problem, solver, args.budget) for problem in problems]
    text = table(curves)
    print(text)
    (out / "results.md").write_text(text + "\n")
    draw_lines(
        {name: found[0] for name, found in curves.items()}, out / "line_search.png",
        xlabel="evaluations of cost and gradient", ylabel="mean square error, first start",
    )  # fmt: skip
    print(f"picture and table in {out}")


if __name__ == "__main__":
    main()
