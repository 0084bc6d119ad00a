"""One training run under Lightning: optimizer by name, checkpoints, early stopping, logs, resuming."""

from __future__ import annotations

import abc
import logging
import math
import multiprocessing
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

import manopt_torch.optim
from harness.cli import claim
from harness.models import SequenceModel
from harness.plots import read_logs
from manopt_torch import max_residual, named_manifolds, param_groups

#: what the papers' RMSprop starts its mean square from, so that the first steps are short where gradients are small
MEAN_SQUARE = 1e-3


def make_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    lr_manifold: float | None = None,
    frame: Literal["tangent", "ambient"] = "ambient",
    lr_bias: float | None = None,
) -> torch.optim.Optimizer:
    """One optimizer for all parameters of ``model``: ours, torch's of this name made Riemannian, or :func:`paper`.

    ``lr`` holds for constrained parameters too if ``lr_manifold`` is None, except that RiemannianAdam and
    RiemannianRMSprop, which move a whole matrix by it where the others move every entry, get √(n·p) times as much.
    ``lr_bias`` is that of the biases of modReLU, ``lr`` if None.
    """
    rates: dict[str, dict[str, float]] = {}
    if lr_bias is not None:
        rates = {name: {"lr": lr_bias} for name, _ in model.named_parameters() if name.endswith("modrelu.bias")}
    if name == "paper":
        return paper(model, lr, 2 * lr if lr_manifold is None else lr_manifold, rates)
    for weight, _ in named_manifolds(model):
        entries = model.get_parameter(weight).numel() if name in ("RiemannianAdam", "RiemannianRMSprop") else 1
        rates[weight] = {"lr": lr * math.sqrt(entries) if lr_manifold is None else lr_manifold}
    groups = param_groups(model, rates)
    if hasattr(manopt_torch.optim, name):
        return getattr(manopt_torch.optim, name)(groups, lr=lr)
    return manopt_torch.optim.riemannian(getattr(torch.optim, name)(groups, lr=lr), frame=frame)


def paper(
    model: nn.Module, lr: float, lr_manifold: float, rates: dict[str, dict[str, float]] | None = None
) -> torch.optim.Optimizer:
    """The recipe of Wisdom et al., 2016: W by Cayley steps of fixed length, everything else by RMSprop.

    ::

        W ← (I + λ/2 A)⁻¹(I − λ/2 A) W,  A = G Wᴴ − W Gᴴ,  λ = lr_manifold / 2
        s ← 0.9 s + 0.1 g²,  p ← p − lr · g / (√s + 1e-8),  s = 1e-3 at the start    (theirs lacks the 1e-8)

    One RMSprop does both: with s kept at 1 its step is that of plain gradient descent, which ``frame="ambient"`` makes
    the step of ``RiemannianSGD`` (tested).
    """
    steps = {name: {"lr": lr_manifold, "alpha": 1.0} for name, _ in named_manifolds(model)}
    groups = param_groups(model, {**(rates or {}), **steps})
    optimizer = manopt_torch.optim.riemannian(torch.optim.RMSprop(groups, lr=lr, alpha=0.9), frame="ambient")
    for group in optimizer.param_groups:
        start = 1.0 if group["alpha"] == 1 else MEAN_SQUARE
        for p in group["params"]:
            square = torch.full_like(p, complex(start, start) if p.is_complex() else start).detach()
            optimizer.state[p] = {"step": torch.tensor(0.0), "square_avg": square}
    return optimizer


