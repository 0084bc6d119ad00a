"""Time of a step of POGO beside its authors' package, from the same points, in turns, in one process.

pip install -c constraints.txt -e ".[bench]" && python benchmarks/pogo_steps.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import environment_line, markdown, save
from torch import nn

from manopt_torch import ManifoldParameter, Stiefel
from manopt_torch.optim import POGO

#: title: number of parameters, and their shape
CASES = {"200 x (16,16)": (200, (16, 16)), "batch (256,16,16)": (1, (256, 16, 16)), "1 x (512,512)": (1, (512, 512))}
WARM_UP = 5


def run(title: str, steps: int) -> dict[str, Any]:
    """Medians in milliseconds, and how far the points are apart after the same steps."""
    from pogo import POGO as Peer
    from pogo import base as rules

    number, shape = CASES[title]
    start = [Stiefel().random(*shape, generator=torch.Generator().manual_seed(i)) for i in range(number)]
    ours = [ManifoldParameter(x.clone(), Stiefel()) for x in start]
    theirs = [nn.Parameter(x.clone() if x.dim() == 3 else x.clone().unsqueeze(0)) for x in start]
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.detach().clone().reshape(q.shape)
    optimizers = POGO(ours, lr=1e-3), Peer(theirs, rules.SGD(), lr=1e-3, rows=False)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UP + steps):
        for optimizer, spent in zip(optimizers, times, strict=True):
            begin = time.perf_counter()
            optimizer.step()
            spent.append(1e3 * (time.perf_counter() - begin))
    own, peer = (statistics.median(spent[WARM_UP:]) for spent in times)
    apart = max(
        (p.detach() - q.detach().reshape(p.shape)).abs().max().item() for p, q in zip(ours, theirs, strict=True)
    )
    return {"case": title, "ours, ms": own, "pogo-torch, ms": peer, "ratio": own / peer, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [run(title, 5 if args.quick else 50) for title in CASES]
    report = f"{environment_line()}\n\n{markdown(list(rows[0]), [list(row.values()) for row in rows])}"
    print(report)
    save("pogo", rows, report, quick=args.quick)


if __name__ == "__main__":
    main()
