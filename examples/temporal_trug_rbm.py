"""Temporal RBMs whose hidden units have truncation points, fixed and learned, beside binary ones (Su et al., 2017).

``python examples/temporal_trug_rbm.py`` learns films of three bouncing balls; ``--data FILE`` learns the sequences of a
.mat or .npz file with traindata and testdata: piano rolls (88 keys, binary) or motion (Gaussian units). Variants:
``original``, binary hidden units (Sutskever and Hinton, 2007); ``fixed``, TruG units on [--lower, --upper];
``shared`` and ``unit``, where that is learned, one pair of ends for all units or one for each.

The table has, over the test set,

* the one-step prediction error ‖x_t − x̂_t‖², summed over the n visible units and averaged over the frames t ≥ 2 of all
  sequences, x̂_t by mean field from the true past, and in the next column by Gibbs sampling;
* the lower bound of ln p(X) for each frame, over the first --bound-sequences, E_q by one sample and ln Z of every frame
  by annealed importance sampling. That estimate is too high by half the variance of ln Z on average.

Two predictors that know no network stand beside: the frame before, and the mean of the training set.

Pictures: what each network goes on with after the beginning of a test sequence; piano rolls also as MIDI files.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from harness.cli import new_folder, positive
from harness.sequences import SequenceSets, bouncing_balls, read_sequences
from harness.temporal import Result, error, show, trivial
from torch.nn.utils.rnn import pack_sequence
from tqdm import tqdm

from manopt_torch.stochastic import TemporalTruGRBM

VARIANTS: dict[str, dict[str, Any]] = {
    "original": {"units": "binary"},
    "fixed": {"learn": None},
    "shared": {"learn": "shared"},
    "unit": {"learn": "unit"},
}
NUMBERS = (
    ("hidden", 100, "units"),
    ("epochs", 40, "over the training set"),
    ("batch", 5, "sequences of each step"),
    ("length", 50, "of the pieces that sequences are cut into for training"),
    ("k", 1, "Gibbs steps of contrastive divergence"),
    ("films", 200, "of balls to train on"),
    ("side", 15, "pixels of such a film"),
    ("iterations", 10, "of each prediction"),
    ("samples", 10, "of each prediction by sampling"),
    ("bound-sequences", 5, "of the test set that the bound is estimated on"),
    ("temperatures", 100, "of annealed importance sampling"),
    ("chains", 5, "of the same"),
    ("generate", 40, "frames that are generated"),
)
SMOKE = {"hidden": 5, "epochs": 2, "films": 4, "side": 6, "length": 8, "iterations": 2, "samples": 2,
         "bound_sequences": 1, "temperatures": 3, "chains": 2, "generate": 3}  # fmt: skip
#: settings that a resumed run may change
FREE = {"resume", "out", "epochs", "variant"}
HEAD = f"| predictor | error | by sampling | bound per frame | ξ₁ | ξ₂ | minutes |\n|{' --- |' * 7}"


def load(args: argparse.Namespace) -> SequenceSets:
    """Films of balls, or the sets of a file."""
    if args.data is not None:
        return read_sequences(args.data)
    films = list(bouncing_balls(args.films + 40, 50, args.side, seed=args.seed))
    return SequenceSets(films[40:], films[:20], films[20:40], True)


def train(variant: str, sets: SequenceSets, args: argparse.Namespace, out: Path) -> Result:
    """Adam on CD-k, rates falling along half a cosine, those of ξ a fifth; kept after every epoch in VARIANT.pt."""
    torch.manual_seed(args.seed)
    kind: Any = {"visible": "binary" if sets.binary else "gaussian", **VARIANTS[variant]}
    model = TemporalTruGRBM(sets.train[0].shape[1], args.hidden, lower=args.lower, upper=args.upper, **kind)
    model.b.data.copy_(model.rbm.mean_bias(torch.cat(sets.train)))
    units = list(model.rbm.units.parameters())
    others = [p for name, p in model.named_parameters() if ".units." not in name]
    rates = (args.lr, args.lr / 5)
    optimizer = torch.optim.Adam([{"params": others}, {"params": units}], lr=args.lr)
    generator, first, seconds, file = torch.Generator().manual_seed(args.seed), 0, 0.0, out / f"{variant}.pt"
    if file.exists():
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        generator.set_state(kept["generator"])
        first, seconds = kept["epoch"], kept["seconds"]
    pieces = [piece for x in sets.train for piece in x.split(args.length)]
    for epoch in tqdm(range(first, args.epochs), desc=variant, leave=False, disable=None):
        start = time.perf_counter()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * epoch / args.epochs)) / 2
        for rows in torch.randperm(len(pieces), generator=generator).split(args.batch):
            batch = pack_sequence([pieces[i] for i in rows.tolist()], enforce_sorted=False)
            loss = model.contrastive_divergence(batch, args.k, generator=generator) * len(rows) / len(batch.data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds += time.perf_counter() - start
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "generator": generator.get_state()}
        torch.save({**state, "epoch": epoch + 1, "seconds": seconds}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
    few = pack_sequence(sets.test[: args.bound_sequences], enforce_sorted=False)
    with torch.no_grad():
        bound = model.bound(few, temperatures=args.temperatures, chains=args.chains, generator=generator).sum().item()
    mean_field = error(sets.test, lambda x: model.predict(x, iterations=args.iterations))
    sampled = error(
        sets.test,
        lambda x: model.predict(x, iterations=args.iterations, samples=args.samples, generator=generator),
    )
    return Result(variant, mean_field, sampled, bound / len(few.data), model, seconds / 60)


def main(argv: list[str] | None = None) -> list[Result]:
    """Command line: see ``--help``. Returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help=".mat or .npz (bouncing balls)")
    add("--variant", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), help="(all; original always)")
    for name, value, meaning in NUMBERS:
        add(f"--{name}", type=positive, default=value, help=f"{meaning} (%(default)s)")
    add("--lower", type=float, default=0.0, help="ξ₁ at first (%(default)s)")
    add("--upper", type=float, default=1.0, help="ξ₂ at first; inf for soft ReLU units (%(default)s)")
    add("--lr", type=float, default=0.005, help="rate of Adam at first (%(default)s)")
    add("--seed", type=int, default=0, help="of initial values, batches and samples (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    args = parser.parse_args(argv)
    if args.smoke:
        args = parser.parse_args(argv, argparse.Namespace(**SMOKE))
    out = args.out or new_folder(Path("runs") / "temporal_trug_rbm")
    settings = repr(sorted((k, str(v)) for k, v in vars(args).items() if k not in FREE))
    file = out / "settings.txt"
    if file.exists() != args.resume or (args.resume and file.read_text() != settings):
        parser.error(f"{out}: --resume goes on with a run of the same settings; a new one needs a folder of its own")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(settings)
    sets = load(args)
    results = trivial(sets, args.bound_sequences)
    tqdm.write("\n".join([HEAD, *(r.row() for r in results)]))
    for variant in VARIANTS:
        if variant in (*args.variant, "original"):
            results.append(train(variant, sets, args, out))
            tqdm.write(results[-1].row())
    (out / "results.md").write_text("\n".join([HEAD, *(r.row() for r in results), ""]))
    show(results, sets, args.generate, args.seed, args.data is None, out)
    print(f"table and pictures in {out}")
    return results


if __name__ == "__main__":
    main()
