"""Every optimizer of torch.optim × implementation × number × frame under ``riemannian``: one table, and its proof.

``TABLE`` says what becomes of a cell; the test finds out. ``python tests/optim/test_riemannian_table.py`` prints it as
Markdown, with the same words.
"""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from manopt_torch import Euclidean, Stiefel, Unitary
from manopt_torch.optim import riemannian

CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
IMPLEMENTATIONS = ("default", "foreach", "fused", "capturable")
DTYPES = {"real": torch.float64, "complex": torch.complex128}
FRAMES = ("tangent", "ambient")
SETTINGS = {
    "SGD": {"momentum": 0.9},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.3},
    "AdamW": {"weight_decay": 0.0},
}

#: refused by :func:`riemannian`, whatever the rest
REFUSED = {
    "ASGD": "it averages points, and an average leaves the manifold",
    "Adafactor": "it scales its step by |p|, and factors the gradient by rows and columns of the embedding",
    "LBFGS": "it evaluates several points in one step",
    "SparseAdam": "it takes sparse gradients only",
}
#: refused in one frame
REFUSED_IN = {
    ("Rprop", "ambient"): (
        "it lengthens its steps while the gradient keeps its signs, and the ambient gradient keeps them at a minimum "
        "on the manifold"
    )
}
#: refused by torch itself: (class, implementation, number), None for any -> what its error says
TORCH_REFUSES = {
    (None, "capturable", None): "capturable",
    (None, "fused", "complex"): "fused",
    ("Muon", "default", "complex"): "complex",
    ("SparseAdam", "default", "complex"): "complex",
}


def offered(name: str, implementation: str) -> bool:
    """Whether the constructor takes it."""
    return implementation == "default" or implementation in inspect.signature(CLASSES[name]).parameters


def torch_refuses(name: str, implementation: str, number: str) -> str | None:
    for cell, reason in TORCH_REFUSES.items():
        if all(want in (None, have) for want, have in zip(cell, (name, implementation, number), strict=True)):
            return reason
    return None


def cell(name: str, implementation: str, number: str, frame: str) -> tuple[str, str]:
    """(what becomes of it, reason)."""
    if not offered(name, implementation):
        return "not offered", f"torch.optim.{name} has no {implementation}"
    if name in REFUSED and (name, implementation, number) not in TORCH_REFUSES:
        return "refused", REFUSED[name]
    if (name, frame) in REFUSED_IN:
        return "refused", REFUSED_IN[name, frame]
    if reason := torch_refuses(name, implementation, number):
        return "torch refuses", reason
    return "passes", ""


CELLS = [(n, i, d, f) for n in sorted(CLASSES) for i in IMPLEMENTATIONS for d in DTYPES for f in FRAMES]
OFFERED = [c for c in CELLS if cell(*c)[0] != "not offered"]


def build(name: str, implementation: str, groups) -> torch.optim.Optimizer:
    settings = {"lr": 0.02, **SETTINGS.get(name, {}), **({} if implementation == "default" else {implementation: True})}
    return CLASSES[name](groups, **settings)


def start(number: str):
    """Two points, two matrices that are not constrained, and what they are drawn to."""
    generator = torch.Generator().manual_seed(0)
    manifolds = [Stiefel(), Unitary(), Euclidean(), None]
    shapes = [(5, 3), (3, 3), (4, 2), (2, 3)]
    params, targets = [], []
    for M, shape in zip(manifolds, shapes, strict=True):
        at = M or Euclidean()
        params.append(nn.Parameter(at.random(*shape, dtype=DTYPES[number], generator=generator)))
        targets.append(at.random(*shape, dtype=DTYPES[number], generator=generator))
    return params, manifolds, targets


def groups_of(params, manifolds):
    return [{"params": [p], **({} if M is None else {"manifold": M})} for p, M in zip(params, manifolds, strict=True)]


