"""Time of one optimizer step on orthogonal matrices, beside geoopt, geotorch and torch, in one run.

    pip install -c constraints.txt -e ".[bench]" && python benchmarks/step.py

The loss is ½ Σ ‖X_i − A_i‖² with random A_i; its gradient X_i − A_i is handed to ``torch.autograd.backward``, so that
the loss itself costs next to nothing and what is measured is the constraint's own cost. All contestants start at the
same points and run in turns of a few steps, so that a change of the machine's speed meets all of them. Two medians:

* ``step``: ``optimizer.step()`` alone;
* ``all``: forward (where a parametrization computes its matrix), backward and step.

Beside them the loss (mean per matrix) after the same number of steps, to be compared with the optimum in the title, and
the largest ‖XᴴX − I‖_F. Step sizes agree: a second moment per matrix moves the matrix by lr = 0.05 √p, an elementwise
one gets lr / √(np).
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from common import DTYPES, environment_line, markdown, orthogonality, save
from torch import Tensor, nn

from manopt_torch import ManifoldParameter, param_groups
from manopt_torch.manifolds import Manifold, Stiefel
from manopt_torch.optim import RiemannianAdam, riemannian


class Case(NamedTuple):
    """``number`` parameters of one shape, and how many steps they are given."""

    number: int
    shape: tuple[int, ...]
    steps: int


CASES = {
    "256x(16,16)": Case(256, (16, 16), 40),
    "64x(64,64)": Case(64, (64, 64), 40),
    "1000x(3,3)": Case(1000, (3, 3), 30),
    "8x(1024,64)": Case(8, (1024, 64), 15),
    "1x(4096,16)": Case(1, (4096, 16), 15),
    "1x(512,512)": Case(1, (512, 512), 20),
    "batch(256,32,32)": Case(1, (256, 32, 32), 20),
}
TURN = 5  # steps before the next contestant has its turn
WARM_UP = 3  # first steps of the first turn: run, not timed
PROBED_FROM = 1000  # rows from which on a peer must first show, in a process of its own, that it can be waited for
PROBE_SECONDS = 30.0  # for import, construction and two steps


class Contestant(NamedTuple):
    """``weights()`` is the forward pass: the matrices, from whatever is optimized."""

    weights: Callable[[], list[Tensor]]
    optimizer: torch.optim.Optimizer


Start = list[Tensor]
Build = Callable[[Start, float], Contestant]  # initial matrices, lr of an elementwise second moment / √(np)


def ours(manifold: Manifold) -> Build:
    def build(start: Start, lr: float) -> Contestant:
        params = [ManifoldParameter(x, manifold) for x in start]
        return Contestant(lambda: list(params), RiemannianAdam(params, lr=lr))

    return build


def wrapped(start: Start, lr: float) -> Contestant:
    model = nn.ParameterList(ManifoldParameter(x, Stiefel()) for x in start)
    optimizer = riemannian(torch.optim.Adam(param_groups(model), lr=elementwise(lr, start), foreach=True))
    return Contestant(lambda: list(model), optimizer)


def geoopt_adam(name: str) -> Build:
    def build(start: Start, lr: float) -> Contestant:
        import geoopt

        params = [geoopt.ManifoldParameter(x, manifold=getattr(geoopt, name)()) for x in start]
        return Contestant(lambda: list(params), geoopt.optim.RiemannianAdam(params, lr=lr))

    return build


def geotorch_adam(start: Start, lr: float) -> Contestant:
    import geotorch

    return _parametrized(start, lr, geotorch.orthogonal)


def torch_orthogonal(start: Start, lr: float) -> Contestant:
    return _parametrized(start, lr, nn.utils.parametrizations.orthogonal)


def _parametrized(start: Start, lr: float, register: Callable[[nn.Module, str], Any]) -> Contestant:
    modules = nn.ModuleList()
    for x in start:
        module = nn.Module()
        module.weight = nn.Parameter(x.clone())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex modules are announced as new
            register(module, "weight")
        module.weight = x  # geotorch starts at a random point of its own
        modules.append(module)
    optimizer = torch.optim.Adam(modules.parameters(), lr=elementwise(lr, start), foreach=True)
    return Contestant(lambda: [cast(Tensor, module.weight) for module in modules], optimizer)


def torch_adam(start: Start, lr: float) -> Contestant:
    params = [nn.Parameter(x.clone()) for x in start]
    return Contestant(lambda: list(params), torch.optim.Adam(params, lr=elementwise(lr, start), foreach=True))


def elementwise(lr: float, start: Start) -> float:
    """The rate at which an elementwise second moment moves a matrix as far as a scalar one does at ``lr``."""
    return lr / math.sqrt(start[0].shape[-2] * start[0].shape[-1])


OURS = "manopt_torch, Stiefel()"
OURS_CANONICAL = 'manopt_torch, Stiefel(metric="canonical")'
OURS_QR = 'manopt_torch, Stiefel(retraction="qr")'
WRAPPED = "manopt_torch, riemannian(torch Adam)"
GEOOPT_CANONICAL = "geoopt, CanonicalStiefel (Cayley)"
GEOOPT_EUCLIDEAN = "geoopt, EuclideanStiefel (QR)"
GEOTORCH = "geotorch.orthogonal + torch Adam"
TORCH_ORTHOGONAL = "torch parametrizations.orthogonal + Adam"
TORCH_ADAM = "torch Adam(foreach), no constraint"
CONTESTANTS: dict[str, Build] = {
    OURS: ours(Stiefel()),
    OURS_CANONICAL: ours(Stiefel(metric="canonical")),
    OURS_QR: ours(Stiefel(retraction="qr")),
    WRAPPED: wrapped,
    GEOOPT_CANONICAL: geoopt_adam("CanonicalStiefel"),
    GEOOPT_EUCLIDEAN: geoopt_adam("EuclideanStiefel"),
    GEOTORCH: geotorch_adam,
    TORCH_ORTHOGONAL: torch_orthogonal,
    TORCH_ADAM: torch_adam,
}
PEERS = (GEOOPT_CANONICAL, GEOOPT_EUCLIDEAN, GEOTORCH, TORCH_ORTHOGONAL)
IN_FORWARD = (GEOTORCH, TORCH_ORTHOGONAL)  # compared by `all`, since their cost sits in forward and backward

# (title, numerator, denominator); the time is `all` where the peer's cost sits in forward, `step` elsewhere
RATIOS = [
    ("ours / geoopt canonical", OURS, GEOOPT_CANONICAL),
    ("ours / geoopt Euclidean", OURS, GEOOPT_EUCLIDEAN),
    ("canonical, Cayley: ours / geoopt", OURS_CANONICAL, GEOOPT_CANONICAL),
    ("Euclidean, QR: ours / geoopt", OURS_QR, GEOOPT_EUCLIDEAN),
    ("ours / geotorch (all)", OURS, GEOTORCH),
    ("ours / torch orthogonal (all)", OURS, TORCH_ORTHOGONAL),
    ("ours / torch Adam", OURS, TORCH_ADAM),
]
TARGETS = [  # (case, ratio, at most), float32
    ("256x(16,16)", RATIOS[0][0], 1 / 10),
    ("256x(16,16)", RATIOS[1][0], 1 / 7),
    ("1000x(3,3)", RATIOS[0][0], 1 / 10),
    ("1000x(3,3)", RATIOS[1][0], 1 / 10),
    ("1x(4096,16)", RATIOS[0][0], 1 / 100),
    ("1000x(3,3)", RATIOS[6][0], 1.0),
    *((case, RATIOS[i][0], 1.0) for i in (2, 3) for case in CASES),
]


class Problem(NamedTuple):
    """The starting points, the targets A, the step size, and the least loss on the manifold (mean per matrix)."""

    start: list[Tensor]
    targets: list[Tensor]
    lr: float
    optimum: float


def problem(case: Case, dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(0)
    start = [Stiefel().random(*case.shape, dtype=dtype, generator=generator) for _ in range(case.number)]
    targets = [torch.randn(case.shape, dtype=dtype, generator=generator) for _ in start]
    n, p = case.shape[-2:]
    if n == p and not dtype.is_complex:  # the optimum should be in the component of O(n) where the start is
        for x, a in zip(start, targets, strict=True):
            a[..., 0] *= (torch.linalg.det(x) * torch.linalg.det(a)).sign().unsqueeze(-1)
    # min ½‖X − A‖² = ½ (‖A‖² + p) − ‖A‖_*
    sigma = torch.linalg.svdvals(torch.stack(targets))
    optimum = (0.5 * (sigma.square().sum(-1) + p) - sigma.sum(-1)).mean().item()
    return Problem(start, targets, 0.05 * math.sqrt(p), optimum)


def one_step(contestant: Contestant, targets: list[Tensor]) -> tuple[float, float]:
    """(seconds of ``optimizer.step()``, seconds of forward + backward + step)."""
    contestant.optimizer.zero_grad()
    begin = time.perf_counter()
    weights = contestant.weights()
    torch.autograd.backward(weights, torch._foreach_sub([w.detach() for w in weights], targets))
    between = time.perf_counter()
    contestant.optimizer.step()
    end = time.perf_counter()
    return end - between, end - begin


def probe(name: str, case: str, dtype: str, threads: int) -> str:
    """Two steps in a process of their own; the reason to leave the contestant out, or nothing."""
    command = [sys.executable, __file__, "--probe", name, "--cases", case, "--dtype", dtype, "--threads", str(threads)]
    try:
        subprocess.run(command, timeout=PROBE_SECONDS, check=True, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"two steps take more than {PROBE_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        return error.stderr.decode().strip().splitlines()[-1][:160]
    return ""


def run_case(title: str, case: Case, dtype: str, threads: int) -> list[dict[str, Any]]:
    """One row per contestant, after ``case.steps`` steps of each, taken in turns."""
    start, targets, lr, optimum = problem(case, DTYPES[dtype])
    running, left_out = {}, {}
    for name, build in CONTESTANTS.items():
        reason = probe(name, title, dtype, threads) if name in PEERS and case.shape[-2] >= PROBED_FROM else ""
        if not reason:
            try:
                running[name] = build([x.clone() for x in start], lr)
                one_step(build([x.clone() for x in start], lr), targets)  # a peer's refusal shows here
            except (NotImplementedError, RuntimeError, ImportError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                running.pop(name, None)
        if reason:
            left_out[name] = reason
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for done in range(0, case.steps, TURN):
        for name, contestant in running.items():
            times[name] += [one_step(contestant, targets) for _ in range(min(TURN, case.steps - done))]
    rows = []
    for name in CONTESTANTS:
        row: dict[str, Any] = {"case": title, "dtype": dtype, "contestant": name, "optimum": optimum}
        if name in running:
            step, everything = zip(*times[name][WARM_UP:], strict=True)
            with torch.no_grad():
                x, a = torch.stack(running[name].weights()), torch.stack(targets)
                loss = 0.5 * torch.linalg.vector_norm(x - a, dim=(-2, -1)).square().mean().item()
            row |= {"step_ms": 1e3 * statistics.median(step), "all_ms": 1e3 * statistics.median(everything)}
            row |= {"steps": case.steps, "loss": loss, "residual": orthogonality(x)}
        rows.append(row | {"left_out": left_out.get(name, "")})
    return rows


def case_table(rows: Sequence[dict[str, Any]], steps: int) -> str:
    first = rows[0]
    title = f"### {first['case']}, {first['dtype']} (optimum {first['optimum']:.4g}, {steps} steps)"
    header = ("", "step, ms", "forward + backward + step, ms", "loss", "‖XᴴX − I‖_F")
    shown = [
        (r["contestant"], "-", "-", "-", r["left_out"])
        if r["left_out"]
        else (r["contestant"], r["step_ms"], r["all_ms"], f"{r['loss']:.4g}", r["residual"])
        for r in rows
    ]
    return f"{title}\n\n{markdown(header, shown)}\n"


def ratio(rows: Sequence[dict[str, Any]], case: str, dtype: str, over: str, under: str) -> float | None:
    """Time of ``over`` divided by that of ``under``; None where one of them was left out."""
    found = {r["contestant"]: r for r in rows if r["case"] == case and r["dtype"] == dtype and not r["left_out"]}
    if over not in found or under not in found:
        return None
    key = "all_ms" if under in IN_FORWARD else "step_ms"
    return float(found[over][key] / found[under][key])


def ratio_table(rows: Sequence[dict[str, Any]]) -> str:
    """Every ratio; † the peer ran, and left the manifold."""
    astray = {(r["case"], r["dtype"], r["contestant"]) for r in rows if r.get("residual", 0) > 1e-2}
    table = []
    for case, dtype in dict.fromkeys((r["case"], r["dtype"]) for r in rows):
        line: list[object] = [f"{case}, {dtype}"]
        for _, over, under in RATIOS:
            value = ratio(rows, case, dtype, over, under)
            mark = "†" if under != TORCH_ADAM and (case, dtype, under) in astray else ""
            line.append("-" if value is None else f"{value:.3g}{mark}")
        table.append(line)
    title = "### Ratios of time (below 1: ours is faster); † the peer leaves the manifold; - it cannot run, see above"
    return f"{title}\n\n{markdown(('', *(name for name, _, _ in RATIOS)), table)}\n"


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    """The ratios that were set out to be reached, in float32."""
    named = {title: (over, under) for title, over, under in RATIOS}
    table = []
    for case, title, most in TARGETS:
        value = ratio(rows, case, "float32", *named[title])
        if value is not None:
            table.append([case, title, value, f"≤ {most:.3g}", "reached" if value <= most else "MISSED"])
    return f"### Targets (float32)\n\n{markdown(('case', 'ratio', 'measured', 'target', ''), table)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the steps (at least 8)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=" ".join(CASES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--probe", choices=CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.probe:
        start, targets, lr, _ = problem(CASES[args.cases[0]], DTYPES[args.dtype[0]])
        contestant = CONTESTANTS[args.probe](start, lr)
        for _ in range(2):
            one_step(contestant, targets)
        return
    report: list[str] = []

    def show(text: str) -> None:
        report.append(text)
        print(text, flush=True)

    show(environment_line() + "\n")
    rows: list[dict[str, Any]] = []
    for title in args.cases:
        case = CASES[title]
        case = case._replace(steps=max(8, case.steps // 3)) if args.quick else case
        for dtype in args.dtype:
            rows += run_case(title, case, dtype, args.threads)
            show(case_table(rows[-len(CONTESTANTS) :], case.steps))
    show(ratio_table(rows))
    show(target_table(rows))
    save("step", rows, "\n".join(report), quick=args.quick, turn=TURN)


if __name__ == "__main__":
    main()
