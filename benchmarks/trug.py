"""Time and accuracy of truncated Gaussian units beside the textbook formula, and an epoch of their Boltzmann machine.

    pip install -c constraints.txt -e ".[bench]" && python benchmarks/trug.py

**Units.** Forward and backward of ``nn.TruG`` (σ² = 0.2), in ms of processor time per million units, on one thread. The
textbook formula is z + σ (φ(a) − φ(b))/(Φ(b) − Φ(a)) in float64 with torch's autograd, one-sided z + σ φ(a)/Φ(−a), its
ends learned where those of the layer are. Contestants take turns, so that a change of the machine's speed meets all of
them; medians.
Errors are the largest of a sample that has the extreme inputs, against 60 digits: of the mean relative to the greater
of itself and a tenth of the standard deviation, of its derivative with respect to z relative to itself. ``failed``
counts the sampled units where either is not a number or is off by more than the aim, 1e-10 in float64 and 2e-6 in
float32: a row with such units is fast and wrong.

**Epoch.** Contrastive divergence (one Gibbs step, batches of 100, 500 hidden units) over 60,000 binary images of 784
pixels, random ones unless ``--data`` names a folder with MNIST; scikit-learn's ``BernoulliRBM`` does persistent CD-1.
Each contestant works on a tenth of the epoch, then the next has its turn; ``s`` is the time of all turns on the clock,
``processor s`` that of all threads. ``MB`` is what the peak of resident memory grows by over 20 batches, in a process
of its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import struct
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import mpmath as mp  # type: ignore[import-untyped]
import numpy as np
import torch
from common import environment_line, markdown, save
from torch import Tensor, nn

from manopt_torch.nn import TruG
from manopt_torch.stochastic import TruGRBM

SIGMA2 = 0.2
UNITS = 500  # that have ends of their own
OURS, TEXTBOOK, GELU, SOFTPLUS = "nn.TruG", "textbook formula", "GELU", "softplus"
AIM = {torch.float32: 2e-6, torch.float64: 1e-10}
SPREADS = {"N(0, 1)": 1.0, "N(0, 100)": 10.0}
PIXELS, HIDDEN, BATCH, TURNS = 784, 500, 100, 10
Step = Callable[[Tensor], None]


class Case(NamedTuple):
    """Ends of all units, and whether each unit learns its own."""

    low: float
    high: float
    learn: bool


CASES = {
    "[0, inf)": Case(0.0, math.inf, False),
    "[-1, 1]": Case(-1.0, 1.0, False),
    "[0, inf), learned": Case(0.0, math.inf, True),
    "[-1, 1], learned": Case(-1.0, 1.0, True),
}


# ------------------------------------------------------------------ units
class Textbook(nn.Module):
    """E h as it is written, in float64."""

    def __init__(self, low: float, high: float, learn: bool) -> None:
        super().__init__()
        ends = [torch.full((UNITS,), end, dtype=torch.float64) if learn else torch.tensor(end) for end in (low, high)]
        self.low, self.high = (nn.Parameter(end, requires_grad=learn and bool(end.isfinite().all())) for end in ends)
        self.one_sided = high == math.inf

    def forward(self, z: Tensor) -> Tensor:
        wide, sigma = z.double(), math.sqrt(SIGMA2)
        a = (self.low - wide) / sigma
        density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
        if self.one_sided:
            mean = wide + sigma * density / torch.special.ndtr(-a)
        else:
            b = (self.high - wide) / sigma
            other = torch.exp(-0.5 * b * b) / math.sqrt(2 * math.pi)
            mean = wide + sigma * (density - other) / (torch.special.ndtr(b) - torch.special.ndtr(a))
        return mean.to(z.dtype)


def contestants(case: Case, dtype: torch.dtype) -> dict[str, nn.Module]:
    size, learn = (UNITS, "unit") if case.learn else (None, None)
    ours = TruG(size, SIGMA2, lower=case.low, upper=case.high, learn=learn, dtype=dtype)  # type: ignore[arg-type]
    return {OURS: ours, TEXTBOOK: Textbook(*case), GELU: nn.GELU(), SOFTPLUS: nn.Softplus()}


def exact(z: float, low: float, high: float) -> tuple[float, float, float]:
    """E h, its derivative with respect to z, and the standard deviation of h, from Φ on the side where it is small."""
    if low + high < 2 * z:
        mean, slope, deviation = exact(-z, -high, -low)
        return -mean, slope, deviation
    with mp.workdps(60):
        sigma = mp.mpf(math.sqrt(SIGMA2))
        a, b = (mp.mpf(low) - z) / sigma, (mp.mpf(high) - z) / sigma
        Q = [mp.erfc(x / mp.sqrt(2)) / 2 if mp.isfinite(x) else mp.mpf(0) for x in (a, b)]
        A, B = (mp.npdf(x) / (Q[0] - Q[1]) for x in (a, b))
        slope = 1 + a * A - (b * B if mp.isfinite(b) else 0) - (A - B) ** 2
        return float(z + sigma * (A - B)), float(slope), float(sigma * mp.sqrt(slope))


def errors(module: nn.Module, z: Tensor, case: Case, sample: int) -> dict[str, float]:
    """Largest errors of mean and derivative on a sample of z, and how many units miss the aim."""
    flat = z.detach().flatten()
    chosen = torch.cat([flat.argmin()[None], flat.argmax()[None], torch.randperm(len(flat))[: sample - 2]])
    x = flat[chosen].clone().requires_grad_()
    value = module(x[:, None].expand(-1, UNITS) if case.learn else x)
    value = value[:, 0] if case.learn else value
    (slope,) = torch.autograd.grad(value.sum(), x)
    expected = torch.tensor([exact(v, case.low, case.high) for v in x.tolist()], dtype=torch.float64)
    mean, exact_slope, deviation = expected.unbind(1)
    of_mean = (value.detach() - mean).abs() / torch.maximum(mean.abs(), 0.1 * deviation)
    of_slope = (slope - exact_slope).abs() / exact_slope
    failed = ~((of_mean <= AIM[z.dtype]) & (of_slope <= AIM[z.dtype]))
    return {
        "error of mean": of_mean.max().item(),
        "of derivative": of_slope.max().item(),
        "failed": int(failed.sum()),
        "of": sample,
    }


def run_units(name: str, dtype: torch.dtype, spread: str, rows: int, repeats: int, sample: int) -> list[dict[str, Any]]:
    """One row for each contestant, z of shape (rows, UNITS)."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(rows, UNITS, generator=generator, dtype=torch.float64)
    z = (draw * SPREADS[spread]).to(dtype).requires_grad_()
    g = torch.randn(rows, UNITS, generator=generator, dtype=torch.float64).to(dtype)
    modules = contestants(CASES[name], dtype)
    times: dict[str, list[float]] = {contestant: [] for contestant in modules}
    for turn in range(repeats + 1):
        for contestant, module in modules.items():
            z.grad = None
            module.zero_grad()
            start = time.process_time()
            module(z).backward(g)
            if turn:  # the first one is not counted
                times[contestant].append((time.process_time() - start) * 1e3)
    ms = {contestant: statistics.median(spent) / z.numel() * 1e6 for contestant, spent in times.items()}
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "interval": name,
            "z": spread,
            "contestant": contestant,
            "ms": ms[contestant],
            "of textbook": ms[contestant] / ms[TEXTBOOK],
            **(errors(module, z, CASES[name], sample) if contestant in (OURS, TEXTBOOK) else {}),
        }
        for contestant, module in modules.items()
    ]


