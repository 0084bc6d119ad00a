"""Loss against time of every first-order optimizer on orthogonal matrices, beside the peers, in one run.

    pip install -c constraints.txt -e ".[examples,bench]" && python benchmarks/first_order.py

Three problems, each minimized by everybody from the same start:

* ``pca``: the 50 leading principal components of 400 vectors in R^2000, one Stiefel matrix 2000×50;
* ``procrustes``: 1,000 matrices 16×16, min ½ Σ ‖X_i − A_i‖², as 1,000 parameters;
* ``mlp``: cross-entropy of all 1,797 digits under a network 64-64-64-64-10 with three orthogonal weights.

The step size of each contestant is the best of a grid: of the lowest mean logarithm of its gap over a short run, so
that nobody wins by tuning, and one that diverges there is not chosen. Time is that of forward, backward and step, with
one thread. The picture shows the gap to the optimum over seconds; the table tells seconds to three gaps, the last gap,
and the largest ‖XᴴX − I‖_F at the end: a lower loss of matrices that are not orthogonal does not count (†).
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from common import RESULTS, environment_line, markdown, orthogonality, save
from torch import Tensor, nn

import manopt_torch.optim
from manopt_torch import ManifoldParameter, Stiefel, param_groups
from manopt_torch.optim import RiemannianOptimizer, riemannian

Loss = Callable[[list[Tensor], list[Tensor]], Tensor]
Step = Callable[[], Tensor]  # one iteration; the loss before it

#: relative gaps (loss − optimum) / |loss of the start − optimum| whose times are told
GAPS = (1e-1, 1e-2, 1e-4)
#: a point is on the manifold up to here, in single precision
ON_MANIFOLD = 1e-3
#: and further than this, what its losses say of a step size is not believed (Landing stays within it)
NEAR = 0.5
#: seconds after which a trial, and a run, is cut off
TRIAL, LIMIT = 1.5, 15.0
#: what step sizes are tried, as multiples of a contestant's own unit
GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Problem(NamedTuple):
    """Orthogonal ``start`` matrices, ``free`` ones beside them, the loss of both, its least value."""

    start: list[Tensor]
    free: list[Tensor]
    loss: Loss
    optimum: float


def pca() -> Problem:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(400, 2000, generator=generator) * torch.linspace(2, 0.1, 2000).square()
    data = data / torch.linalg.svdvals(data)[0]
    start = Stiefel().random(2000, 50, generator=generator)
    least = -torch.linalg.svdvals(data.double())[:50].square().sum().item()
    return Problem([start], [], lambda xs, _: -(data @ xs[0]).square().sum(), least)


def procrustes() -> Problem:
    generator = torch.Generator().manual_seed(0)
    start = [Stiefel().random(16, 16, generator=generator) for _ in range(1000)]
    targets = torch.randn(1000, 16, 16, generator=generator) / 4
    sign = (torch.linalg.det(torch.stack(start)) * torch.linalg.det(targets)).sign()
    targets[:, :, 0] *= sign[:, None]  # the optimum in the component of O(16) where the start is
    sigma = torch.linalg.svdvals(targets.double())
    least = (0.5 * (targets.double().square().sum((1, 2)) + 16) - sigma.sum(1)).sum().item()
    return Problem(start, [], lambda xs, _: 0.5 * (torch.stack(xs) - targets).square().sum(), least)


def mlp() -> Problem:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    start = [Stiefel().random(64, 64, generator=generator) for _ in range(3)]
    free = [torch.zeros(64) for _ in range(3)]
    free += [torch.randn(10, 64, generator=generator) / 8, torch.zeros(10)]

    def loss(xs: list[Tensor], free: list[Tensor]) -> Tensor:
        h = x
        for W, b in zip(xs, free, strict=False):
            h = F.leaky_relu(F.linear(h, W, b))
        return F.cross_entropy(F.linear(h, free[-2], free[-1]), y)

    return Problem(start, free, loss, 0.0)


PROBLEMS = {"pca": (pca, 150), "procrustes": (procrustes, 60), "mlp": (mlp, 200)}  # and steps


class Contestant(NamedTuple):
    """``weights()`` are the matrices that the forward pass uses; the optimizers step them and what is free."""

    weights: Callable[[], list[Tensor]]
    free: list[Tensor]
    optimizers: Sequence[torch.optim.Optimizer]


#: starts, free tensors, step size as a multiple of the contestant's unit
Build = Callable[[list[Tensor], list[Tensor], float], Contestant]


def _free(free: list[Tensor]) -> list[Tensor]:
    return [nn.Parameter(t.clone()) for t in free]


def _adam(free: list[Tensor], scale: float) -> list[torch.optim.Optimizer]:
    """What optimizes the free parameters where a peer's own optimizer takes matrices only."""
    return [torch.optim.Adam(free, lr=0.01 * scale)] if free else []


