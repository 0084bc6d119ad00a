"""The recurrence of unitary networks whose W is a product of structured factors, as one differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manopt_torch.nn.activations import EPSILON, modrelu
from manopt_torch.nn.unitary_maps import UnitaryMap

#: numbers in the states of a chunk of steps, for which the backward pass computes together what can be: cache-sized
CHUNK = 2**16
#: the modulus below which the exact modReLU takes its argument for zero: the square of less underflows
TINY = 1e-18


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
    """
    factors = unitary.factors()
    input = input.to(weight_ih.dtype)
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return _loop(input, weight_ih, bias, h0, mask, hard, type(unitary), *factors)
    with torch.autocast(h0.device.type, enabled=False):
        states: Tensor = _Recurrence.apply(input, weight_ih, bias, h0, mask, hard, type(unitary), *factors)
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
        arguments = input @ weight_ih.mT
        states = torch.empty_like(arguments)
        rows, h = bias.unsqueeze(-2), h0
        for t, (z, new) in enumerate(zip(arguments.unbind(0), states.unbind(0), strict=True)):
            z += kind.product(h, *factors)
            torch.mul(z, _ratio(_modulus(z, hard), rows, hard), out=new)
            h = new if mask is None else torch.where(mask[t].unsqueeze(-1), new, h, out=new)
        ctx.hard, ctx.kind = hard, kind
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(input, weight_ih, bias, h0, mask, arguments, states, *factors)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_ih, bias, h0, mask, arguments, states, *factors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_gradient(ctx, (input, weight_ih, bias, h0), mask, factors, grad)
        needs_input, needs_V, *_ = ctx.needs_input_grad
        d_input = torch.empty_like(input, memory_format=torch.contiguous_format) if needs_input else None
        d_V, d_bias, d_h = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (weight_ih, bias, h0))
        d_factors: list[Tensor | None] = [None for _ in factors]
        steps = max(1, CHUNK // max(1, h0.numel()))
        for start in reversed(range(0, len(input), steps)):
            stop = min(start + steps, len(input))
            chunk = slice(start, stop)
            active = None if mask is None else mask[chunk].unsqueeze(-1)
            sigma = _Derivative.at(arguments[chunk], bias.unsqueeze(-2), ctx.hard, active)
            d_z, d_thresholds, backs, d_h = _steps_back(ctx.kind, factors, sigma, grad[chunk], d_h, active)
            d_bias += d_thresholds.sum((0, -2))
            if needs_V:
                d_V += torch.einsum("t...bn,t...bm->...nm", d_z, input[chunk].conj())
            if d_input is not None:
                torch.matmul(d_z, weight_ih.conj(), out=d_input[chunk])
            if any(ctx.needs_input_grad[7:]):
                before = states[start - 1 : stop - 1] if start else torch.cat([h0.unsqueeze(0), states[: stop - 1]])
                products = arguments[chunk] - input[chunk] @ weight_ih.mT
                parts = ctx.kind.factor_gradients(before, products, d_z, backs, *factors)
                d_factors = [
                    part if total is None else total + part for total, part in zip(d_factors, parts, strict=True)
                ]
        return d_input, d_V, d_bias, d_h, None, None, None, *d_factors


def _steps_back(
    kind: type[UnitaryMap],
    factors: Sequence[Tensor],
    sigma: _Derivative,
    grad: Tensor,
    d_h: Tensor,
    active: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Through a chunk of steps from its last state, whose gradient from later steps is ``d_h``.

    Returns the gradients of the arguments z and of the thresholds b, Wᴴ times the former, and the gradient of the state
    before the chunk.
    """
    d_z, d_thresholds, backs = torch.empty_like(sigma.u), torch.empty_like(sigma.ratio), []
    steps = zip(*(t.unbind(0) for t in (grad, *sigma, d_z, d_thresholds)), strict=True)
    for t, (g, u, ratio, curl, out, along) in reversed(list(enumerate(steps))):
        g = g + d_h
        _inner(u, g, out=along)
        torch.mul(g, ratio, out=out).addcmul_(u, curl * along)
        backs.append(kind.adjoint_product(out, *factors))
        d_h = backs[-1] if active is None else torch.where(active[t], backs[-1], g)
    return d_z, d_thresholds, torch.stack(backs[::-1]), d_h


def _differentiable_gradient(
    ctx: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, factors: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The same gradient by way of the plain loop, to be differentiated further."""
    own = [t.view_as(t) for t in (*tensors, *factors)]  # so that no path from one of them to another counts
    needs = (*ctx.needs_input_grad[:4], *ctx.needs_input_grad[7:])
    input, weight_ih, bias, h0, *own_factors = own
    states = _loop(input, weight_ih, bias, h0, mask, ctx.hard, ctx.kind, *own_factors)
    wanted = [t for t, need in zip(own, needs, strict=True) if need]
    found = iter(torch.autograd.grad(states, wanted, grad, create_graph=True, allow_unused=True))
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


def _modulus(z: Tensor, hard: bool) -> Tensor:
    """s = √(|z|² + ε), ε = 0 if ``hard``."""
    square = _inner(z, z)
    return (square if hard else square.add_(EPSILON)).sqrt_()


def _ratio(s: Tensor, bias: Tensor, hard: bool) -> Tensor:
    """σ(z)/z = max(s + b, 0)/(s + ε); 0 at z = 0 if ``hard``."""
    if hard:
        return torch.where(s > TINY, 1 + bias / s, 0).clamp_min_(0)
    return torch.relu(s + bias).div_(s + EPSILON)


def _inner(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Re(ā b), elementwise."""
    if not a.is_complex():
        return torch.mul(a, b, out=out)
    return torch.mul(a.real, b.real, out=out).addcmul_(a.imag, b.imag)
