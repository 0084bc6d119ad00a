"""Calls and seconds of full-batch solvers to an optimum that is known, beside pymanopt, in one run.

    pip install -c constraints.txt -e ".[bench]" && python benchmarks/solvers.py

Every contestant starts at the same points and runs until (f − f*)/max(1, |f*|) ≤ 1e-10. A call is an evaluation of the
cost, of its gradient, or a Hessian-vector product, each counted once: of ours those that ``Result`` counts when an
iteration has reached the optimum, of pymanopt the runs of the cost, of which each of the three needs one, until one of
them returns the optimum. Medians over starts; one that never arrives is told as such.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import environment_line, markdown, save
from torch import Tensor

from manopt_torch import SPD, Manifold, Sphere, Stiefel, Unitary
from manopt_torch.solvers import LBFGS, AdaptiveRegularization, ConjugateGradient, Result, Solver, TrustRegion, minimize

#: relative gap at which the clock stops, and seconds after which it is stopped
GAP, LIMIT = 1e-10, 20.0
OURS: dict[str, Solver] = {
    "ConjugateGradient": ConjugateGradient(),
    "LBFGS": LBFGS(),
    "TrustRegion": TrustRegion(),
    "AdaptiveRegularization": AdaptiveRegularization(),
}
PEERS = ("ConjugateGradient", "TrustRegions")
DOUBLE = torch.float64


class Problem(NamedTuple):
    """``peer(pymanopt.manifolds)`` is the same manifold there; ``optimum`` is f*, known from elsewhere."""

    manifold: Manifold
    shape: tuple[int, ...]
    cost: Callable[[Tensor], Tensor]
    optimum: float
    peer: Callable[[Any], Any]
    dtype: torch.dtype = DOUBLE


def symmetric(n: int, generator: torch.Generator) -> Tensor:
    a = torch.randn(n, n, dtype=DOUBLE, generator=generator)
    return (a + a.mH) / 2


def pca() -> Problem:
    data = torch.randn(200, 500, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    data = data * torch.linspace(2, 0.1, 500, dtype=DOUBLE)
    optimum = -torch.linalg.svdvals(data)[:10].square().sum().item()
    return Problem(
        Stiefel(), (500, 10), lambda x: -(data @ x).square().sum(), optimum, lambda peer: peer.Stiefel(500, 10)
    )


def brockett() -> Problem:
    a, weights = symmetric(100, torch.Generator().manual_seed(0)), torch.arange(5.0, 0, -1, dtype=DOUBLE)
    optimum = (torch.linalg.eigvalsh(a)[:5] * weights).sum().item()
    return Problem(
        Stiefel(), (100, 5), lambda x: (x * (a @ x) * weights).sum(), optimum, lambda peer: peer.Stiefel(100, 5)
    )


def rayleigh() -> Problem:
    a = symmetric(200, torch.Generator().manual_seed(0))
    optimum = torch.linalg.eigvalsh(a)[0].item()
    return Problem(Sphere(), (200,), lambda x: x @ (a @ x), optimum, lambda peer: peer.Sphere(200))


def procrustes() -> Problem:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, n, dtype=DOUBLE, generator=generator) for n in (30, 8))
    target = torch.linalg.svdvals(a.mH @ b).sum().item()

    def cost(x: Tensor) -> Tensor:
        return -(a.mH @ b * x).sum()

    return Problem(Stiefel(), (30, 8), cost, -target, lambda peer: peer.Stiefel(30, 8))


def karcher() -> Problem:
    """The mean of ten 10×10 matrices of condition number 1e3; f* by an independent fixed-point iteration."""
    generator = torch.Generator().manual_seed(0)
    q = Stiefel().random(10, 10, 10, dtype=DOUBLE, generator=generator)
    points = (q * torch.logspace(-1.5, 1.5, 10, dtype=DOUBLE)) @ q.mH
    roots = torch.linalg.inv(torch.linalg.cholesky(points))

    def cost(x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(roots @ x @ roots.mH).log().square().sum() / 2

    def power(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        w, v = torch.linalg.eigh(x)
        return (v * f(w).unsqueeze(-2)) @ v.mH

    x = points.mean(0)
    for _ in range(100):  # x ← x^½ exp(½ mean log(x^-½ pᵢ x^-½)) x^½: with 1 for ½ it does not settle
        root, inverse = power(x, torch.sqrt), power(x, torch.rsqrt)
        x = root @ power(power(inverse @ points @ inverse, torch.log).mean(0) / 2, torch.exp) @ root
    return Problem(SPD(), (10, 10), cost, cost(x).item(), lambda peer: peer.SymmetricPositiveDefinite(10))


def unitary_procrustes() -> Problem:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, 20, dtype=torch.complex128, generator=generator)
    optimum = -torch.linalg.svdvals(a).sum().item()
    return Problem(
        Unitary(), (20, 20), lambda x: -(a.conj() * x).sum().real, optimum, lambda peer: peer.UnitaryGroup(20), a.dtype
    )


PROBLEMS = {f.__name__: f for f in (pca, brockett, rayleigh, procrustes, karcher, unitary_procrustes)}


def gap(problem: Problem, f: float) -> float:
    return (f - problem.optimum) / max(1.0, abs(problem.optimum))


def ours(problem: Problem, start: Tensor, solver: Solver) -> tuple[float, float, str]:
    """(calls, seconds, why it did not arrive)."""
    begin, found = time.perf_counter(), []

    def follow(result: Result) -> None:
        if gap(problem, result.fun) <= GAP:
            found.append((result.nfev + result.njev + result.nhev, time.perf_counter() - begin))
            raise StopIteration

    result = minimize(
        problem.cost,
        problem.manifold,
        start,
        solver,
        tolerance_grad=0,
        max_iter=5000,
        max_seconds=LIMIT,
        callback=follow,
    )
    return (*found[0], "") if found else (math.inf, math.inf, f"gap {gap(problem, result.fun):.1e}: {result.message}")


class Arrived(Exception):
    """The cost was evaluated at the optimum."""


def theirs(problem: Problem, start: Tensor, name: str) -> tuple[float, float, str]:
    import pymanopt

    calls, begin, best = 0, time.perf_counter(), math.inf
    manifold = problem.peer(pymanopt.manifolds)

    @pymanopt.function.pytorch(manifold)
    def cost(x: Tensor) -> Tensor:
        nonlocal calls, best
        calls += 1
        f = problem.cost(x)
        best = min(best, f.item())
        if gap(problem, f.item()) <= GAP:
            raise Arrived
        return f

    optimizer = getattr(pymanopt.optimizers, name)(
        max_iterations=5000, max_time=LIMIT, min_gradient_norm=0, min_step_size=0, verbosity=0
    )
    try:
        optimizer.run(pymanopt.Problem(manifold, cost), initial_point=start.numpy().copy())
        reason = f"gap {gap(problem, best):.1e}"
    except Arrived:
        return calls, time.perf_counter() - begin, ""
    except Exception as error:  # whatever a peer raises is told in the table
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return math.inf, math.inf, reason


def run(name: str, starts: int) -> list[dict[str, Any]]:
    """One row for each contestant; the first start of each is run once before, untimed."""
    problem = PROBLEMS[name]()
    generator = torch.Generator().manual_seed(1)
    points = [problem.manifold.random(*problem.shape, dtype=problem.dtype, generator=generator) for _ in range(starts)]
    contestants: dict[str, Callable[[Tensor], tuple[float, float, str]]] = {
        title: lambda x, solver=solver: ours(problem, x, solver)  # type: ignore[misc]
        for title, solver in OURS.items()
    }
    for peer in PEERS:
        contestants[f"pymanopt {peer}"] = lambda x, peer=peer: theirs(problem, x, peer)  # type: ignore[misc]
    rows = []
    for title, contestant in contestants.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contestant(points[0])
            found = [contestant(x) for x in points]
        calls, seconds = statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)
        rows.append({"problem": name, "solver": title, "calls": calls, "seconds": seconds, "failures": found[0][2]})
        print(f"{name}: {title}: {calls:.0f} calls, {seconds:.3g} s {found[0][2]}", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """The best of ours over the best of pymanopt's, by problem, and the geometric mean."""
    table, logs = [], []
    for name in dict.fromkeys(row["problem"] for row in rows):
        best = []
        for peer in (False, True):
            mine = [r for r in rows if r["problem"] == name and r["solver"].startswith("pymanopt") == peer]
            best.append((min(r["calls"] for r in mine), min(r["seconds"] for r in mine)))
        ratios = [a / b if math.isfinite(b) else 0.0 for a, b in zip(*best, strict=True)]
        table.append([name, best[0][0], best[1][0], ratios[0], best[0][1], best[1][1], ratios[1]])
        logs += [math.log(ratios[0])] if 0 < ratios[0] < math.inf else []
    header = ("", "calls, best of ours", "of pymanopt", "ratio", "s, best of ours", "of pymanopt", "ratio")
    mean = math.exp(sum(logs) / len(logs)) if logs else math.nan
    return f"{markdown(header, table)}\n\ngeometric mean of the ratios of calls, where both arrive: {mean:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one start")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for name in args.problems for row in run(name, 1 if args.quick else args.starts)]
    keys = ("problem", "solver", "calls", "seconds", "failures")
    report = "\n\n".join([environment_line(), markdown(keys, [[r[k] for k in keys] for r in rows]), summary(rows)])
    print(report)
    save("solvers", rows, report, starts=args.starts)


if __name__ == "__main__":
    main()
