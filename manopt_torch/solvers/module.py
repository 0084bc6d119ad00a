"""``minimize_module``: a full-batch solver on the parameters of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manopt_torch.manifolds import Euclidean
from manopt_torch.manifolds.product import Product
from manopt_torch.parameter import named_manifolds
from manopt_torch.solvers.base import Result, Solver, minimize


def minimize_module(model: nn.Module, closure: Callable[[], Tensor], solver: Solver, **settings: Any) -> Result:
    """Minimize the loss that ``closure`` computes with ``model``, over the trainable parameters of the model.

    ::

        minimize_module(model, lambda: F.cross_entropy(model(x), y), LBFGS())

    Constrained parameters stay on their manifolds, the others are free. The model is left at the solution, and
    ``result.x`` is a dict of its parameters by name; if anything raises, the model is as it was. Buffers that the
    forward pass writes are written by every evaluation, also of points that are rejected: call ``model.eval()`` first.

    Args:
        model: any module with parameters that require gradients.
        closure: returns the loss as a tensor; it is run with the model's parameters replaced, so that it must use the
            model, not tensors taken out of it before. The model should answer alike each time (no dropout).
        solver, settings: as in :func:`minimize`; a ``callback`` sees the parameters as a tuple, in their order.

    Raises:
        ValueError: for a model that has nothing to train, or that the loss does not depend on.
        RuntimeError: for a closure that calls ``backward()``.
    """
    manifolds = {id(model.get_parameter(name)): M for name, M in named_manifolds(model)}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameter that requires a gradient")
    holder, seen = _Closure(model, closure), list[bool]()

    def cost(*values: Tensor) -> Tensor:
        replaced = {f"model.{name}": value for name, value in zip(named, values, strict=True)}
        f: Tensor = functional_call(holder, replaced, ())
        if not seen and torch.is_grad_enabled() and isinstance(f, Tensor):
            seen.append(f.requires_grad)
            if not f.requires_grad or not any(
                d is not None for d in torch.autograd.grad(f, values, torch.ones_like(f), True, allow_unused=True)
            ):
                raise ValueError("the loss does not depend on the parameters of this model: compute it with this model")
        return f

    space = Product(*(manifolds.get(id(p), Euclidean()) for p in named.values()))
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        result = minimize(cost, space, tuple(named.values()), solver, **settings)
    except BaseException as error:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error):
            raise RuntimeError("closure must only return the loss, and not call backward()") from error
        raise
    with torch.no_grad():
        for p, value in zip(named.values(), result.x, strict=True):
            p.copy_(value)
    return dataclasses.replace(result, x=dict(zip(named, result.x, strict=True)))


class _Closure(nn.Module):
    """``closure`` as the forward of a module that holds ``model``, which is what ``functional_call`` replaces in."""

    def __init__(self, model: nn.Module, closure: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self.closure = model, closure

    def forward(self) -> Tensor:
        return self.closure()
