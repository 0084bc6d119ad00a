"""Time and memory of a unitary RNN over one sequence, beside LSTMs, a plain loop and bare matrix products, in one run.

    pip install -c constraints.txt -e ".[bench,fast]" && python benchmarks/unitary_rnn.py

``forward + backward`` is one pass over T steps of B sequences of one number, with a random gradient for every state.
Contestants take turns, so that a change of the machine's speed meets all of them; medians. ``kept`` counts the bytes of
distinct storage that autograd holds for the backward pass, parameters not counted. ``error`` is the largest difference
of the gradient of W to that of the plain loop, relative to its largest entry. The floors are the products that no
implementation in real arithmetic avoids: T times h W forward and g Wᵀ backward, and one for the gradient of W; with
weights packed by oneDNN, and with addmm.

Below, a whole training iteration - cross-entropy of a readout at every step, backward, RMSprop and the Cayley step of
W - and the share of that step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import environment_line, markdown, save
from torch import Tensor, nn

from manopt_torch.nn import RealReadout, UnitaryRNN, recurrence
from manopt_torch.optim import RiemannianSGD

CASES = ((784, 50, 128), (784, 50, 512), (1000, 20, 128), (2000, 20, 128))
OURS, LEAN, TORCH = "UnitaryRNN", "UnitaryRNN, checkpoint_every=√T", "UnitaryRNN without numba"
LSTM, SMALL_LSTM, LOOP = "LSTM, same hidden size", "LSTM, same number of parameters", "plain complex loop"
PACKED, ADDMM = "floor, packed", "floor, addmm"
SYMBOLS = 9  # classes of the training iteration's readout
Pass = Callable[[], Any]


def equal_lstm(N: int) -> int:
    """Hidden size of the LSTM whose 4n² + 12n parameters come closest to N² + 5N, the dimension of UnitaryRNN(1, N)."""
    return min(range(1, 4 * N), key=lambda n: abs(4 * n * n + 12 * n - N * N - 5 * N))


def contestants(T: int, B: int, N: int) -> tuple[dict[str, Pass], dict[str, Pass], UnitaryRNN]:
    """For each name a forward pass, whose result has a gradient, and the whole; and the network."""
    x = torch.randn(T, B, 1)
    rnn = UnitaryRNN(1, N)
    lean = UnitaryRNN(1, N, checkpoint_every=round(T**0.5))
    lean.load_state_dict(rnn.state_dict())
    lstm, small = nn.LSTM(1, N), nn.LSTM(1, equal_lstm(N))
    cell = rnn.cells[0]
    g = torch.randn(T, B, N, dtype=torch.complex64)
    g_small = torch.randn(T, B, small.hidden_size)

    def loop() -> Tensor:
        h, W = cell.h0.expand(B, -1), cell.weight_hh.mT
        states = []
        for step in F.linear(x.to(g.dtype), cell.weight_ih).unbind(0):
            h = cell.modrelu(torch.addmm(step, h, W))
            states.append(h)
        return torch.stack(states)

    forwards: dict[str, Pass] = {
        OURS: lambda: rnn(x)[0],
        LEAN: lambda: lean(x)[0],
        LSTM: lambda: lstm(x)[0],
        SMALL_LSTM: lambda: small(x)[0],
        LOOP: loop,
    }
    gradients = {LSTM: g.real.contiguous(), SMALL_LSTM: g_small}

    def whole(name: str) -> Pass:
        return lambda: forwards[name]().backward(gradients.get(name, g))

    passes = {name: whole(name) for name in forwards}

    def without_numba() -> None:
        with mock.patch.object(recurrence, "kernels", return_value=None):
            passes[OURS]()

    return forwards, {**passes, TORCH: without_numba, **floors(T, B, N)}, rnn


def floors(T: int, B: int, N: int) -> dict[str, Pass]:
    h, W, z = torch.randn(B, 2 * N), torch.randn(2 * N, 2 * N), torch.empty(B, 2 * N)
    before, after = torch.randn(T * B, 2 * N), torch.randn(T * B, 2 * N)

    def addmm() -> None:
        for _ in range(2 * T):
            torch.addmm(z, h, W, out=z)
        before.mT @ after

    floors: dict[str, Pass] = {ADDMM: addmm}
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(W, B)
        product = torch.ops.mkldnn._linear_pointwise

        def with_packed_weights() -> None:
            for _ in range(2 * T):
                product(h, packed, None, "none", [], "")
            before.mT @ after

        floors[PACKED] = with_packed_weights
    return floors


def bytes_kept(forward: Pass, parameters: Iterable[Tensor]) -> int:
    """Distinct storage held for the backward pass of ``forward``."""
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward()
    del result
    return sum(size for address, size in held.items() if address not in own)


def medians(passes: dict[str, Pass], repeats: int) -> dict[str, float]:
    """Milliseconds of each, in turns; a first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(repeats + 1):
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(spent) for name, spent in times.items()}


