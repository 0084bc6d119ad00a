"""Command line and output folder that the examples share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import manopt_torch.optim

#: what ``--optimizer`` accepts: ours by their names, and any of torch's, which is then wrapped by ``riemannian``
OPTIMIZERS = (
    *(name for name in manopt_torch.optim.__all__ if name.startswith("Riemannian") and name != "RiemannianOptimizer"),
    *(
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ),
)


def training_parser(description: str, *, lr: float, epochs: int, batch: int) -> argparse.ArgumentParser:
    """A parser with what every training run understands; an example adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--optimizer",
        default="RMSprop",
        choices=OPTIMIZERS,
        metavar="NAME",
        help="ours, or any of torch.optim (RMSprop)",
    )
    add("--frame", default="ambient", choices=("ambient", "tangent"), help="of a wrapped torch optimizer (ambient)")
    add("--lr", type=float, default=lr, help="learning rate, falling to zero along a cosine (%(default)s)")
    add("--lr-manifold", type=float, help="learning rate of constrained parameters, if another one")
    add("--epochs", type=int, default=epochs, help="at most (%(default)s)")
    add("--batch", type=int, default=batch, help="sequences per step (%(default)s)")
    add(
        "--patience",
        type=int,
        default=epochs // 3,
        help="epochs without a better validation loss, then stop (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of split, initial values and batches (%(default)s)")
    add("--threads", type=int, default=1, help="of torch; more do not pay for small matrices (%(default)s)")
    add("--data", type=Path, metavar="FOLDER", help="a real set instead of the bundled one")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="continue the run in --out (the newest under runs/)")
    return parser


def run_folder(out: Path | None, resume: bool, experiment: str) -> Path:
    """The folder of this run, made if it is new: ``out``, or runs/EXPERIMENT/NUMBER.

    Raises ``SystemExit`` if there is nothing to resume, or if a new run would mix with an old one.
    """
    runs = Path("runs") / experiment
    numbers = sorted(int(path.name) for path in runs.glob("*") if path.name.isdigit())
    if out is None:
        out = runs / str((numbers or [0])[-1] if resume else (numbers or [-1])[-1] + 1)
    last = out / "checkpoints" / "last.ckpt"
    if resume and not last.is_file():
        raise SystemExit(f"nothing to resume: {last} does not exist; name the run's folder by --out")
    if last.is_file() and not resume:
        raise SystemExit(f"{out} holds a run already: continue it with --resume, or name another --out")
    out.mkdir(parents=True, exist_ok=True)
    return out


#: what a resumed run may change
FREE = {"resume", "out", "epochs", "patience", "threads", "study", "jobs"}


def settled(args: argparse.Namespace, out: Path) -> argparse.Namespace:
    """``args``, kept in the folder of a new run; a resumed run has those it was started with, but for ``FREE`` ones."""
    file = out / "settings.json"
    if args.resume and file.exists():
        kept = json.loads(file.read_text())
        kept["data"] = kept["data"] and Path(kept["data"])
        return argparse.Namespace(**{**vars(args), **kept})
    file.write_text(json.dumps({k: v for k, v in vars(args).items() if k not in FREE}, default=str))
    return args