def native(kind: type[RiemannianOptimizer], unit: float, **settings: Any) -> Build:
    """One of ours, for everything; ``unit`` its step size."""

    def build(start: list[Tensor], free: list[Tensor], scale: float) -> Contestant:
        xs, rest = [ManifoldParameter(x.clone(), Stiefel()) for x in start], _free(free)
        optimizer = kind([{"params": xs, "manifold": Stiefel()}], lr=unit * scale, **settings)  # type: ignore[call-arg]
        return Contestant(lambda: list(xs), rest, [optimizer, *_adam(rest, scale)])

    return build


def wrapped(kind: type[torch.optim.Optimizer], unit: float, frame: Any = "tangent", **settings: Any) -> Build:
    def build(start: list[Tensor], free: list[Tensor], scale: float) -> Contestant:
        model = nn.ParameterList(ManifoldParameter(x.clone(), Stiefel()) for x in start)
        rest = _free(free)
        base = kind(param_groups(model), lr=unit * scale, **settings)  # type: ignore[call-arg]
        return Contestant(lambda: list(model), rest, [riemannian(base, frame=frame), *_adam(rest, scale)])

    return build


def geoopt_optimizer(name: str, unit: float, **settings: Any) -> Build:
    def build(start: list[Tensor], free: list[Tensor], scale: float) -> Contestant:
        import geoopt

        xs, rest = [geoopt.ManifoldParameter(x.clone(), manifold=geoopt.EuclideanStiefel()) for x in start], _free(free)
        optimizer = getattr(geoopt.optim, name)(xs, lr=unit * scale, **settings)
        return Contestant(lambda: list(xs), rest, [optimizer, *_adam(rest, scale)])

    return build


def parametrized(library: str) -> Build:
    def build(start: list[Tensor], free: list[Tensor], scale: float) -> Contestant:
        if library == "geotorch":
            from geotorch import orthogonal
        else:
            from torch.nn.utils.parametrizations import orthogonal
        modules = nn.ModuleList()
        for x in start:
            module = nn.Module()
            module.weight = nn.Parameter(x.clone())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                orthogonal(module, "weight")
            module.weight = x.clone()  # geotorch starts at a random point of its own
            modules.append(module)
        rest = _free(free)
        optimizer = torch.optim.Adam(modules.parameters(), lr=0.01 * scale)
        return Contestant(lambda: [cast(Tensor, m.weight) for m in modules], rest, [optimizer, *_adam(rest, scale)])

    return build


def pogo(base: str, unit: float) -> Build:
    def build(start: list[Tensor], free: list[Tensor], scale: float) -> Contestant:
        import pogo as peer
        from pogo import base as rules

        rest = _free(free)
        xs = [nn.Parameter(x.clone().unsqueeze(0)) for x in start]
        rule = rules.SGD(momentum=0.9) if base == "SGD" else rules.VectorAdam()
        optimizer = peer.POGO(xs, rule, lr=unit * scale, rows=False, check_size=False)
        return Contestant(lambda: [x[0] for x in xs], rest, [optimizer, *_adam(rest, scale)])

    return build


def contestants() -> dict[str, Build]:
    """Everybody; step sizes in units of a gradient's size for SGD, of a matrix's for what normalises it."""
    found: dict[str, Build] = {}
    for name in manopt_torch.optim.__all__:
        kind = getattr(manopt_torch.optim, name)
        if not isinstance(kind, type) or not issubclass(kind, RiemannianOptimizer) or kind is RiemannianOptimizer:
            continue
        if name in ("RiemannianSGD", "Landing", "POGO"):
            found[f"{name}, momentum 0.9"] = native(kind, 0.1, momentum=0.9)
        else:
            found[name] = native(kind, 0.3)
    found["POGO, betas"] = native(manopt_torch.optim.POGO, 0.3, betas=(0.9, 0.999))
    found |= {
        "riemannian(torch SGD, momentum 0.9)": wrapped(torch.optim.SGD, 0.1, momentum=0.9),
        "riemannian(torch Adam)": wrapped(torch.optim.Adam, 0.01),
        "riemannian(torch RMSprop), ambient": wrapped(torch.optim.RMSprop, 0.003, "ambient"),
        "riemannian(torch Adagrad)": wrapped(torch.optim.Adagrad, 0.1),
        "geoopt RiemannianSGD, momentum 0.9": geoopt_optimizer("RiemannianSGD", 0.1, momentum=0.9),
        "geoopt RiemannianAdam": geoopt_optimizer("RiemannianAdam", 0.3),
        "geotorch + torch Adam": parametrized("geotorch"),
        "torch parametrization + Adam": parametrized("torch"),
        "pogo-torch, SGD, momentum 0.9": pogo("SGD", 0.1),
        "pogo-torch, VectorAdam": pogo("VectorAdam", 0.3),
    }
    return found


