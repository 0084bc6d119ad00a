"""Distance from the manifold after 10,000 steps of a given length, on runs that then reach a known optimum.

    python benchmarks/drift.py

Phase one: 10,000 steps of RiemannianSGD, each of spectral norm ‖u‖₂ = length (1e-3, 1e-2, 1e-1, 1), along the gradient
of f(X) = −⟨A, X⟩ plus a new random tangent each time. Phase two: the same parameter and optimizer go on along the
gradient alone, with lr = 1/2. A = Q S with a random point Q and S ≻ 0 with eigenvalues in [1, 2], so that Q is the
minimizer (Procrustes) and f* = −tr S.

Printed: the largest ‖XᴴX − I‖_F (computed in double precision) over both phases, sampled every 100 steps of the first
and at its last step, and at the end; and |f − f*|/|f*| at the end, in double precision. Both must be below 1e-5.
``polish=0`` (Cayley without the Newton-Schulz step after it) is run beside it to show what the bound is worth.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from common import DTYPES, environment_line, markdown, orthogonality, save
from torch import Tensor

from manopt_torch import ManifoldParameter
from manopt_torch.manifolds import Manifold, Stiefel, Unitary
from manopt_torch.optim import RiemannianSGD

BOUND = 1e-5
LENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
SIZES = (8, 16, 32, 64, 128)
LARGE = 256  # with the first and the last length only
POLISH_FREE = (64,)  # sizes at which polish=0 is run too
TO_OPTIMUM = 400  # steps of phase two
POWER_ITERATIONS = 8  # spectral norms from below: steps are a few percent longer than they say, never shorter


class Run(NamedTuple):
    """All lengths of one manifold, shape and dtype: one batch, one parameter."""

    manifold: Manifold
    shape: tuple[int, int]
    dtype: str
    lengths: tuple[float, ...]


def runs(quick: bool, dtypes: list[str]) -> Iterator[Run]:
    """Everything to be run, the longest first."""
    for n in (SIZES if quick else (*SIZES, LARGE))[::-1]:
        lengths = (LENGTHS[0], LENGTHS[-1]) if n == LARGE else LENGTHS
        for dtype in dtypes:
            yield Run(Unitary(), (n, n), dtype, lengths)
            yield Run(Stiefel(), (n, n // 4), dtype, lengths)
            if n in POLISH_FREE:
                yield Run(Stiefel(polish=0), (n, n), dtype, lengths)
                yield Run(Stiefel(polish=0), (n, n // 4), dtype, lengths)


def spectral_norm(u: Tensor, start: Tensor) -> Tensor:
    """‖u‖₂ of each matrix by power iteration: (*B, n, p), (*B, p, 1) -> (*B, 1, 1)."""
    v = start
    for _ in range(POWER_ITERATIONS):
        v = u.mH @ (u @ v)
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    return torch.linalg.vector_norm(u @ v, dim=-2, keepdim=True)


def procrustes(x: Tensor, manifold: Manifold, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(A = Q S, its f* = −tr S), in double precision; for real square x, Q is in the component of O(n) of x."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    n, p = x.shape[-2:]
    q = manifold.random(*x.shape, dtype=wide, generator=generator)
    v = manifold.random(*x.shape[:-2], p, p, dtype=wide, generator=generator)
    if n == p and not x.is_complex():
        q[..., 0] *= (torch.linalg.det(x.to(wide)) * torch.linalg.det(q)).sign().unsqueeze(-1)
    sigma = torch.linspace(1, 2, p, dtype=torch.float64)
    return q @ (v * sigma) @ v.mH, -sigma.sum()


def run(settings: Run, steps: int) -> list[dict[str, Any]]:
    """Both phases; one row per length."""
    torch.set_num_threads(1)
    manifold, shape, dtype, lengths = settings
    generator = torch.Generator().manual_seed(0)
    batch = len(lengths)
    begin = time.perf_counter()
    start = manifold.random(batch, *shape, dtype=DTYPES[dtype], generator=generator)
    wide, least = procrustes(start, manifold, generator)
    a = wide.to(start.dtype)
    parameter = ManifoldParameter(start, manifold)
    optimizer = RiemannianSGD([parameter], lr=1.0)
    length = torch.tensor(lengths).reshape(-1, 1, 1)
    worst = [0.0] * batch

    def record() -> list[float]:
        now = [orthogonality(x) for x in parameter.detach()]
        worst[:] = [max(pair) for pair in zip(worst, now, strict=True)]
        return now

    with torch.no_grad():
        for step in range(steps):
            noise = torch.randn(a.shape, dtype=a.dtype, generator=generator)
            u = manifold.project(parameter, noise - a)
            first = torch.randn(batch, shape[1], 1, dtype=a.dtype, generator=generator)
            parameter.grad = u * (length / spectral_norm(u, first))
            optimizer.step()
            if step % 100 == 99 or step == steps - 1:
                drift = record()
        optimizer.param_groups[0]["lr"] = 0.5
        for _ in range(TO_OPTIMUM):
            parameter.grad = -a
            optimizer.step()
        final = record()
        f = -(wide.conj() * parameter).real.sum(dim=(-2, -1))
        gap = ((f - least) / least).abs().tolist()
    seconds = time.perf_counter() - begin
    return [
        {
            "manifold": repr(manifold),
            "shape": "x".join(map(str, shape)),
            "dtype": dtype,
            "length": lengths[i],
            "worst": worst[i],
            "after_steps": drift[i],
            "end": final[i],
            "gap": gap[i],
            "passes": worst[i] < BOUND and gap[i] < BOUND,
            "baseline": manifold == Stiefel(polish=0),
            "seconds": seconds,
        }
        for i in range(batch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 steps, n up to 128")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, of one thread each")
    args = parser.parse_args()
    steps = 1_000 if args.quick else 10_000
    print(environment_line() + "\n")
    todo = list(runs(args.quick, args.dtype))
    with ProcessPoolExecutor(args.workers) as pool:
        rows = [row for rows in pool.map(run, todo, [steps] * len(todo)) for row in rows]
    header = ("manifold", "shape", "dtype", "length", "worst ‖XᴴX − I‖_F", f"after {steps} steps", "end", "gap", "")
    keys = ("manifold", "shape", "dtype", "length", "worst", "after_steps", "end", "gap")
    table = [[*(r[k] for k in keys), "PASS" if r["passes"] else "FAIL"] for r in rows]
    baseline = [r["baseline"] for r in rows]
    kept = markdown(header, [line for line, b in zip(table, baseline, strict=True) if not b])
    without = markdown(header, [line for line, b in zip(table, baseline, strict=True) if b])
    missed = sum(not r["passes"] for r in rows if not r["baseline"])
    report = (
        f"{kept}\n\n{missed} of {baseline.count(False)} runs miss the bound 1e-5.\n\n### Without polish\n\n{without}"
    )
    print(report)
    save("drift", rows, f"{environment_line()}\n\n{report}", steps=steps)
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
