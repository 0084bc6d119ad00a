"""What the truncation points of a TruG-RBM do: likelihoods with several boxes, fixed and learned (Su et al., 2017).

``python examples/trug_rbm.py`` learns the 14 pictures of bars or stripes in 3 × 3 pixels, by the exact gradient and by
contrastive divergence, from the boxes [0, 1], [−1, 1] and [0, 4], beside machines of binary units: ours, and
scikit-learn's BernoulliRBM. The mean of ln p(x) is exact; it is −ln 14 = −2.639 at best. ``--data digits`` learns
scikit-learn's digits, black from 8 on, and estimates ln Z by annealed importance sampling, with its standard error;
``--data FOLDER`` takes files in MNIST's format. The steps of ξ are a fifth of those of the weights.

Pictures: samples, the columns of W, and where the learned truncation points went.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.boltzmann import bars_and_stripes, draw_images, draw_points
from harness.cli import new_folder, positive
from harness.data import load_sequences
from sklearn.neural_network import BernoulliRBM
from torch import Tensor
from tqdm import tqdm

from manopt_torch.stochastic import TruGRBM

#: name, what the units are and where they begin
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (f"[{low:g}, {high:g}], ξ {said}".replace("-", "−"), {"lower": low, "upper": high, "learn": learn})
        for low, high in ((0.0, 1.0), (-1.0, 1.0), (0.0, 4.0))
        for learn, said in ((None, "fixed"), ("unit", "learned"))
    ),
    ("{0, 1}", {"units": "binary"}),
)
NUMBERS = (
    ("hidden", "units"),
    ("steps", "of the exact gradient"),
    ("cd-steps", "of contrastive divergence"),
    ("k", "Gibbs steps of each"),
    ("batch", "rows of each"),
    ("temperatures", "of annealed importance sampling"),
    ("chains", "of the same"),
    ("burn-in", "Gibbs steps before the samples of the picture"),
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "bars": {
        "hidden": 8, "steps": 1200, "cd_steps": 1200, "k": 5, "batch": 140, "lr": 0.15, "cd_lr": 0.05,
        "temperatures": 100, "chains": 100, "burn_in": 500,
    },
    "digits": {
        "hidden": 50, "steps": 0, "cd_steps": 3000, "k": 1, "batch": 100, "lr": 0.15, "cd_lr": 0.005,
        "temperatures": 1000, "chains": 100, "burn_in": 2000,
    },
    "smoke": {
        "hidden": 4, "steps": 5, "cd_steps": 5, "k": 1, "batch": 14, "temperatures": 5, "chains": 4, "burn_in": 2,
    },
}  # fmt: skip
HEAD = f"| h | learned by | ln p, training | ln p, test | s.e. of ln Z | ξ₁ | ξ₂ |\n|{' --- |' * 7}"


class Result(NamedTuple):
    """A trained machine; the mean of ln p(x) over the training set and the test set, NaN without one."""

    name: str
    method: str
    rbm: TruGRBM
    train: float
    test: float
    error: float

    def row(self) -> str:
        """A line of the table."""
        ends = [f"{e.min():.2f} … {e.max():.2f}" for e in (self.rbm.xi1, self.rbm.xi2)]
        numbers = ["" if math.isnan(v) else f"{v:.3f}" for v in (self.train, self.test, self.error)]
        cells = (self.name, self.method, *numbers, *(ends if self.rbm.unit_kind == "trug" else ("", "")))
        return f"| {' | '.join(cells)} |"


def load(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Training set and test set, (N, n); of bars and stripes there is no test set."""
    if args.data == "bars":
        return bars_and_stripes(), torch.empty(0, 9, dtype=torch.float64)
    splits = load_sequences(None if args.data == "digits" else Path(args.data), args.seed)
    train, test = ((part.tensors[0].squeeze(-1) >= 0.5).double() for part in (splits.train, splits.test))
    return train, test


