"""Clipping by the norm of the Riemannian gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from manopt_torch.manifolds import Euclidean, Manifold
from manopt_torch.parameter import ManifoldParameter, declared, param_groups
from manopt_torch.precision import widen
from manopt_torch.storage import partition, stack


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients by one number, so that the norm of the Riemannian gradients is at most ``max_norm``.

    The total norm is the ``norm_type``-norm of ‖rgrad(x, g)‖_x over all points x, in the metric of their manifolds;
    unconstrained parameters count with all their entries. Every ``p.grad`` is multiplied, in place, by
    ``min(1, max_norm / (total + 1e-6))``. Without constraints this is ``torch.nn.utils.clip_grad_norm_``.
    A component of the gradient that is normal to the manifold, however large, clips nothing: no step contains it.

    Args:
        parameters: the model, groups with a ``"manifold"`` such as ``optimizer.param_groups``, or tensors, as
            ``model.parameters()``, whose manifold is the declared one. What :func:`constrain` declared is not known of
            the bare tensors of a copied or unpickled model: give the model or groups there.
        max_norm, norm_type, foreach: as in torch; ``norm_type`` may be ``inf``.
        error_if_nonfinite: raise ``RuntimeError`` where the total is NaN or inf, and scale nothing.

    Returns:
        The total norm before clipping.

    Raises:
        ValueError: for a sparse gradient of a constrained parameter.
    """
    free: list[Any] = []
    constrained: dict[Manifold, list[Any]] = {}
    for p, M in _with_manifolds(parameters):
        (free if isinstance(M, Euclidean) else constrained.setdefault(M, [])).append(p)
    lengths = []  # ‖rgrad(x, g)‖_x of every point: a norm of these, and of all other entries, is the total
    for M, params in constrained.items():
        for alike in partition(M, [p for p in params if p.grad is not None]):
            x, g = widen(stack(alike)), widen(stack([p.grad for p in alike]))
            lengths.append(M.norm(x, M.rgrad(x, g)))
    entries = [p.grad for p in free if p.grad is not None]
    total = torch.nn.utils.get_total_norm([*entries, *lengths], norm_type, error_if_nonfinite, foreach)
    torch.nn.utils.clip_grads_with_norm_([*free, *itertools.chain(*constrained.values())], max_norm, total, foreach)
    return total


def _with_manifolds(parameters: nn.Module | Tensor | Iterable[Any]) -> Iterator[tuple[Any, Manifold]]:
    """Each parameter with its manifold."""
    if isinstance(parameters, nn.Module):
        parameters = param_groups(parameters)
    known = declared()
    for item in [parameters] if isinstance(parameters, Tensor) else list(parameters):
        group: dict[str, Any] = item if isinstance(item, dict) else {"params": [item]}
        for p in [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"]):
            tensor = p[1] if isinstance(p, tuple) else p  # named_parameters() gives pairs
            own = tensor.manifold if isinstance(tensor, ManifoldParameter) else known.get(id(tensor), Euclidean())
            yield tensor, group.get("manifold", own)
