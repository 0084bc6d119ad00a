"""The recurrence of unitary networks whose W is a product of structured factors, as one differentiable function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manopt_torch.nn.activations import EPSILON, TINY, modrelu
from manopt_torch.nn.factors import Product
from manopt_torch.nn.recurrence import check_tensor, check_tensors, kernels, needs_plain_loop, no_autocast
from manopt_torch.nn.unitary_maps import UnitaryMap

#: numbers in the states of a chunk of steps, for which the backward pass computes together what can be: cache-sized
CHUNK = 2**17


def structured_recurrence(
    input: Tensor,
    weight_ih: Tensor,
    unitary: UnitaryMap,
    bias: Tensor,
    h0: Tensor,
    mask: Tensor | None = None,
    *,
    hard: bool = False,
) -> Tensor:
    """All states of h_t = σ(W h_{t-1} + V x_t), σ = modReLU with bias b, for a W given by its action.

    Shapes, with T steps, B sequences, M inputs, N units and any batch *P of independent networks: ``input`` x
    (T, *P, B, M), real or of the weights' dtype; ``weight_ih`` V (*P, N, M); ``unitary`` W of size N and batch shape P;
    ``bias`` b (*P, N), real; ``h0`` (*P, B, N); result (T, *P, B, N). ``mask`` (T, *P, B) is True where a sequence has
    a step; where it is False, the state stays as it is.

    The factors of W are computed once, the products with V at once. The backward pass multiplies by Wᴴ step by step,
    and differentiates the factors over many steps together. Kept for it are the arguments of σ, as large as the states.

    Differentiable any number of times, in reverse and forward mode, and under ``torch.func``; all but the first reverse
    derivative take a plain loop over the steps.

    Raises:
        ValueError: for tensors whose shapes do not fit each other and the map.
        TypeError: for tensors whose dtypes do not fit each other and the map.
    """
    *P, N, M = weight_ih.shape
    factors = unitary.factors()
    check_tensor("weight_ih", weight_ih, (*unitary.batch_shape, unitary.size, M), factors[0].dtype)
    check_tensors(input, h0, bias, mask, weight_ih, (len(input), *P, h0.shape[-2] if h0.dim() > 1 else 0, M, N))
    if mask is not None:
        input = input.masked_fill(~mask.unsqueeze(-1), 0)  # NaN times zero is NaN
    with no_autocast(h0.device):
        x = input.to(weight_ih.dtype)
        if h0.numel() == 0:
            return x @ weight_ih.mT  # no sequence
        arguments: Any = (x, weight_ih, bias, h0, mask, hard, type(unitary), *factors)
        if needs_plain_loop():
            return _loop(*arguments)
        states: Tensor = _Recurrence.apply(*arguments)
        return states


def _loop(
    input: Tensor,
    weight_ih: Tensor,
    bias: Tensor,
    h0: Tensor,
    mask: Tensor | None,
    hard: bool,
    kind: type[UnitaryMap],
    *factors: Tensor,
) -> Tensor:
    """The recurrence step by step, in torch's own differentiable operations."""
    bias, h = bias.unsqueeze(-2), h0
    states = []
    for t, x in enumerate((input @ weight_ih.mT).unbind(0)):  # not slices: each has a gradient of full size
        new = modrelu(x + kind.product(h, *factors), bias, hard)
        h = new if mask is None else torch.where(mask[t].unsqueeze(-1), new, h)
        states.append(h)
    return torch.stack(states)


