"""Calls and seconds of full-batch solvers to an optimum that is known, beside pymanopt and geoopt, in one run.

    pip install -c constraints.txt -e ".[bench]" && python benchmarks/solvers.py

Every contestant starts at the same points and runs until (f − f*)/max(1, |f*|) ≤ 1e-10. A call is an evaluation of the
cost, of its gradient, or a Hessian-vector product, each counted once: of ours those that ``Result`` counts when an
iteration has reached the optimum, of pymanopt the runs of the cost, of which each of the three needs one, until one of
them returns the optimum; of geoopt's line search, whose closure computes cost and gradient together, two for each run.
Medians over starts; one that never arrives is told as such.
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
    """``peer(pymanopt.manifolds)`` is the same manifold there; ``optimum`` is f*, known from elsewhere.

    Where a point has another shape there, ``there`` and ``here`` take ours to theirs and back."""

    manifold: Manifold
    shape: tuple[int, ...]
    cost: Callable[[Tensor], Tensor]
    optimum: float
    peer: Callable[[Any], Any]
    dtype: torch.dtype = DOUBLE
    there: Callable[[Tensor], Tensor] = lambda x: x
    here: Callable[[Tensor], Tensor] = lambda x: x


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


def power(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f of symmetric matrices."""
    w, v = torch.linalg.eigh(x)
    return (v * f(w).unsqueeze(-2)) @ v.mH


def definite(n: int, condition: float, count: int, generator: torch.Generator) -> Tensor:
    q = Unitary().random(count, n, n, dtype=DOUBLE, generator=generator)
    half = math.log10(condition) / 2
    return (q * torch.logspace(-half, half, n, dtype=DOUBLE)) @ q.mH


