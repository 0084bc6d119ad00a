"""How much of U(N) the parametrizations of unitary matrices reach: parameters, and the dimension of the image.

``python examples/capacity.py`` prints a table, and writes it and a picture to a new folder under runs/capacity. The
restricted form of Arjovsky, Shah and Bengio (2016) and products of three Householder reflections or six layers of
Givens rotations all have about 7N real parameters, against the N² of U(N): by Sard's theorem none of them is onto for
N > 7 (Wisdom et al., 2016, theorem 3.2). The rank of the Jacobian is sharper: 7N − 7 for the restricted form, which is
too small from N = 6 on. The N² of a Cayley transform, N − 1 reflections and N layers of rotations have full rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.cli import at_least, new_folder, positive
from matplotlib.figure import Figure
from torch import Tensor

from manopt_torch.nn import Capacity, capacity, parametrization
from manopt_torch.nn.unitary_maps import GivensUnitary, HouseholderUnitary, RestrictedUnitary, UnitaryMap

#: name -> the map of size N; the first three have about 7N parameters
MAPS: dict[str, Callable[[int], UnitaryMap]] = {
    "restricted": lambda N: RestrictedUnitary(N, dtype=torch.complex128),
    "3 reflections": lambda N: HouseholderUnitary(N, 3, dtype=torch.complex128),
    "6 rotation layers": lambda N: GivensUnitary(N, 6, dtype=torch.complex128),
    "N−1 reflections": lambda N: HouseholderUnitary(N, N - 1, dtype=torch.complex128),
    "N rotation layers": lambda N: GivensUnitary(N, N, dtype=torch.complex128),
}
#: curves that coincide are seen one around the other
STYLES: dict[str, dict[str, Any]] = {
    "Cayley": {"color": "C0", "linewidth": 5, "alpha": 0.4},
    "restricted": {"color": "C1", "marker": "o", "markersize": 13, "fillstyle": "none"},
    "3 reflections": {"color": "C2", "marker": "s", "markersize": 8, "fillstyle": "none", "linestyle": "--"},
    "6 rotation layers": {"color": "C3", "marker": "^", "markersize": 4, "linestyle": ":"},
}
COLUMNS = ("parametrization", "N", "parameters P", "dim U(N) = N²", "P < N²", "rank", "full rank")


def cayley(theta: Tensor, N: int) -> Tensor:
    """(I + A)⁻¹(I − A), A skew-Hermitian with the N² real numbers ``theta``: any unitary W without eigenvalue −1."""
    real, imaginary = theta.reshape(N, N).tril(-1), theta.reshape(N, N).triu()
    A = torch.complex(real - real.mT, (imaginary + imaginary.mT) / 2)
    eye = torch.eye(N, dtype=A.dtype)
    return torch.linalg.solve(eye + A, eye - A)


def measure(sizes: range, points: int, generator: torch.Generator) -> dict[str, dict[int, Capacity]]:
    """The capacity of every parametrization at every size."""
    found: dict[str, dict[int, Capacity]] = {}
    for name, make in MAPS.items():
        maps = {N: parametrization(make(N), UnitaryMap.matrix) for N in sizes}
        found[name] = {N: capacity(*maps[N], N, points=points, generator=generator) for N in sizes}
    found["Cayley"] = {N: capacity(partial(cayley, N=N), N * N, N, points=points, generator=generator) for N in sizes}
    return found


def table(found: dict[str, dict[int, Capacity]]) -> str:
    """One row for each parametrization and size, in Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, capacities in found.items():
        for N, c in capacities.items():
            yes = ["no", "yes"]
            cells = (name, N, c.num_params, c.dim, yes[c.restricted], c.rank, yes[c.rank == c.dim])
            rows.append(tuple(map(str, cells)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def picture(found: dict[str, dict[int, Capacity]], file: Path) -> None:
    """Rank and number of parameters against N, for what has fixed numbers of factors; N² as the upper edge."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, title, value in ((left, "real parameters", "num_params"), (right, "rank of the Jacobian", "rank")):
        for name, style in STYLES.items():
            line = {N: getattr(c, value) for N, c in found[name].items()}
            axes.plot(list(line), list(line.values()), label=name if axes is left else None, **style)
        dims = {N: c.dim for N, c in found["Cayley"].items()}
        axes.plot(list(dims), list(dims.values()), "k--", label="N², the dimension of U(N)" if axes is left else None)
        axes.set(title=title, xlabel="N", xticks=list(dims))
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> dict[str, dict[int, Capacity]]:
    """Command line: see ``--help``. Returns what :func:`measure` found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--largest", type=at_least(2), default=12, metavar="N", help="sizes from 2 up to this one (%(default)s)")
    add("--points", type=positive, default=3, help="where each Jacobian is evaluated (%(default)s)")
    add("--seed", type=int, default=0, help="of these points (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--smoke", action="store_true", help="sizes that run in seconds")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, argparse.Namespace(largest=4, points=1))
    found = measure(range(2, args.largest + 1), args.points, torch.Generator().manual_seed(args.seed))
    print(table(found), end="")
    out = args.out or new_folder(Path("runs") / "capacity")
    out.mkdir(parents=True, exist_ok=True)
    (out / "capacity.md").write_text(table(found))
    picture(found, out / "capacity.png")
    print(f"table and picture in {out}")
    return found


if __name__ == "__main__":
    main()
