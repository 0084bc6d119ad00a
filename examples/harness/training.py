"""One training run under Lightning: optimizer by name, checkpoints, early stopping, logs, resuming."""

from __future__ import annotations

import logging
import math
import multiprocessing
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

import manopt_torch.optim
from manopt_torch import named_manifolds, param_groups


def make_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    lr_manifold: float | None = None,
    frame: Literal["tangent", "ambient"] = "ambient",
) -> torch.optim.Optimizer:
    """One optimizer for all parameters of ``model``: ours, or torch's of this name made Riemannian.

    ``lr`` holds for constrained parameters too if ``lr_manifold`` is None, except that RiemannianAdam, which moves a
    whole matrix by its learning rate where the others move every entry, gets √(n·p) times as much.
    """
    rates = {}
    for weight, _ in named_manifolds(model):
        entries = model.get_parameter(weight).numel() if name == "RiemannianAdam" else 1
        rates[weight] = {"lr": lr * math.sqrt(entries) if lr_manifold is None else lr_manifold}
    groups = param_groups(model, rates)
    if hasattr(manopt_torch.optim, name):
        return getattr(manopt_torch.optim, name)(groups, lr=lr)
    return manopt_torch.optim.riemannian(getattr(torch.optim, name)(groups, lr=lr), frame=frame)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    """Lightning's description of a learning rate that falls to zero over ``steps`` along half a cosine."""
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / steps, 1))) / 2
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(model: L.LightningModule, train: Any, validation: Any, args: Namespace, out: Path) -> L.Trainer:
    """Train until ``args.epochs`` or until val_loss has not improved for ``args.patience`` epochs, keeping in ``out``:

    checkpoints/best.ckpt (lowest val_loss), checkpoints/last.ckpt, csv/ and tensorboard/ logs.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hardware, tips
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data are in memory
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # --resume
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")  # Lightning's own call of torch
    terminal = sys.stdout.isatty() and multiprocessing.parent_process() is None
    checkpoints: dict[str, Any] = {
        "dirpath": out / "checkpoints", "enable_version_counter": False, "save_on_train_epoch_end": True
    }  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        callbacks=[
            ModelCheckpoint(filename="best", monitor="val_loss", **checkpoints),
            ModelCheckpoint(filename="last", **checkpoints),
            EarlyStopping("val_loss", patience=args.patience),
            *([TQDMProgressBar()] if terminal else []),
        ],
        logger=[CSVLogger(out, "csv"), TensorBoardLogger(out, "tensorboard")],
        log_every_n_steps=len(train),
        enable_progress_bar=terminal,
        enable_model_summary=False,
    )
    last = out / "checkpoints" / "last.ckpt" if args.resume else None
    trainer.fit(model, train, validation, ckpt_path=last, weights_only=True)
    return trainer