class Sequences(L.LightningModule, abc.ABC):
    """A :class:`SequenceModel` that learns ``loss``, and is validated by ``scores``."""

    def __init__(self, args: Namespace, model: SequenceModel) -> None:
        super().__init__()
        self.args = args
        self.model = model

    @abc.abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What is minimized, a mean over the batch."""

    @abc.abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Means over the batch by name, what a reader wants to know; ``loss`` is added to them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, targets = batch
        loss = self.loss(self(x), targets)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        found = {f"val_{name}": value for name, value in self.measures(batch).items()}
        self.log_dict(found, prog_bar=True, batch_size=len(batch[0]))

    def measures(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """``scores`` and ``loss`` of one batch."""
        outputs = self(batch[0])
        return {"loss": self.loss(outputs, batch[1]), **self.scores(outputs, batch[1])}

    @torch.no_grad()
    def evaluate(self, batches: Any) -> dict[str, float]:
        """Means of ``measures`` over batches of one size."""
        found = [self.measures(batch) for batch in batches]
        return {name: torch.stack([m[name] for m in found]).mean().item() for name in found[0]}

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.args)
        if self.args.schedule == "constant":
            return optimizer
        return cosine(optimizer, int(self.trainer.estimated_stepping_batches))


def optimizer_of(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """The optimizer that the command line asks for."""
    return make_optimizer(model, args.optimizer, args.lr, args.lr_manifold, args.frame, args.lr_bias)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    """Lightning's description of a learning rate that falls to zero over ``steps`` along half a cosine."""
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1))) / 2
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(model: Sequences, train: Any, validation: Any, args: Namespace) -> L.Trainer:
    """Train until ``args.epochs`` or until val_loss has not improved for ``args.patience`` validations.

    Results are kept in ``trainer.default_root_dir``: checkpoints/best.ckpt (lowest val_loss), checkpoints/last.ckpt,
    csv/ and tensorboard/ logs, settings.json. Gradients of an LSTM are clipped to [−1, 1] entry by entry, those of the
    others are not (Wisdom et al., 2016). A validation loss that is not finite ends the run.

    Raises ``SystemExit`` for an optimizer that cannot be had with these settings, before anything is written.
    """
    try:
        optimizer_of(model, args)
    except ValueError as error:
        raise SystemExit(f"--optimizer {args.optimizer}: {error}") from error
    out = claim(args)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hardware, tips
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # --resume
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")  # Lightning's own call of torch
    main = multiprocessing.parent_process() is None
    terminal = sys.stdout.isatty() and main
    checkpoints: dict[str, Any] = {
        "dirpath": out / "checkpoints", "enable_version_counter": False, "save_on_train_epoch_end": True
    }  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=out,
        max_epochs=args.epochs,
        callbacks=[
            ModelCheckpoint(filename="best", monitor="val_loss", **checkpoints),
            ModelCheckpoint(filename="last", **checkpoints),
            Patience("val_loss", patience=args.patience),
            *([TQDMProgressBar()] if terminal else [_Lines(args.epochs)] if main else []),
        ],
        logger=[CSVLogger(out, "csv"), TensorBoardLogger(out, "tensorboard")],
        log_every_n_steps=len(train),
        gradient_clip_val=1.0 if args.model == "lstm" else None,
        gradient_clip_algorithm="value",
        enable_progress_bar=terminal,
        enable_model_summary=False,
    )
    last = out / "checkpoints" / "last.ckpt" if args.resume else None
    torch.set_flush_denormal(True)  # vanishing gradients of an LSTM end there, and cost eight times as much
    try:
        trainer.fit(model, train, validation, ckpt_path=last, weights_only=True)
    finally:
        torch.set_flush_denormal(False)
    return trainer


def outcome(trainer: L.Trainer, model: nn.Module, start: float) -> dict[str, Any]:
    """What every example tells of a run that began at ``time.perf_counter() == start``."""
    out = Path(trainer.default_root_dir)
    losses = [value for name in ("train_loss", "val_loss") for value in read_logs(out / "csv").get(name, {}).values()]
    return {
        "residual": max_residual(model),
        "finite": all(map(math.isfinite, losses)),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": time.perf_counter() - start,
        "out": out,
    }


def health(result: dict[str, Any]) -> str:
    """The residual of W and the loss curve of an ``outcome``, in words."""
    curve = "finite" if result["finite"] else "NOT finite"
    return f"residual of W {result['residual']:.1e}, loss curve {curve}"


class Patience(EarlyStopping):
    """Early stopping that keeps count when a run is resumed, and takes the patience that is asked for then."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})


class _Lines(L.Callback):
    """About twenty lines in a run that nobody watches on a terminal."""

    def __init__(self, epochs: int) -> None:
        self.every = max(1, epochs // 20)
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every == 0:
            found = ", ".join(f"{n} {v.item():.4g}" for n, v in trainer.callback_metrics.items() if n[:4] == "val_")
            seconds = time.perf_counter() - self.start
            print(f"step {trainer.global_step}: {found}, {seconds:.0f} s", flush=True)