def run_case(T: int, B: int, N: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each contestant."""
    torch.manual_seed(0)
    forwards, passes, rnn = contestants(T, B, N)
    parameters = list(rnn.parameters())
    gradients = {}
    for name in (OURS, TORCH, LOOP):
        rnn.zero_grad()
        passes[name]()
        gradients[name] = rnn.cells[0].weight_hh.grad.clone()
    scale = gradients[LOOP].abs().max()
    spent = medians(passes, repeats)
    return [
        {
            "T": T, "B": B, "N": N, "contestant": name, "ms": ms, "of LSTM": ms / spent[LSTM],
            "MB kept": bytes_kept(forwards[name], parameters) / 1e6 if name in forwards else "",
            "error": ((gradients[name] - gradients[LOOP]).abs().max() / scale).item() if name in gradients else "",
        }
        for name, ms in spent.items()
    ]  # fmt: skip


def iteration(T: int, B: int, N: int, repeats: int) -> dict[str, Any]:
    """A training iteration, and the Cayley step in it."""
    torch.manual_seed(0)
    rnn, readout = UnitaryRNN(1, N), RealReadout(N, SYMBOLS)
    W = rnn.cells[0].weight_hh
    rest = [p for p in (*rnn.parameters(), *readout.parameters()) if p is not W]
    cayley, rmsprop = RiemannianSGD([W], lr=1e-6), torch.optim.RMSprop(rest, lr=1e-6, foreach=True)
    x, target = torch.randn(T, B, 1), torch.randint(SYMBOLS, (T, B))

    def gradients() -> None:
        F.cross_entropy(readout(rnn(x)[0]).flatten(0, 1), target.flatten()).backward()
        rmsprop.step()

    spent = medians({"forward, backward, RMSprop": gradients, "Cayley step": cayley.step}, repeats)
    whole = sum(spent.values())
    return {"T": T, "B": B, "N": N, "iteration ms": whole, "Cayley step ms": spent["Cayley step"],
            "share": spent["Cayley step"] / whole}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Command line: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="turns (%(default)s)")
    parser.add_argument("--threads", type=int, help="of torch (its own choice)")
    parser.add_argument("--quick", action="store_true", help="a short sequence only")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    report, rows, iterations = [environment_line()], [], []
    for case in ((50, 4, 16),) if args.quick else CASES:
        rows += (found := run_case(*case, args.repeats))
        columns = ("contestant", "ms", "of LSTM", "MB kept", "error")
        table = markdown(columns, [[row[c] for c in columns] for row in found])
        report.append(f"(T, B, N) = {case}\n\n{table}")
        print(f"\n{report[-1]}", flush=True)
        iterations.append(iteration(*case, args.repeats))
    table = markdown(list(iterations[0]), [list(row.values()) for row in iterations])
    report.append(f"A training iteration\n\n{table}")
    print(f"\n{report[-1]}")
    save("unitary_rnn", rows, "\n\n".join(report), repeats=args.repeats, iterations=iterations)


if __name__ == "__main__":
    main()
