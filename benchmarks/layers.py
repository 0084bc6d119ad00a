"""Time of a whole training step of layers with an orthogonal weight: both schools, beside torch and geotorch.

    pip install -c constraints.txt -e ".[bench]" && python benchmarks/layers.py

A step is ``zero_grad``, forward, the mean square of the output, backward and ``step()`` of SGD at one rate. Contestants
run in turns of a few steps, so that a change of the machine's speed meets all of them; medians are given, and the
largest ‖WᴴW − I‖_F at the end. A residual of this library above ``FEASIBLE`` is an error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from common import environment_line, markdown, orthogonality, save
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from manopt_torch import constrain, named_manifolds, parametrize
from manopt_torch.manifolds import Stiefel
from manopt_torch.optim import RiemannianSGD


class Case(NamedTuple):
    """A layer of torch, which of its weights is orthogonal, and the shape of a batch."""

    build: Callable[[], nn.Module]
    weight: str
    batch: tuple[int, ...]


CASES = {
    "Linear(64, 64)": Case(lambda: nn.Linear(64, 64), "weight", (32, 64)),
    "Linear(256, 256)": Case(lambda: nn.Linear(256, 256), "weight", (32, 256)),
    "Linear(16, 1024)": Case(lambda: nn.Linear(16, 1024), "weight", (32, 16)),
    "Conv2d(16, 32, 3)": Case(lambda: nn.Conv2d(16, 32, 3), "weight", (8, 16, 12, 12)),
    "RNN(16, 128), 50 steps": Case(lambda: nn.RNN(16, 128), "weight_hh_l0", (50, 32, 16)),
}
LR = 0.01
FEASIBLE = 1e-4
TURN, WARM_UP = 5, 2  # steps before the next contestant has its turn; first steps, run but not timed

Register = Callable[[nn.Module, str], Any]


def geotorch_orthogonal(module: nn.Module, name: str) -> None:
    import geotorch

    geotorch.orthogonal(module, name)


OURS = "constrain + RiemannianSGD"
CONTESTANTS: dict[str, Register] = {
    OURS: lambda module, name: constrain(module, name, Stiefel()),
    "parametrize, Cayley": lambda module, name: parametrize(module, name, Stiefel()),
    "parametrize, exp": lambda module, name: parametrize(module, name, Stiefel(retraction="exp")),
    "torch orthogonal, Cayley": lambda m, n: parametrizations.orthogonal(m, n, orthogonal_map="cayley"),
    "torch orthogonal, exp": lambda m, n: parametrizations.orthogonal(m, n, orthogonal_map="matrix_exp"),
    "geotorch orthogonal": geotorch_orthogonal,
    "no constraint": lambda module, name: None,
}
#: geotorch and torch know no kernels of four dimensions as one matrix
MATRICES_ONLY = ("torch orthogonal, Cayley", "torch orthogonal, exp", "geotorch orthogonal")


def matrix(w: Tensor) -> Tensor:
    """The weight as a matrix that is not wide."""
    w = w.detach().flatten(1)
    return w.mH if w.shape[0] < w.shape[1] else w


def trainer(case: Case, register: Register) -> tuple[nn.Module, Callable[[], None]]:
    """A layer, and a function that does one training step of it."""
    torch.manual_seed(0)
    layer, x = case.build(), torch.randn(case.batch)
    register(layer, case.weight)
    riemannian = any(True for _ in named_manifolds(layer))
    optimizer = RiemannianSGD(layer, lr=LR) if riemannian else torch.optim.SGD(layer.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
        optimizer.step()

    return layer, step


def run_case(title: str, case: Case, steps: int) -> list[dict[str, Any]]:
    """One row for each contestant: milliseconds of a step, and the residual after all of them."""
    tall = len(case.build().get_parameter(case.weight).shape) > 2
    names = [name for name in CONTESTANTS if not (tall and name in MATRICES_ONLY)]
    trainers = {name: trainer(case, CONTESTANTS[name]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    while len(times[names[0]]) < steps + WARM_UP:
        for name, (_, step) in trainers.items():
            for _ in range(TURN):
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    rows = []
    for name, (layer, _) in trainers.items():
        residual = orthogonality(matrix(getattr(layer, case.weight)))
        if name.startswith(("constrain", "parametrize")) and not residual <= FEASIBLE:
            raise RuntimeError(f"{title}: {name} ended at residual {residual:.1e}, above {FEASIBLE:.0e}")
        ms = 1e3 * statistics.median(times[name][WARM_UP:])
        rows.append({"layer": title, "contestant": name, "ms": ms, "residual": residual})
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; ``ratio`` is the time divided by that of :data:`OURS`."""
    ours = {row["layer"]: row["ms"] for row in rows if row["contestant"] == OURS}
    cells = [(r["layer"], r["contestant"], r["ms"], r["ms"] / ours[r["layer"]], r["residual"]) for r in rows]
    return markdown(("layer", "contestant", "ms", "ratio", "‖WᴴW − I‖"), cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each contestant")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = [row for title in options.layers for row in run_case(title, CASES[title], options.steps)]
    text = f"{environment_line()}\n\n{report(rows)}"
    print(text)
    save("layers", rows, text, steps=options.steps, threads=options.threads)


if __name__ == "__main__":
    main()