class _Recurrence(torch.autograd.Function):
    """The recurrence with its backward pass written out."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight_ih: Tensor,
        bias: Tensor,
        h0: Tensor,
        mask: Tensor | None,
        hard: bool,
        kind: type[UnitaryMap],
        *factors: Tensor,
    ) -> Tensor:
        arguments = (input @ weight_ih.mT).contiguous()
        states = torch.empty_like(arguments)
        advance = _steps_compiled if _compiles(arguments) else _steps
        advance(kind.bind(*factors)[0], arguments, states, h0, bias, hard, mask)
        ctx.hard, ctx.kind = hard, kind
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(input, weight_ih, bias, h0, mask, arguments, states, *factors)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return _Recurrence.gradients(ctx, grad)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_ih, bias, h0, mask, arguments, states, *factors = ctx.saved_tensors
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad):
            return _differentiable_gradient(ctx, (input, weight_ih, bias, h0), mask, factors, grad)
        needs_input, needs_V, *_ = ctx.needs_input_grad
        d_input = torch.empty_like(input, memory_format=torch.contiguous_format) if needs_input else None
        d_V, d_bias, d_h = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (weight_ih, bias, h0))
        d_factors: list[Tensor | None] = [None for _ in factors]
        steps = max(1, CHUNK // max(1, h0.numel()))
        adjoint = ctx.kind.bind(*factors)[1]
        back = _steps_back_compiled if _compiles(arguments) else _steps_back
        for start in reversed(range(0, len(input), steps)):
            stop = min(start + steps, len(input))
            chunk = slice(start, stop)
            active = None if mask is None else mask[chunk]
            d_z, d_b, backs, d_h = back(adjoint, arguments[chunk], grad[chunk], d_h, bias, ctx.hard, active)
            d_bias += d_b
            if needs_V:
                d_V += torch.einsum("t...bn,t...bm->...nm", d_z, input[chunk].conj())
            if d_input is not None:
                torch.matmul(d_z, weight_ih.conj(), out=d_input[chunk])
            if any(ctx.needs_input_grad[7:]):
                before = states[start - 1 : stop - 1] if start else torch.cat([h0.unsqueeze(0), states[: stop - 1]])
                products = ctx.kind.product(before, *factors)  # a difference of the arguments and V x loses digits
                parts = ctx.kind.factor_gradients(before, products, d_z, backs, *factors)
                d_factors = [
                    part if total is None else total + part for total, part in zip(d_factors, parts, strict=True)
                ]
        return d_input, d_V, d_bias, d_h, None, None, None, *d_factors


def _steps(
    product: Product, z: Tensor, states: Tensor, h: Tensor, bias: Tensor, hard: bool, mask: Tensor | None
) -> None:
    """Add W h to ``z``, which holds V x, and fill ``states`` with the values of σ, starting from the state ``h``."""
    rows = bias.unsqueeze(-2)
    for t, (argument, new) in enumerate(zip(z.unbind(0), states.unbind(0), strict=True)):
        argument += product(h)
        torch.mul(argument, _ratio(_modulus(argument, hard), rows, hard), out=new)
        h = new if mask is None else torch.where(mask[t].unsqueeze(-1), new, h, out=new)


def _steps_compiled(
    product: Product, z: Tensor, states: Tensor, h: Tensor, bias: Tensor, hard: bool, mask: Tensor | None
) -> None:
    """:func:`_steps` in one pass over memory for each step, besides the product."""
    first, fixed = _array(h), _fixed(bias, hard, mask)
    arguments, outputs = _array(z, len(z)), _array(states, len(z))
    for t, new in enumerate(states.unbind(0)):
        kernels().activate_pairs(t, arguments, _array(product(h.contiguous())), outputs, first, *fixed)
        h = new


def _steps_back(
    adjoint: Product, z: Tensor, grad: Tensor, d_h: Tensor, bias: Tensor, hard: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Through a chunk of steps from its last state, whose gradient from later steps is ``d_h``.

    Returns the gradients of the arguments z and of b, Wᴴ times the former, and the gradient of the state before.
    """
    active = None if mask is None else mask.unsqueeze(-1)
    sigma = _Derivative.at(z, bias.unsqueeze(-2), hard, active)
    d_z, d_thresholds, backs = torch.empty_like(sigma.u), torch.empty_like(sigma.ratio), []
    steps = zip(*(t.unbind(0) for t in (grad, *sigma, d_z, d_thresholds)), strict=True)
    for t, (g, u, ratio, curl, out, along) in reversed(list(enumerate(steps))):
        g = g + d_h
        _inner(u, g, out=along)
        torch.mul(g, ratio, out=out).addcmul_(u, curl * along)
        backs.append(adjoint(out))
        d_h = backs[-1] if active is None else torch.where(active[t], backs[-1], g)
    return d_z, d_thresholds.sum((0, -2)), torch.stack(backs[::-1]), d_h


