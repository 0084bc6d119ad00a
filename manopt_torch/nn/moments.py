"""What an activation does to a normal distribution, which units are dead, and what weight decay must leave alone."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manopt_torch.nn.kernel_activation import KernelActivation
from manopt_torch.nn.trug import TruG

#: beyond it N(0, 1) has the probability 1e-32; and the width of the pieces that are integrated by 8 Gauss points each
REACH, PIECE = 12.0, 1 / 64
#: activations that act on each number alone
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Hardtanh, nn.Sigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.Threshold, nn.Softshrink, nn.Hardshrink, nn.LogSigmoid, TruG, KernelActivation),
)
#: parameters by name that say where or how an activation bends: weight decay would pull them to another activation
SHAPES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.PReLU: ("weight",),
    TruG: ("lower", "upper", "raw_width"),
    KernelActivation: ("centers",),
}


@torch.no_grad()
def moments(activation: nn.Module, units: int | None = None) -> tuple[Tensor, Tensor]:
    """E f(z) and E f(z)² for z ~ N(0, 1), in double precision, of an activation as it is in evaluation.

    For the leaky ReLU family in closed form, with α the slope on the left::

        E f = (1 − α)/√(2π),    E f² = (1 + α²)/2

    Others, learned ones too, by 8 Gauss-Legendre points on each of 1,536 pieces of [−12, 12]: to 1e-14 where f is
    smooth or has its kinks at multiples of 1/64, and to about 1e-6 for other kinks. (Gauss-Hermite quadrature would
    lose three digits more at every kink.)

    Args:
        activation: a module that acts on each number alone.
        units: the size of the last dimension that it asks for; by default its ``num_units``. Without one the moments
            are single numbers, with one they have the shape ``(units,)``; so they do for a PReLU of many slopes.

    Raises:
        ValueError: for a module that does not keep the shape of its input.
    """
    slope = _left_slope(activation)
    if slope is not None:
        return (1 - slope) / math.sqrt(2 * math.pi), (1 + slope.square()) / 2
    z, weights = _nodes()
    units = getattr(activation, "num_units", None) if units is None else units
    inputs = z if units is None else z[:, None].expand(-1, units)
    dtype = next((t.dtype for t in activation.parameters()), torch.float64)
    training = activation.training
    try:
        f = activation.eval()(inputs.to(dtype)).double()
    finally:
        activation.train(training)
    if f.shape != inputs.shape:
        raise ValueError(
            f"an activation keeps the shape of its input, this one made {tuple(f.shape)} of {tuple(z.shape)}"
        )
    return weights @ f, weights @ f.square()


def gain(activation: nn.Module, units: int | None = None) -> Tensor:
    """1/√(E f(z)²), z ~ N(0, 1): weights of the standard deviation gain/√fan_in keep the power of a signal from layer
    to layer (He, Zhang, Ren and Sun, 2015, eq. 15, for any activation); arguments as of :func:`moments`."""
    return moments(activation, units)[1].rsqrt()


@torch.no_grad()
def he_normal_(weight: Tensor, activation: nn.Module, generator: torch.Generator | None = None) -> Tensor:
    """Fill a weight (out, in, *kernel_size) in place: normal, with the standard deviation gain/√fan_in.

    ``activation`` is what comes *before* the layer; units of different shapes get the gain of their mean power.
    """
    if weight.dim() < 2:
        raise ValueError(f"expected a weight of shape (out, in, ...), got {tuple(weight.shape)}")
    power = moments(activation)[1].mean()
    return weight.normal_(0, 1 / math.sqrt(power * weight[0].numel()), generator=generator)


def dead_fraction(model: nn.Module, batches: Iterable[Any], unit_dim: int = 1) -> dict[str, float]:
    """The part of units of each activation in ``model`` whose derivative was zero on all inputs that were seen.

    No gradient passes a dead unit, so that nothing before it learns. Units are the places along ``unit_dim`` of an
    activation's input, features and channels alike; the model is run in evaluation, and left as it was.

    Args:
        batches: inputs of the model, or tuples of which the first is the input, as a ``DataLoader`` has them.

    Raises:
        ValueError: for a model without elementwise activations, and for no batches.
    """
    names: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, ELEMENTWISE)
    }
    if not names:
        raise ValueError("the model has no activation module; a function such as torch.relu cannot be watched")
    alive: dict[str, Tensor] = {}

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        with torch.enable_grad():
            z = inputs[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(type(module).forward(module, z).sum(), z)
        own = (slope != 0).movedim(unit_dim, 0).flatten(1).any(1)
        alive[names[module]] = own | alive.get(names[module], own)

    hooks = [module.register_forward_hook(watch) for module in names]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                model(batch[0] if isinstance(batch, (tuple, list)) else batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if not alive:
        raise ValueError("there were no batches")
    return {name: 1 - float(own.double().mean()) for name, own in alive.items()}


def no_weight_decay(model: nn.Module) -> dict[str, dict[str, float]]:
    """Overrides for :func:`manopt_torch.param_groups` that keep weight decay from slopes of PReLU, truncation points of
    TruG and centers of kernels, which it would pull towards another activation::

        AdamW(param_groups(model, no_weight_decay(model)), weight_decay=0.01)
    """
    found: dict[str, dict[str, float]] = collections.OrderedDict()
    for name, module in model.named_modules():
        for kind, parameters in SHAPES.items():
            if isinstance(module, kind):
                own = dict(module.named_parameters(recurse=False))
                found |= {f"{name}.{p}".lstrip("."): {"weight_decay": 0.0} for p in parameters if p in own}
    return dict(found)


def _left_slope(activation: nn.Module) -> Tensor | None:
    """α of a leaky ReLU, of whatever kind."""
    if isinstance(activation, nn.PReLU):
        weight = activation.weight.detach().double()
        return weight[0] if weight.numel() == 1 else weight
    slopes = {nn.ReLU: lambda a: 0.0, nn.Identity: lambda a: 1.0, nn.LeakyReLU: lambda a: a.negative_slope}
    slopes[nn.RReLU] = lambda a: (a.lower + a.upper) / 2
    find = slopes.get(type(activation))
    return None if find is None else torch.tensor(find(activation), dtype=torch.float64)


def _nodes() -> tuple[Tensor, Tensor]:
    """Points and weights of the quadrature for N(0, 1)."""
    x, w = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(8))
    left = torch.arange(-REACH, REACH, PIECE, dtype=torch.float64)
    z = (left[:, None] + PIECE * (x + 1) / 2).flatten()
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return z, (w * PIECE / 2).repeat(len(left)) * density