def train(rbm: TruGRBM, x: Tensor, k: int, steps: int, lr: float, args: argparse.Namespace, title: str) -> None:
    """Adam with steps that fall to zero along half a cosine: CD-k, or the exact gradient for k = 0."""
    groups: list[dict[str, Any]] = [{"params": [rbm.W, rbm.b, rbm.c]}]
    groups.append({"params": list(rbm.units.parameters()), "lr": lr / 5})
    optimizer = torch.optim.Adam(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in tqdm(range(steps), desc=title, leave=False, disable=None):
        if k:
            rows = torch.randint(len(x), (args.batch,), generator=generator)
            loss, _ = rbm.contrastive_divergence(x[rows], k, generator=generator)
        else:
            loss = -rbm.log_likelihood(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def scikit_learn(x: Tensor, args: argparse.Namespace) -> TruGRBM:
    """BernoulliRBM, persistent CD-1 by plain gradient steps of its own rate; they get ten times as many as ours."""
    rows = x.repeat(-(-args.batch // len(x)), 1)  # fewer rows than chains would unbalance its two phases
    epochs = max(1, 10 * args.cd_steps * args.batch // len(rows))
    theirs = BernoulliRBM(args.hidden, batch_size=args.batch, n_iter=epochs, random_state=args.seed)
    theirs.fit(rows.numpy())
    rbm = TruGRBM(x.shape[1], args.hidden, units="binary", dtype=x.dtype)
    found = (theirs.components_.transpose(), theirs.intercept_visible_, theirs.intercept_hidden_)
    for parameter, value in zip((rbm.W, rbm.b, rbm.c), found, strict=True):
        parameter.data.copy_(torch.as_tensor(value))
    return rbm


@torch.no_grad()
def evaluate(name: str, method: str, rbm: TruGRBM, x: Tensor, test: Tensor, args: argparse.Namespace) -> Result:
    """Likelihoods with ln Z exact, or by annealed importance sampling; prints the row."""
    if args.data == "bars":
        log_partition, error = rbm.log_partition(), math.nan
    else:
        generator = torch.Generator().manual_seed(args.seed)
        found = rbm.annealed_importance_sampling(args.temperatures, args.chains, data=x, generator=generator)
        log_partition, error = found.value, found.standard_error.item()
    mean, other = (rbm.log_likelihood(part, log_partition).mean().item() for part in (x, test))
    result = Result(name, method, rbm, mean, other, error)
    tqdm.write(result.row())
    return result


def main(argv: list[str] | None = None) -> list[Result]:
    """Command line: see ``--help``. Returns the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="bars", metavar="WHAT", help="bars, digits, or a folder in MNIST's format (%(default)s)")
    for name, meaning in NUMBERS:
        add(f"--{name}", type=positive, help=f"{meaning} ({DEFAULTS['bars'][name.replace('-', '_')]} for bars)")
    add("--lr", type=float, help="rate of the exact gradient (0.15)")
    add("--cd-lr", type=float, help="rate of contrastive divergence (0.05; digits: 0.005)")
    add("--seed", type=int, default=0, help="of initial values, batches and samples (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="where results go (a new one under runs/)")
    add("--smoke", action="store_true", help="sizes that run in seconds and learn nothing")
    args = parser.parse_args(argv)
    chosen = {**DEFAULTS["bars" if args.data == "bars" else "digits"], **(DEFAULTS["smoke"] if args.smoke else {})}
    args = parser.parse_args(argv, argparse.Namespace(**chosen))
    x, test = load(args)
    tqdm.write(HEAD)
    results = []
    for method, k, steps, lr in (
        ("exact gradient", 0, args.steps, args.lr),
        (f"CD-{args.k}", args.k, args.cd_steps, args.cd_lr),
    ):
        for name, settings in MODELS if k or args.data == "bars" else ():
            torch.manual_seed(args.seed)
            rbm = TruGRBM(x.shape[1], args.hidden, dtype=x.dtype, **settings)
            rbm.b.data.copy_(rbm.mean_bias(x))
            train(rbm, x, k, steps, lr, args, f"{name}, {method}")
            results.append(evaluate(name, method, rbm, x, test, args))
    results.append(evaluate("{0, 1}", "scikit-learn", scikit_learn(x, args), x, test, args))
    out = args.out or new_folder(Path("runs") / "trug_rbm")
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text("\n".join([HEAD, *(r.row() for r in results), ""]))
    models = {f"{r.name}, {r.method}": r.rbm for r in results}
    start = torch.bernoulli(torch.full((12, x.shape[1]), 0.5, dtype=x.dtype))
    samples = {name: rbm.gibbs(start, args.burn_in) for name, rbm in models.items()}
    draw_images(samples, "samples", out / "samples.png", cmap="gray_r", vmin=0, vmax=1)
    fields = {name: rbm.W.detach().mH[:16] / rbm.W.detach().abs().max() for name, rbm in models.items()}
    draw_images(fields, "columns of W, red: positive", out / "fields.png", cmap="RdBu_r", vmin=-1, vmax=1)
    draw_points(models, out / "truncation.png")
    print(f"table and pictures in {out}")
    return results


if __name__ == "__main__":
    main()