# ------------------------------------------------------------------ an epoch
def images(folder: Path | None, number: int) -> Tensor:
    """(number, 784) zeros and ones: MNIST's first training images, grey levels above one half, or random ones."""
    if folder is None:
        return torch.bernoulli(torch.full((number, PIXELS), 0.13), generator=torch.Generator().manual_seed(0))
    content = (folder / "train-images-idx3-ubyte").read_bytes()
    shape = struct.unpack(">4I", content[:16])[1:]
    if shape != (60_000, 28, 28):
        raise ValueError(f"{folder} holds training images of shape {shape}, needed are MNIST's (60000, 28, 28)")
    pixels = torch.from_numpy(np.frombuffer(content, np.uint8, offset=16).copy())
    return (pixels.view(-1, PIXELS)[:number] > 127).float()


def trug_machine(upper: float, learn: str | None, units: str = "trug") -> Callable[[], Step]:
    def build() -> Step:
        torch.manual_seed(0)
        machine = TruGRBM(PIXELS, HIDDEN, upper=upper, learn=learn, units=units)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(machine.parameters(), lr=0.05)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            machine.contrastive_divergence(x)[0].backward()
            optimizer.step()

        return step

    return build


def scikit_learn() -> Step:
    from sklearn.neural_network import BernoulliRBM

    machine = BernoulliRBM(HIDDEN, learning_rate=0.05, batch_size=BATCH, random_state=0)
    return lambda x: machine.partial_fit(x.numpy())


