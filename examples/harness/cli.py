"""Command line and output folder that the examples share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import manopt_torch.optim
from manopt_torch.optim.refusals import REFUSED

#: what ``--optimizer`` accepts: the papers' recipe, ours by their names, and those of torch's that ``riemannian``
#: takes, but none that takes matrices only
OPTIMIZERS = (
    "paper",
    *(
        name
        for name in manopt_torch.optim.__all__
        if name.startswith("Riemannian")
        and name != "RiemannianOptimizer"
        and not getattr(manopt_torch.optim, name).array_state
    ),
    *(
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind not in (torch.optim.Optimizer, *REFUSED)
        and name != "Muon"
    ),
)

#: what a resumed run may change
FREE = {"resume", "out", "epochs", "iterations", "patience", "threads", "study", "jobs"}


def at_least(least: int) -> Callable[[str], int]:
    """The type of whole numbers from ``least`` up, for argparse."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        return number

    return integer


positive = at_least(1)


def training_parser(
    experiment: str,
    description: str | None,
    *,
    lr: float,
    batch: int,
    epochs: int | None = None,
    iterations: int | None = None,
    every: int | None = 100,
    optimizer: str = "RMSprop",
    schedule: str = "cosine",
    lr_manifold: float | None = None,
) -> argparse.ArgumentParser:
    """A parser with what every training run understands; an example adds its own.

    An example trains for ``epochs`` over a set, or for ``iterations`` on batches drawn as it goes,
    and then is validated after ``every`` of them; None leaves that to :func:`parse`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(experiment=experiment)
    add = parser.add_argument
    add(
        "--optimizer",
        default=optimizer,
        choices=OPTIMIZERS,
        metavar="NAME",
        help="'paper' (W by Cayley steps of fixed length, the rest by RMSprop), ours, or any of torch.optim "
        "(%(default)s)",
    )
    add("--frame", default="ambient", choices=("ambient", "tangent"), help="of a wrapped torch optimizer (ambient)")
    add("--lr", type=float, default=lr, help="learning rate (%(default)s)")
    add(
        "--lr-manifold",
        type=float,
        default=lr_manifold,
        help=f"that of constrained parameters ({'as --lr' if lr_manifold is None else '%(default)s'})",
    )
    add("--lr-bias", type=float, help="that of the biases of modReLU, felt at every step of a sequence (as --lr)")
    add(
        "--schedule",
        default=schedule,
        choices=("cosine", "constant"),
        help="of the learning rate: to zero along half a cosine, or none (%(default)s)",
    )
    if iterations is None:
        add("--epochs", type=positive, default=epochs, help="at most (%(default)s)")
        patience = (epochs or 0) // 3
    else:
        add("--iterations", type=positive, default=iterations, help="at most (%(default)s)")
        shown = "fewer for short sequences" if every is None else "%(default)s"
        add("--every", type=positive, default=every, help=f"iterations between two validations ({shown})")
        patience = iterations
    add("--batch", type=positive, default=batch, help="sequences per step (%(default)s)")
    add(
        "--patience",
        type=positive,
        default=patience,
        help="validations without a lower loss, then stop (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of split, initial values and batches (%(default)s)")
    add("--threads", type=positive, default=1, help="of torch; more do not pay for small matrices (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="continue the run in --out (the newest under runs/)")
    add("--paper", action="store_true", help="sizes and optimizer of the publication")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    presets: Mapping[str, dict[str, Any]],
    every: Callable[[argparse.Namespace], int] | None = None,
) -> argparse.Namespace:
    """The settings of a run: what ``argv`` says, else what the preset says whose flag is given, else the defaults.

    A resumed run has the settings that it was started with, and ``argv`` may change those in ``FREE``.
    ``every`` gives the iterations between two validations from the other settings, where nothing says them.
    """
    args = parser.parse_args(argv)
    for flag, values in presets.items():
        if getattr(args, flag):
            args = parser.parse_args(argv, argparse.Namespace(**values))
    if args.resume:
        if args.out is None:
            runs = Path("runs") / args.experiment
            done = [int(p.parts[-3]) for p in runs.glob("*/checkpoints/last.ckpt") if p.parts[-3].isdigit()]
            args.out = runs / str(max(done, default=0))
        last = args.out / "checkpoints" / "last.ckpt"
        if not last.is_file():
            raise SystemExit(f"nothing to resume: {last} does not exist; name the run's folder by --out")
        kept = json.loads((args.out / "settings.json").read_text())
        kept["out"] = args.out
        if kept.get("data"):
            kept["data"] = Path(kept["data"])
        args = parser.parse_args(argv, argparse.Namespace(**kept))
        changed = [name for name in kept if name not in FREE and getattr(args, name) != kept[name]]
        if changed:
            parser.error(f"the run in {args.out} has another {', '.join(changed)}: start a new one")
    if every is not None and args.every is None:
        args.every = every(args)
    if hasattr(args, "iterations"):
        args.epochs = -(-args.iterations // args.every)
    return args


def claim(args: argparse.Namespace) -> Path:
    """Make the folder of a run, ``args.out`` or the next runs/EXPERIMENT/NUMBER, and keep the settings in it.

    Raises ``SystemExit`` if a new run would mix with an old one, or a finished one has nothing left to do.
    """
    out = args.out or new_folder(Path("runs") / args.experiment)
    last = out / "checkpoints" / "last.ckpt"
    if args.resume:
        kept = torch.load(last, weights_only=True)
        if (done := kept["epoch"] + 1) >= args.epochs:
            raise SystemExit(f"{out} has had its {done} epochs: to go on, ask for more")
        for name, state in kept.get("callbacks", {}).items():
            if name.startswith("Patience") and state["wait_count"] >= args.patience:
                raise SystemExit(
                    f"{out} stopped {state['wait_count']} validations after its best: ask for more --patience"
                )
    elif last.is_file():
        raise SystemExit(f"{out} holds a run already: continue it with --resume, or name another --out")
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(args).items() if name not in ("resume", "out")}
    (out / "settings.json").write_text(json.dumps(settings, default=str))
    return out


def keep(state: object, path: Path) -> None:
    """Write a checkpoint in one go: a run that is killed meanwhile can be resumed from the one before."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def new_folder(runs: Path) -> Path:
    """Make runs/NUMBER with the next number."""
    number = max((int(path.name) for path in runs.glob("*") if path.name.isdigit()), default=-1) + 1
    while True:  # another run may start at the same time
        try:
            (runs / str(number)).mkdir(parents=True)
            return runs / str(number)
        except FileExistsError:
            number += 1