def run(optimizer, params, targets, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [(p - t).abs().square().sum() for p, t in zip(params, targets, strict=True)]
        sum(parts).backward()
        losses.append(sum(parts[:2]).item())
        optimizer.step()
    return losses


def plain_run(name: str, implementation: str, number: str, steps: int):
    params, _, targets = start(number)
    run(build(name, implementation, [{"params": [p]} for p in params]), params, targets, steps)
    return params


@pytest.mark.parametrize(("name", "implementation", "number", "frame"), OFFERED)
def test_cell(name, implementation, number, frame):
    becomes, reason = cell(name, implementation, number, frame)
    params, manifolds, targets = start(number)
    if becomes == "refused":
        groups = groups_of(params, manifolds) if name != "LBFGS" else params
        with pytest.raises(ValueError, match=f"^{name} .*") as error:
            riemannian(build(name, implementation, groups), frame=frame)
        assert reason.removeprefix("it ") in str(error.value)
    elif becomes == "torch refuses":
        with pytest.raises((RuntimeError, AssertionError, ValueError, NotImplementedError), match=reason):
            plain_run(name, implementation, number, 1)
        with pytest.raises((RuntimeError, AssertionError, ValueError, NotImplementedError), match=reason):
            run(riemannian(build(name, implementation, groups_of(params, manifolds)), frame=frame), params, targets, 1)
    else:
        optimizer = riemannian(build(name, implementation, groups_of(params, manifolds)), frame=frame)
        losses = run(optimizer, params, targets, 20)
        assert losses[-1] < losses[0]
        assert all(M.residual(p.detach()) < 1e-12 for p, M in zip(params[:2], manifolds[:2], strict=True))
        for p, q in zip(params[2:], plain_run(name, implementation, number, 20)[2:], strict=True):
            assert torch.equal(p, q)  # on Euclidean(), and without a manifold, the plain run to the bit


def test_the_table_is_of_all_classes_and_no_entry_is_stale():
    assert REFUSED.keys() <= CLASSES.keys()
    assert {name for name, _ in REFUSED_IN} <= CLASSES.keys()
    passing = {c[0] for c in OFFERED if cell(*c)[0] == "passes"}
    assert passing | REFUSED.keys() == CLASSES.keys()
    assert not passing & REFUSED.keys()
    for name, implementation in sorted({c[:2] for c in CELLS} - {c[:2] for c in OFFERED}):
        with pytest.raises(TypeError, match=implementation):
            build(name, implementation, start("real")[0])


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - REFUSED.keys()))
def test_grad_scaler_skips_what_overflows_and_steps_otherwise(name):
    params, manifolds, targets = start("real")
    params, targets = ([x.detach().float() for x in xs] for xs in (params, targets))
    params = [nn.Parameter(p) for p in params]
    optimizer = riemannian(build(name, "default", groups_of(params, manifolds)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (math.inf, 1.0):
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        loss = sum((p - t).square().sum() for p, t in zip(params, targets, strict=True)) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [factor == math.inf] * 4
        assert all(M.residual(p.detach()) < 1e-5 for p, M in zip(params[:2], manifolds[:2], strict=True))
    assert scaler.get_scale() == 4.0


def test_lightning_fits_with_a_wrapped_optimizer(tmp_path):
    lightning = pytest.importorskip("lightning")
    from manopt_torch import constrain, max_residual, param_groups

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = constrain(nn.Linear(3, 5, dtype=torch.float64), "weight", Stiefel(), init="random")
            self.losses = []

        def training_step(self, batch, _):
            x, y = batch
            loss = (self.layer(x) - y).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = riemannian(torch.optim.Adam(param_groups(self), lr=0.05))
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)}

    torch.manual_seed(0)
    x = torch.randn(64, 3, dtype=torch.float64)
    y = x @ Stiefel().random(5, 3, dtype=torch.float64).mH
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = Regression()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and on logging
        trainer = lightning.Trainer(
            max_epochs=5, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=10.0, default_root_dir=tmp_path, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(model, loader)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert len(model.losses) == 20
    assert model.losses[-1] < 0.7 * model.losses[0]
    assert max_residual(model) < 1e-12
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]
    assert saved["param_groups"][0]["manifold"] == "Stiefel()"


BAR = r"\|"  # a bar inside a cell of a table
MARKS = {"passes": "✓", "refused": "refused", "torch refuses": "torch refuses", "not offered": "–"}


def markdown() -> str:
    """The table for the README: a row per class, a column per implementation."""
    heads = [*IMPLEMENTATIONS[:-1], "capturable, on a CPU"]
    lines = ["| torch.optim | " + " | ".join(heads) + " | note |", "|---" * (len(IMPLEMENTATIONS) + 2) + "|"]
    for name in sorted(CLASSES):
        shown, notes = [], [REFUSED[name]] if name in REFUSED else []
        for implementation in IMPLEMENTATIONS:
            kinds = {(d, f): cell(name, implementation, d, f)[0] for d in DTYPES for f in FRAMES}
            tangent = [kinds[d, "tangent"] for d in DTYPES]
            words = MARKS[tangent[0]]
            if len(set(tangent)) > 1:
                words = ", ".join(f"{d}: {MARKS[k]}" for d, k in zip(DTYPES, tangent, strict=True))
            shown.append(words)
        notes += [f"frame={f!r} is refused: {why}" for (n, f), why in REFUSED_IN.items() if n == name]
        lines.append(f"| {name} | " + " | ".join(shown) + f" | {'; '.join(notes).replace('|', BAR)} |")
    return "\n".join(lines)


def test_the_readme_shows_this_table() -> None:
    assert markdown() in (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")


if __name__ == "__main__":
    print(markdown())
