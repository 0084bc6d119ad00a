"""What :func:`riemannian` refuses, each with its reason: better an error than a step that is quietly wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from manopt_torch.manifolds import Euclidean
from manopt_torch.optim.groups import Group, as_groups, describe
from manopt_torch.parameter import ManifoldParameter

#: optimizers that no choice of ``frame`` makes Riemannian
REFUSED: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates several points in one step",
    torch.optim.ASGD: "it averages points, and an average leaves the manifold",
    torch.optim.Adafactor: "it scales its step by |p|, and factors the gradient by rows and columns of the embedding",
    torch.optim.SparseAdam: "it takes sparse gradients only",
}


def refuse_optimizer(optimizer: torch.optim.Optimizer, frame: str, tangent_state: tuple[str, ...] | None) -> None:
    """Raise if this instance cannot be wrapped with these options."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"got {optimizer!r}; write riemannian(torch.optim.Adam(param_groups(model), lr=...))")
    kind = type(optimizer)
    for refused, reason in REFUSED.items():
        if isinstance(optimizer, refused):
            raise ValueError(f"{kind.__name__} cannot be made Riemannian: {reason}")
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"the step of this {kind.__name__} was replaced already: wrap the optimizer before building the scheduler"
        )
    if tangent_state is None and getattr(torch.optim, kind.__name__, None) is not kind:
        raise ValueError(
            f"{kind.__name__} is not one of torch's own optimizers: name the entries of its state that are "
            "combinations of gradients, as in tangent_state=('exp_avg',), or () if there are none"
        )
    if frame not in ("tangent", "ambient"):
        raise ValueError(f"frame must be 'tangent' or 'ambient', got {frame!r}")
    if frame == "ambient" and isinstance(optimizer, torch.optim.Rprop):
        raise ValueError(
            "Rprop lengthens its steps while the gradient keeps its signs, and the ambient gradient keeps them at a "
            "minimum on the manifold: use frame='tangent'"
        )
    if not any("manifold" in group for group in optimizer.param_groups):
        raise TypeError(
            f"no group of this {kind.__name__} names a manifold: build it with param_groups(model) instead of "
            "model.parameters(), or for a bare ManifoldParameter W with [{'params': [W], 'manifold': W.manifold}]"
        )
    # what is not a manifold, a shape that does not fit, another declaration
    as_groups([group for group in optimizer.param_groups if "manifold" in group])


def refuse_group(name: str, frame: str, group: Group) -> None:
    """Refuse settings whose meaning is lost on a manifold; settings change between steps, so every step asks."""
    manifold = group.get("manifold")
    if manifold is None:
        params = group["params"]
        for p in [params] if isinstance(params, Tensor) else params:
            if isinstance(p, ManifoldParameter):
                raise TypeError(
                    f"{describe(p)} on {p.manifold!r} is in a group without a manifold: use param_groups(model)"
                )
        return
    if not isinstance(manifold, Euclidean):
        if group.get("weight_decay") and not manifold.constant_norm:
            raise ValueError(
                f"weight_decay={group['weight_decay']} of {name} would be ignored on {manifold!r}: give its "
                "group weight_decay=0, and add the penalty you mean to the loss"
            )
        if group.get("centered") and frame == "tangent":
            raise ValueError(
                f"centered=True of {name} subtracts the square of a mean gradient entry by entry, which fails "
                "once the mean has been carried to another point: use frame='ambient' or centered=False"
            )
        if group.get("differentiable"):
            raise ValueError(f"differentiable=True of {name} is not supported on {manifold!r}")