def frechet(n: int, condition: float, count: int) -> Problem:
    """The mean of definite matrices; f* by an independent fixed-point iteration."""
    points = definite(n, condition, count, torch.Generator().manual_seed(0))
    roots = torch.linalg.inv(torch.linalg.cholesky(points))

    def cost(x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(roots @ x @ roots.mH).log().square().sum() / 2

    x, step = points.mean(0), 1 / math.log(condition)
    for _ in range(600):  # x ← x^½ exp(t mean log(x^-½ pᵢ x^-½)) x^½: with t = 1 it does not settle
        root, inverse = power(x, torch.sqrt), power(x, torch.rsqrt)
        tangent = power(inverse @ points @ inverse, torch.log).mean(0)
        x = root @ power(min(1.0, 3 * step) * tangent, torch.exp) @ root
        if tangent.norm() < 1e-13 * n:
            break
    return Problem(SPD(), (n, n), cost, cost(x).item(), lambda peer: peer.SymmetricPositiveDefinite(n))


def karcher() -> Problem:
    """The mean of ten 10×10 matrices of condition number 1e3."""
    return frechet(10, 1e3, 10)


def karcher_30() -> Problem:
    """The mean of five 30×30 matrices of condition number 1e6."""
    return frechet(30, 1e6, 5)


def karcher_50() -> Problem:
    """The mean of five 50×50 matrices of condition number 1e6."""
    return frechet(50, 1e6, 5)


def certified(cost: Callable[[Tensor], Tensor], c: Tensor, shape: tuple[int, ...]) -> float:
    """min ⟨C, V Vᴴ⟩ over unit rows, where weak duality proves it: C − diag(C V Vᴴ) is positive semidefinite."""
    start = Sphere().random(*shape, dtype=c.dtype, generator=torch.Generator().manual_seed(3))
    result = minimize(cost, Sphere(), start, TrustRegion(), tolerance_grad=1e-11)
    bound = ((c @ result.x) * result.x.conj()).sum(1).real
    assert torch.linalg.eigvalsh(c - torch.diag(bound))[0] > -1e-7
    return bound.sum().item()


def max_cut() -> Problem:
    """The relaxation for 50 nodes, vectors of 11 dimensions."""
    c = symmetric(50, torch.Generator().manual_seed(0))

    def cost(v: Tensor) -> Tensor:
        return ((c @ v) * v).sum()

    best = certified(cost, c, (50, 11))
    return Problem(
        Sphere(), (50, 11), cost, best, lambda peer: peer.Oblique(11, 50), there=lambda x: x.mT, here=lambda x: x.mT
    )


def phase_synchronization() -> Problem:
    """100 phases from their noisy quotients."""
    n, generator = 100, torch.Generator().manual_seed(0)
    z = torch.polar(torch.ones(n, dtype=DOUBLE), 2 * math.pi * torch.rand(n, dtype=DOUBLE, generator=generator))
    noise = torch.randn(n, n, dtype=torch.complex128, generator=generator)
    c = -(z[:, None] * z.conj() + (noise + noise.mH) / 2)

    def cost(x: Tensor) -> Tensor:
        return (x.conj() * (c @ x)).real.sum()

    return Problem(
        Sphere(),
        (n, 1),
        cost,
        certified(cost, c, (n, 1)),
        lambda peer: peer.ComplexCircle(n),
        torch.complex128,
        lambda x: x[:, 0],
        lambda x: x[:, None],
    )


def joint_diagonalization() -> Problem:
    """Ten 12×12 matrices with common eigenvectors, off-diagonal entries to be removed; from nearby."""
    generator = torch.Generator().manual_seed(0)
    q = Stiefel().random(12, 12, dtype=DOUBLE, generator=generator)
    matrices = (q * torch.randn(10, 1, 12, dtype=DOUBLE, generator=generator)) @ q.mH
    total = matrices.square().sum()

    def cost(x: Tensor) -> Tensor:  # the diagonal has all of ‖A‖² at best
        return total - (x * (matrices @ x)).sum(-2).square().sum()

    return Problem(Stiefel(), (12, 12), cost, 0.0, lambda peer: peer.Stiefel(12, 12))


def low_rank() -> Problem:
    """The best rank-5 approximation X XᵀA of a 100 × 80 matrix (Eckart and Young)."""
    a = torch.randn(100, 80, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) / 10
    optimum = torch.linalg.svdvals(a)[5:].square().sum().item()
    return Problem(
        Stiefel(), (100, 5), lambda x: (a - x @ (x.mH @ a)).square().sum(), optimum, lambda peer: peer.Stiefel(100, 5)
    )


def metric_learning() -> Problem:
    """tr(MS) + tr(M⁻¹D), 20 × 20 (Zadeh, Hosseini and Sra, 2016), least at S⁻¹ ♯ D."""
    generator = torch.Generator().manual_seed(0)
    s, d = definite(20, 1e2, 2, generator)
    root = power(s, torch.sqrt)
    optimum = 2 * torch.linalg.eigvalsh(root @ d @ root).sqrt().sum().item()

    def cost(m: Tensor) -> Tensor:
        return (m * s).sum() + torch.linalg.solve(m, d).diagonal().sum()

    return Problem(SPD(), (20, 20), cost, optimum, lambda peer: peer.SymmetricPositiveDefinite(20))


def mixture_covariances() -> Problem:
    """Two 5×5 covariances of a mixture with known centers and weights; f* by expectation maximization."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.tensor([[-1.5], [1.5]], dtype=DOUBLE).expand(2, 5)
    factors = torch.randn(2, 5, 5, dtype=DOUBLE, generator=generator)
    data = centers[:, None] + torch.randn(2, 200, 5, dtype=DOUBLE, generator=generator) @ factors
    gaps = data.flatten(0, 1) - centers[:, None]  # of all points, from both centers

    def logs(x: Tensor) -> Tensor:
        return -((gaps * torch.linalg.solve(x, gaps.mH).mH).sum(-1) + torch.logdet(x)[:, None]) / 2

    def cost(x: Tensor) -> Tensor:
        return -logs(x).logsumexp(0).mean()

    x = torch.eye(5, dtype=DOUBLE).repeat(2, 1, 1)
    for _ in range(3000):
        weights = logs(x).softmax(0).unsqueeze(-1)
        x = (weights * gaps).mH @ gaps / weights.sum(1, keepdim=True)
    return Problem(SPD(), (2, 5, 5), cost, cost(x).item(), lambda peer: peer.SymmetricPositiveDefinite(5, k=2))


def unitary_procrustes() -> Problem:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, 20, dtype=torch.complex128, generator=generator)
    optimum = -torch.linalg.svdvals(a).sum().item()
    return Problem(
        Unitary(), (20, 20), lambda x: -(a.conj() * x).sum().real, optimum, lambda peer: peer.UnitaryGroup(20), a.dtype
    )


PROBLEMS = {
    f.__name__: f
    for f in (
        *(pca, brockett, rayleigh, procrustes, unitary_procrustes, karcher, karcher_30, karcher_50, max_cut),
        *(phase_synchronization, joint_diagonalization, low_rank, metric_learning, mixture_covariances),
    )
}


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
        f = problem.cost(problem.here(x))
        best = min(best, f.item())
        if gap(problem, f.item()) <= GAP:
            raise Arrived
        return f

    optimizer = getattr(pymanopt.optimizers, name)(
        max_iterations=5000, max_time=LIMIT, min_gradient_norm=0, min_step_size=0, verbosity=0
    )
    try:
        optimizer.run(pymanopt.Problem(manifold, cost), initial_point=problem.there(start).numpy().copy())
        reason = f"gap {gap(problem, best):.1e}"
    except Arrived:
        return calls, time.perf_counter() - begin, ""
    except Exception as error:  # whatever a peer raises is told in the table
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return math.inf, math.inf, reason


def geoopt_search(problem: Problem, start: Tensor) -> tuple[float, float, str]:
    """geoopt's RiemannianLineSearch: conjugate gradients (Polak-Ribière) with a strong Wolfe search."""
    import geoopt

    begin, runs, best = time.perf_counter(), 0, math.inf
    kinds = {Stiefel: geoopt.Stiefel, Sphere: geoopt.Sphere, SPD: geoopt.SymmetricPositiveDefinite}
    if type(problem.manifold) not in kinds or start.is_complex():
        return math.inf, math.inf, "no such manifold"
    p = geoopt.ManifoldParameter(start.clone(), manifold=kinds[type(problem.manifold)]())
    optimizer = geoopt.optim.RiemannianLineSearch([p], line_search_method="wolfe", cg_method="pr")

    def closure() -> Tensor:
        nonlocal runs, best
        runs += 1
        optimizer.zero_grad()
        f = problem.cost(p)
        f.backward()
        best = min(best, f.item())
        if gap(problem, f.item()) <= GAP:
            raise Arrived
        return f.detach()

    try:
        while time.perf_counter() - begin < LIMIT and optimizer.step(closure) is not None:
            if optimizer.last_step_size is None:
                break
        reason = f"gap {gap(problem, best):.1e}"
    except Arrived:
        return 2 * runs, time.perf_counter() - begin, ""
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
    contestants["geoopt RiemannianLineSearch"] = lambda x: geoopt_search(problem, x)
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
    """The best of ours over the best of the peers', by problem, and the geometric mean."""
    table, logs = [], []
    for name in dict.fromkeys(row["problem"] for row in rows):
        best = []
        for peer in (False, True):
            mine = [r for r in rows if r["problem"] == name and (r["solver"] not in OURS) == peer]
            best.append((min(r["calls"] for r in mine), min(r["seconds"] for r in mine)))
        ratios = [a / b if math.isfinite(b) else 0.0 for a, b in zip(*best, strict=True)]
        table.append([name, best[0][0], best[1][0], ratios[0], best[0][1], best[1][1], ratios[1]])
        logs += [[math.log(r) for r in ratios]] if 0 < ratios[0] < math.inf else []
    header = ("", "calls, best of ours", "of peers", "ratio", "s, best of ours", "of peers", "ratio")
    calls, seconds = (math.exp(statistics.fmean(own)) for own in zip(*logs, strict=True)) if logs else (math.nan,) * 2
    return (
        f"{markdown(header, table)}\n\ngeometric means of the ratios, where both arrive: "
        f"{calls:.2f} of calls, {seconds:.2f} of seconds"
    )


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