def trace(problem: Problem, build: Build, scale: float, steps: int, seconds: float) -> dict[str, Any]:
    """Times and losses before each step, and how orthogonal the matrices are at the end."""
    contestant = build(problem.start, problem.free, scale)
    times, losses, spent = [], [], 0.0
    for _ in range(steps + 1):
        begin = time.perf_counter()
        loss = problem.loss(contestant.weights(), contestant.free)
        losses.append(loss.item())
        times.append(spent)
        if len(losses) > steps or spent > seconds or not math.isfinite(losses[-1]):
            break
        for optimizer in contestant.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in contestant.optimizers:
            optimizer.step()
        spent += time.perf_counter() - begin
    with torch.no_grad():
        residual = max(orthogonality(x) for x in contestant.weights())
    return {"scale": scale, "times": times, "losses": losses, "residual": residual}


def gaps(problem: Problem, losses: Sequence[float]) -> list[float]:
    """(loss − optimum) / (loss of the start − optimum), never below what single precision shows."""
    whole = losses[0] - problem.optimum
    return [max((f - problem.optimum) / whole, 1e-7) if math.isfinite(f) else math.inf for f in losses]


def tuned(problem: Problem, build: Build, steps: int, seconds: float) -> float:
    """The step size of the lowest mean logarithm of the gap in a run of ``steps``."""

    def score(scale: float) -> float:
        run = trace(problem, build, scale, steps, seconds)
        found = gaps(problem, run["losses"])
        if not math.isfinite(found[-1]) or run["residual"] > NEAR:
            return math.inf
        return sum(map(math.log, found)) / len(found)

    return min(GRID, key=score)


def run(name: str, quick: bool, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row for each contestant."""
    make, steps = PROBLEMS[name]
    problem, steps = make(), max(6, steps // 10) if quick else steps
    rows = []
    for title, build in contestants().items():
        if only and title not in only:
            continue
        row: dict[str, Any] = {"problem": name, "contestant": title, "left_out": ""}
        try:
            scale = tuned(problem, build, max(4, steps // 4), TRIAL)
            found = trace(problem, build, scale, steps, LIMIT)
        except (NotImplementedError, RuntimeError, ImportError, ValueError) as error:
            rows.append(row | {"left_out": f"{type(error).__name__}: {error}".splitlines()[0][:160]})
            continue
        gap = gaps(problem, found["losses"])
        when = list(zip(found["times"], gap, strict=True))
        reached = {f"seconds_to_{g:g}": next((t for t, v in when if v <= g), None) for g in GAPS}
        per_step = found["times"][-1] / max(1, len(gap) - 1)
        rows.append(row | found | reached | {"gap": gap, "ms": 1e3 * per_step, "last": gap[-1]})
        print(f"{name}: {title}: gap {gap[-1]:.2g} after {found['times'][-1]:.2f} s", flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By problem, who reached the gaps first on top."""
    shown = []
    for row in sorted((r for r in rows if not r["left_out"]), key=lambda r: r["last"]):
        astray = "†" if row["residual"] > ON_MANIFOLD else ""
        times = ["-" if row[f"seconds_to_{g:g}"] is None else row[f"seconds_to_{g:g}"] for g in GAPS]
        shown.append([row["contestant"] + astray, row["ms"], *times, row["last"], row["residual"]])
    shown += [[r["contestant"], r["left_out"], *["-"] * (len(GAPS) + 2)] for r in rows if r["left_out"]]
    header = ("", "ms / step", *(f"s to {g:g}" for g in GAPS), "last gap", "‖XᴴX − I‖_F")
    return f"### {rows[0]['problem']}\n\n{markdown(header, shown)}\n"


def draw(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(names), 5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for i, row in enumerate(r for r in rows if r["problem"] == name and not r["left_out"]):
            peer = row["contestant"].startswith(("geo", "torch", "pogo"))
            axes.plot(
                row["times"], row["gap"], "--" if peer else "-", color=f"C{i % 10}", label=row["contestant"],
                linewidth=1 if i < 10 else 2,
            )  # fmt: skip
        axes.set(title=name, xlabel="seconds", ylabel="gap to the optimum, start = 1", yscale="log", xscale="log")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "first_order.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these contestants only")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for name in args.problems for row in run(name, args.quick, args.only)]
    tables = [table([r for r in rows if r["problem"] == name]) for name in args.problems]
    report = "\n".join([environment_line() + "\n", *tables])
    print(report)
    draw(rows, args.problems)
    kept = ("problem", "contestant", "left_out", "scale", "ms", "last", "residual")
    save("first_order", [{k: row.get(k) for k in kept} for row in rows], report, quick=args.quick)


if __name__ == "__main__":
    main()