MACHINES: dict[str, Callable[[], Step]] = {
    "TruGRBM, [0, inf) learned": trug_machine(math.inf, "unit"),
    "TruGRBM, [0, 1] learned": trug_machine(1.0, "unit"),
    'TruGRBM, units="binary"': trug_machine(1.0, None, "binary"),
    "scikit-learn BernoulliRBM": scikit_learn,
}


def peak() -> float:
    """MB of resident memory, the most so far of this process."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def peak_memory(name: str, batches: int, threads: int) -> float:
    """MB by which the peak of resident memory grows over so many batches, called in a process of its own."""
    torch.set_num_threads(threads)
    data = images(None, BATCH * batches)
    before = peak()
    step = MACHINES[name]()
    for x in data.split(BATCH):
        step(x)
    return peak() - before


def run_epoch(data: Tensor, names: list[str]) -> list[dict[str, Any]]:
    """One row for each machine."""
    steps = {name: MACHINES[name]() for name in names}
    for step in steps.values():
        step(data[:BATCH])
    seconds, processor = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for part in data.split(math.ceil(len(data) / TURNS)):
        for name, step in steps.items():
            start, started = time.perf_counter(), time.process_time()
            for x in part.split(BATCH):
                step(x)
            seconds[name] += time.perf_counter() - start
            processor[name] += time.process_time() - started
    return [{"machine": name, "s": seconds[name], "processor s": processor[name]} for name in names]


def memory(names: list[str], batches: int) -> list[float]:
    """:func:`peak_memory` of each machine, in processes of their own."""
    found = []
    for name in names:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(peak_memory, name, batches, torch.get_num_threads()).result())
    return found


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with MNIST's train-images-idx3-ubyte")
    parser.add_argument("--only", choices=("units", "epoch"))
    parser.add_argument("--repeats", type=int, default=9, help="turns (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="for the epoch (%(default)s)")
    parser.add_argument("--images", type=int, default=60_000, help="of the epoch (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few units and images")
    args = parser.parse_args(argv)
    units: list[dict[str, Any]] = []
    epoch: list[dict[str, Any]] = []
    report = [environment_line()]
    if args.only != "epoch":
        torch.set_num_threads(1)
        rows, sample = (10, 20) if args.quick else (2000, 300)
        for dtype in AIM:
            for name in CASES:
                for spread in SPREADS:
                    units += run_units(name, dtype, spread, rows, args.repeats, sample)
        table = markdown(list(units[0]), [[row.get(key, "") for key in units[0]] for row in units])
        report.append(f"Units: ms per million, forward and backward, 1 thread\n\n{table}")
        print(report[-1], flush=True)
    if args.only != "units":
        torch.set_num_threads(args.threads)
        data = images(args.data, 2000 if args.quick else args.images)
        epoch = run_epoch(data, list(MACHINES))
        for row, megabytes in zip(epoch, memory(list(MACHINES), 20), strict=True):
            row["MB"] = megabytes
        table = markdown(list(epoch[0]), [list(row.values()) for row in epoch])
        kind = "random images" if args.data is None else "MNIST"
        report.append(f"CD-1 over {len(data):,} {kind}, {args.threads} threads\n\n{table}")
        print(f"\n{report[-1]}")
    save("trug", units + epoch, "\n\n".join(report), repeats=args.repeats)


if __name__ == "__main__":
    main()