def _steps_back_compiled(
    adjoint: Product, z: Tensor, grad: Tensor, d_h: Tensor, bias: Tensor, hard: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`_steps_back` in one pass over memory for each step, besides the product."""
    d_bias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    d_z, held, backs = torch.empty_like(z), torch.empty_like(z[0]), []
    fixed = _fixed(bias, hard, mask)
    arrays = _array(z, len(z)), _array(grad, len(z))
    rest = _array(held), _array(d_z, len(z)), d_bias.reshape(-1, bias.shape[-1]).numpy()
    for t in reversed(range(len(z))):
        kernels().activate_back_pairs(t, *arrays, _array(d_h), *rest, *fixed)
        backs.append(adjoint(d_z[t]))
        d_h = backs[-1] if mask is None else backs[-1] + held
    return d_z, d_bias, torch.stack(backs[::-1]), d_h


def _differentiable_gradient(
    ctx: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, factors: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The same gradient by way of the plain loop, to be differentiated further, or for a batch of gradients."""
    further = torch.is_grad_enabled()
    needs = (*ctx.needs_input_grad[:4], *ctx.needs_input_grad[7:])
    with torch.enable_grad():
        own = [t.view_as(t) for t in (*tensors, *factors)]  # so that no path from one of them to another counts
        input, weight_ih, bias, h0, *own_factors = own
        states = _loop(input, weight_ih, bias, h0, mask, ctx.hard, ctx.kind, *own_factors)
    wanted = [t for t, need in zip(own, needs, strict=True) if need]
    found = iter(torch.autograd.grad(states, wanted, grad, create_graph=further, allow_unused=True))
    gradients = [next(found) if need else None for need in needs]
    return *gradients[:4], None, None, None, *gradients[4:]


class _Derivative(NamedTuple):
    """modReLU at z with s = √(|z|² + ε), u = z/(s + ε): σ(z) = ratio · z, and for an incoming g

    db = Re(ū g),  dz = ratio · g + (curl · db) u,  curl = (ε − b)/s.

    With ε = 0 (hard) these are the formulas of :class:`manopt_torch.nn.ModReLU`. All are zero where a unit is below its
    threshold, and where the step is not active.
    """

    u: Tensor
    ratio: Tensor
    curl: Tensor

    @staticmethod
    def at(z: Tensor, bias: Tensor, hard: bool, active: Tensor | None) -> _Derivative:
        s, epsilon = _modulus(z, hard), 0.0 if hard else EPSILON
        ratio = _ratio(s, bias, hard)
        if active is not None:
            ratio *= active
        s.masked_fill_(ratio <= 0, torch.inf)
        return _Derivative(z * (s + epsilon).reciprocal_(), ratio, (epsilon - bias) / s)


def _compiles(t: Tensor) -> bool:
    """Whether the compiled kernels take tensors like ``t``."""
    return t.device.type == "cpu" and t.is_complex() and kernels() is not None


def _array(t: Tensor, steps: int | None = None) -> Any:
    """NumPy's view of a state (*P, B, N) as real numbers (P, B, 2N), or of ``steps`` K of them as (K, P, B, 2N)."""
    K = () if steps is None else (steps,)
    P = math.prod(t.shape[len(K) : -2])
    return torch.view_as_real(t.resolve_conj().contiguous()).reshape(*K, P, t.shape[-2], 2 * t.shape[-1]).numpy()


def _fixed(bias: Tensor, hard: bool, mask: Tensor | None) -> tuple[Any, ...]:
    """What the compiled kernels take besides: b (P, N), ε, the least |z|² + ε that is not taken for 0, the mask."""
    b = bias.reshape(-1, bias.shape[-1]).contiguous().numpy()
    epsilon, floor = (0.0, TINY) if hard else (EPSILON, 0.0)
    steps = torch.empty(0, 0, 0, dtype=torch.bool) if mask is None else mask.reshape(len(mask), len(b), -1).contiguous()
    return b, b.dtype.type(epsilon), b.dtype.type(floor), steps.numpy()


def _modulus(z: Tensor, hard: bool) -> Tensor:
    """s = √(|z|² + ε), ε = 0 if ``hard``."""
    square = _inner(z, z)
    return (square if hard else square.add_(EPSILON)).sqrt_()


def _ratio(s: Tensor, bias: Tensor, hard: bool) -> Tensor:
    """σ(z)/z = max(s + b, 0)/(s + ε); 0 at z = 0 if ``hard``."""
    if hard:
        return torch.where(s > TINY**0.5, 1 + bias / s, 0).clamp_min_(0)
    return torch.relu(s + bias).div_(s + EPSILON)


def _inner(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Re(ā b), elementwise."""
    if not a.is_complex():
        return torch.mul(a, b, out=out)
    return torch.mul(a.real, b.real, out=out).addcmul_(a.imag, b.imag)
