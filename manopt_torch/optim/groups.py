"""Parameter groups that name their manifold: how they are made, and when they contradict a declaration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manopt_torch import parameter
from manopt_torch.manifolds import Euclidean, Manifold
from manopt_torch.parameter import ManifoldParameter, fault_of, param_groups

Group = dict[str, Any]
#: a module, ``param_groups(module)``, groups with a ``"manifold"``, or a list of ``ManifoldParameter``
Params = nn.Module | Iterable[Any]


def as_groups(params: Params, tolerance: float | None = None) -> list[Group]:
    """Any form of ``params`` as groups that each name their manifold; ``tolerance`` is for :func:`fault_of`.

    Raises ``TypeError`` where a tensor has none, ``ValueError`` where it was declared on another one, has a shape that
    does not fit, or a value that is off the manifold: a step would not bring it back.
    """
    if isinstance(params, nn.Module):
        return param_groups(params)
    items = _ordered(params)
    if items and not any(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    return [group for item in items for group in _with_manifold(item, tolerance)]


def _ordered(params: Tensor | Iterable[Any]) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "the parameters are in a set, whose order, and that of every checkpoint, is random: give a list"
        )
    return [params] if isinstance(params, Tensor) else list(params)


def _with_manifold(group: Group, tolerance: float | None) -> list[Group]:
    members: dict[Manifold, list[Any]] = {group["manifold"]: []} if "manifold" in group else {}
    for p in _ordered(group["params"]):
        tensor = p[1] if isinstance(p, tuple) else p  # named_parameters() gives pairs
        own = tensor.manifold if isinstance(tensor, ManifoldParameter) else None
        manifold = group.get("manifold", own)
        if not isinstance(manifold, Manifold):
            raise TypeError(
                f"{describe(tensor)} has no manifold (got {manifold!r}), and a step would leave the manifold it may be "
                "meant for: pass param_groups(model) or the model itself, or a group {'params': [...], 'manifold': "
                "Stiefel()}, where Euclidean() stands for an unconstrained one"
            )
        if own is not None and own != manifold:
            raise ValueError(f"{describe(tensor)} was declared on {own!r}, but its group says {manifold!r}")
        if tensor.is_conj():
            raise ValueError(f"{describe(tensor)} is a view, lazily conjugated: make it of x.resolve_conj()")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{describe(tensor)} is expanded, its entries share memory: make it of x.clone()")
        manifold.check_shape(tuple(tensor.shape))
        # of a DTensor a collective call, which not every rank may make; flat space has nothing to be off
        seen = type(tensor.detach()) is Tensor and not isinstance(manifold, Euclidean)
        if seen and (fault := fault_of(tensor, manifold, tolerance)):
            raise ValueError(
                f"{describe(tensor)} {fault}; p.copy_(manifold.nearest(p)) under torch.no_grad() moves it to a point. "
                "Was it initialised after it was constrained?"
            )
        members.setdefault(manifold, []).append(p)
    if not all(isinstance(manifold, Manifold) for manifold in members or [None]):
        raise TypeError(
            "a group without parameters must name its manifold, as in {'params': [], 'manifold': Stiefel()}"
        )
    return [{**group, "params": params, "manifold": manifold} for manifold, params in members.items()]


def refuse_late_declarations(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` where a parameter is declared, since ``optimizer`` was built, on another kind of manifold.

    Every step asks; nothing is looked at unless a slot was written somewhere, or a group was given another manifold,
    since the last time. Another option of the same manifold is the group's to choose.
    """
    if torch.compiler.is_compiling() or vars(optimizer).get("_known") == (
        known := (parameter.slots_written, *(group.get("manifold") for group in optimizer.param_groups))
    ):
        return
    declared = parameter.declared()
    for group in optimizer.param_groups:
        manifold = group.get("manifold")
        for p in group["params"]:
            own = p.manifold if isinstance(p, ManifoldParameter) else declared.get(id(p), manifold)
            if type(own) is not type(manifold):
                raise ValueError(
                    f"{describe(p)} is declared on {own!r}, but its group in the optimizer says {manifold!r}: "
                    "constrain first, then build the optimizer"
                )
    vars(optimizer)["_known"] = known


def refuse_nonfinite(optimizer: torch.optim.Optimizer, params: Sequence[Any], g: Tensor) -> None:
    """Raise ``RuntimeError``, naming the first of P parameters with NaN or inf in ``g[i]``, what came of its gradient:
    (P, ...)."""
    finite = torch.isfinite(g).reshape(len(params), math.prod(g.shape[1:])).all(1)
    if not finite.all():
        p = params[int(finite.int().argmin())]
        for i, group in enumerate(optimizer.param_groups):
            for j, own in enumerate(group["params"]):
                if own is p:
                    name = repr(group["param_names"][j]) if "param_names" in group else f"parameter {j} of group {i}"
                    raise RuntimeError(
                        f"the gradient of {name}, {describe(p)}, holds NaN or inf, or is too large for {g.dtype}: "
                        "nothing was stepped. Skip this batch, or set error_if_nonfinite=False to step all the same"
                    )


def describe(p: Any) -> str:
    """What an error message calls a parameter."""
    return f"a {type(p).__name__} of shape {tuple(p.shape)}" if isinstance(p, Tensor) else repr(p)
