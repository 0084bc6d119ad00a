"""The recurrence of unitary networks over a whole sequence, as one differentiable function."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manopt_torch.nn.activations import EPSILON, TINY, modrelu

#: steps that are computed between two passes over memory: what they touch stays in a core's cache
CHUNK = 32


def unitary_recurrence(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    h0: Tensor,
    mask: Tensor | None = None,
    *,
    hard: bool = False,
    checkpoint_every: int | None = None,
) -> Tensor:
    """All states of h_t = σ(W h_{t-1} + V x_t), σ = modReLU with bias b (Wisdom et al., 2016, eq. 1).

    Shapes, with T steps, B sequences, M inputs, N units and any batch *P of independent networks: ``input`` x
    (T, *P, B, M), real or of the weights' dtype; ``weight_ih`` V (*P, N, M); ``weight_hh`` W (*P, N, N); ``bias`` b
    (*P, N), real; ``h0`` (*P, B, N); result (T, *P, B, N). ``mask`` (T, *P, B) is True where a sequence has a step;
    where it is False, the state stays as it is, whatever the input. Nothing here asks that W be unitary, or complex.

    Real arithmetic on [Re | Im], in chunks of steps: one product for the inputs of a chunk, one product and one
    elementwise kernel for each step (a few, on a GPU or where numba is not installed), one product for the gradient of
    W over a chunk. Kept for the backward pass are the arguments of σ, as large as the states; with
    ``checkpoint_every=K`` only each K-th state, from which the rest is computed again.

    Differentiable any number of times, in reverse and forward mode, under ``torch.func`` and ``torch.compile``; all but
    the first reverse derivative take a plain loop over the steps.

    Raises:
        ValueError: for tensors whose shapes do not fit each other, or a ``checkpoint_every`` below 1.
        TypeError: for tensors whose dtypes do not fit each other, or a ``checkpoint_every`` that is not a whole number.
    """
    check_checkpoint_every(checkpoint_every)
    *P, N, M = weight_ih.shape
    B = next((t.shape[-2] for t in (h0, input) if t.dim() > 1), 0)
    check_tensors(input, h0, bias, mask, weight_ih, (len(input), *P, B, M, N))
    check_tensor("weight_hh", weight_hh, (*P, N, N), weight_ih.dtype)
    if mask is not None:
        input = input.masked_fill(~mask.unsqueeze(-1), 0)  # NaN times zero is NaN
    with no_autocast(h0.device):
        if needs_plain_loop() or h0.numel() == 0:
            return _loop(input, weight_ih, weight_hh, bias, h0, mask, hard)
        states: Tensor = _Recurrence.apply(input, weight_ih, weight_hh, bias, h0, mask, hard, checkpoint_every)
    return states


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, where the device has it."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def check_checkpoint_every(steps: int | None) -> None:
    """Raise for what is not None or a number of steps."""
    if steps is None:
        return
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"checkpoint_every is a whole number of steps or None, got {steps!r}")
    if steps < 1:
        raise ValueError(f"checkpoint_every is a number of steps, at least 1, got {steps}")


def check_tensors(
    input: Tensor, h0: Tensor, bias: Tensor, mask: Tensor | None, weight_ih: Tensor, sizes: tuple[int, ...]
) -> None:
    """Raise unless these fit ``weight_ih`` (*P, N, M); ``sizes`` are (T, *P, B, M, N)."""
    T, *P, B, M, N = sizes
    dtype = weight_ih.dtype
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    check_tensor("h0", h0, (*P, B, N), dtype)
    check_tensor("input", input, (T, *P, B, M), dtype, real)
    check_tensor("bias", bias, (*P, N), real)
    if mask is not None:
        check_tensor("mask", mask, (T, *P, B), torch.bool)


def check_tensor(name: str, t: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``t`` has ``shape``, ``TypeError`` unless it has one of ``dtypes``."""
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, as the other tensors have theirs, got {tuple(t.shape)}")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {t.dtype}")


def needs_plain_loop() -> bool:
    """Whether something looks on that an autograd.Function would hide the derivatives from."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


@functools.cache
def kernels() -> Any:
    """The module of compiled kernels; None if numba is not installed, or cannot be imported."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("manopt_torch.nn.kernels")
    except ImportError as error:
        warnings.warn(f"unitary recurrences run without compiled kernels: {error}", stacklevel=2)
        return None


def elementwise_recurrence(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    sigma: Callable[[Tensor], Tensor],
    h0: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """All states of h_t = σ(W h_{t-1} + V x_t) step by step, in torch's own differentiable operations, for any σ.

    Shapes and ``mask`` as in :func:`unitary_recurrence`.
    """
    if mask is not None:
        input = input.masked_fill(~mask.unsqueeze(-1), 0)  # NaN times zero is NaN
    inputs = (input.to(weight_ih.dtype) @ weight_ih.mT).unbind(0)  # not slices: each has a gradient of full size
    W, h = weight_hh.mT, h0
    states = []
    for t, x in enumerate(inputs):
        new = sigma(h @ W + x)
        h = new if mask is None else torch.where(mask[t].unsqueeze(-1), new, h)
        states.append(h)
    return torch.stack(states)


def _loop(
    input: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, h0: Tensor, mask: Tensor | None, hard: bool
) -> Tensor:
    """The recurrence of modReLU, whose inputs are masked already."""
    bias = bias.unsqueeze(-2)
    return elementwise_recurrence(input, weight_ih, weight_hh, lambda z: modrelu(z, bias, hard), h0, mask)


class _Recurrence(torch.autograd.Function):
    """The recurrence with its backward pass written out.

    Inside, all tensors are real, a complex one being [Re | Im] along its last dimension, and *P is one dimension.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor,
        h0: Tensor,
        mask: Tensor | None,
        hard: bool,
        checkpoint_every: int | None,
    ) -> Tensor:
        recorded = any(ctx.needs_input_grad)
        ctx.hard, ctx.every, ctx.whole = hard, checkpoint_every or CHUNK, recorded and checkpoint_every is None
        net = _Network.of(input, weight_ih, weight_hh, bias, mask, hard)
        output = h0.new_empty(len(input), *h0.shape)
        h = _parts(h0).reshape(net.state_shape)
        length = min(ctx.every, len(input))
        states = h.new_empty(length, *h.shape)
        arguments = h.new_empty(len(input) if ctx.whole else length, *h.shape)
        starts = []
        for chunk in _chunks(len(input), ctx.every):
            size = chunk.stop - chunk.start
            _steps(net, chunk, arguments[chunk] if ctx.whole else arguments[:size], states[:size], h)
            starts.append(h)
            h = states[size - 1].clone()
            _write(output[chunk], states[:size])
        if recorded:
            kept = (output, arguments) if ctx.whole else (torch.stack(starts),)
            ctx.save_for_backward(input, weight_ih, weight_hh, bias, h0, mask, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return _Recurrence.gradients(ctx, grad)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_ih, weight_hh, bias, h0, mask, *kept = ctx.saved_tensors
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad):
            return _differentiable_gradient(ctx, (input, weight_ih, weight_hh, bias, h0), mask, grad)
        net = _Network.of(input, weight_ih, weight_hh, bias, mask, ctx.hard)
        V_back, W_back = net.V.mT, net.W.mT.contiguous()
        needs_input, needs_V, needs_W, needs_b = ctx.needs_input_grad[:4]
        d_input = torch.empty_like(input, memory_format=torch.contiguous_format)
        d_V, d_W, d_b = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (net.V, net.W, net.beta))
        d_h = net.W.new_zeros(net.state_shape)
        for number, chunk in reversed(list(enumerate(_chunks(len(input), ctx.every)))):
            size = chunk.stop - chunk.start
            before, g = d_h.new_empty(2, size + 1, *d_h.shape)  # the state before each step, and the last
            if ctx.whole:
                output, arguments = kept
                z = arguments[chunk]
                _copy_parts(before[0], output[chunk.start - 1] if number else h0)
                _copy_parts(before[1:size], output[chunk.start : chunk.stop - 1])
            else:
                z = torch.empty_like(before[1:])
                before[0] = kept[0][number]
                _steps(net, chunk, z, before[1:], before[0])
            g[0].zero_()
            _copy_parts(g[1:], grad[chunk])
            g[-1] += d_h
            d_z, d_beta = _steps_back(net, chunk, z, g, W_back)
            d_h = g[0]
            if needs_b:
                d_b += d_beta.sum((0, 2))
            if needs_W:
                d_W.baddbmm_(_rows(before[:-1]).mT, _rows(d_z))
            if needs_V:
                d_V.baddbmm_(_rows(net.inputs(chunk)).mT, _rows(d_z))
            if needs_input:
                _write(d_input[chunk], (_rows(d_z) @ V_back).unflatten(1, (len(z), -1)).transpose(0, 1))
        d_h0 = torch.empty_like(h0, memory_format=torch.contiguous_format)
        _write(d_h0, d_h)
        d_weights = _gradient_matrix(d_V, weight_ih), _gradient_matrix(d_W, weight_hh), d_b.reshape(bias.shape)
        gradients = zip((d_input, *d_weights, d_h0), ctx.needs_input_grad, strict=False)
        return *(d if needed else None for d, needed in gradients), None, None, None


def _differentiable_gradient(
    ctx: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The same gradients by way of the plain loop, to be differentiated further, or for a batch of gradients."""
    needs, further = ctx.needs_input_grad[:5], torch.is_grad_enabled()
    with torch.enable_grad():
        input, weight_ih, weight_hh, bias, h0 = own = [t.view_as(t) for t in tensors]  # no paths from one to another
        states = _loop(input, weight_ih, weight_hh, bias, h0, mask, ctx.hard)
    wanted = [t for t, needed in zip(own, needs, strict=True) if needed]
    found = iter(torch.autograd.grad(states, wanted, grad, create_graph=further))
    return *(next(found) if needed else None for needed in needs), None, None, None


class _Network(NamedTuple):
    """The input x (T, P, B, M), real matrices V and W (P, ·, ·), the mask (T, P, B), and modReLU as

    σ(z) = (1 + max(q, −1)) z with q = β/(s + ε), s² = max(|z|² + ε, floor), β = b − ε (P, N); ε = 0 for the exact one.
    """

    input: Tensor
    V: Tensor
    W: Tensor
    beta: Tensor
    mask: Tensor | None
    epsilon: float
    floor: float

    @staticmethod
    def of(
        input: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, mask: Tensor | None, hard: bool
    ) -> _Network:
        T, *_, B, M = input.shape
        epsilon, floor = (0.0, TINY) if hard else (EPSILON, 0.0)
        return _Network(
            input.reshape(T, -1, B, M),
            _real_matrix(weight_ih, real_rows=not input.is_complex()),
            _real_matrix(weight_hh),
            bias.reshape(-1, bias.shape[-1]) - epsilon,
            None if mask is None else mask.reshape(T, -1, B),
            epsilon,
            floor,
        )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return *self.input.shape[1:3], self.W.shape[-1]

    def inputs(self, chunk: slice) -> Tensor:
        return _parts(self.input[chunk])

    def columns(self, a: Tensor) -> Tensor:
        """[Re | Im] (..., 2N) as (..., 2, N), and real numbers (..., N) as (..., 1, N)."""
        return a.unflatten(-1, (-1, self.beta.shape[-1]))

    def modulus(self, z: Tensor) -> Tensor:
        """s."""
        square = self.columns(z).square().sum(-2)
        return square.add_(self.epsilon).clamp_min_(self.floor).sqrt_()


def _steps(net: _Network, chunk: slice, z: Tensor, states: Tensor, h: Tensor) -> None:
    """Fill ``z`` with the arguments of σ, and ``states`` with its values, over a chunk that starts from ``h``."""
    if len(net.V) == 1:
        torch.mm(net.inputs(chunk).flatten(0, -2), net.V[0], out=z.flatten(0, -2))
    else:
        z.copy_((_rows(net.inputs(chunk)) @ net.V).unflatten(1, (len(z), -1)).transpose(0, 1))
    activate = (_activate_compiled if _compiles(z) else _activate)(net, chunk, z, states, h)
    for t, (argument, state) in enumerate(zip(z.unbind(0), states.unbind(0), strict=True)):
        argument.baddbmm_(h, net.W)
        activate(t)
        h = state


def _steps_back(net: _Network, chunk: slice, z: Tensor, g: Tensor, W_back: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by ``z``, and by each use of β.

    ``g`` (K + 1, ...) comes with the direct gradients by the states, g[0] being that before the chunk, and leaves with
    the whole ones.
    """
    d_z, d_beta = torch.empty_like(z), z.new_empty(*z.shape[:-1], net.beta.shape[-1])
    activate_back = (_activate_back_compiled if _compiles(z) else _activate_back)(net, chunk, z, g, d_z, d_beta)
    before, arguments = g.unbind(0), d_z.unbind(0)
    for t in range(len(z) - 1, -1, -1):
        activate_back(t)
        before[t].baddbmm_(arguments[t], W_back)
    return d_z, d_beta


def _activate(net: _Network, chunk: slice, z: Tensor, states: Tensor, first: Tensor) -> Callable[[int], None]:
    """What sets states[t] = σ(z[t]) where there is a step, and the state before elsewhere."""
    mask = None if net.mask is None else net.mask[chunk].unsqueeze(-1)

    def activate(t: int) -> None:
        q = (net.beta.unsqueeze(-2) / net.modulus(z[t]).add_(net.epsilon)).clamp_min_(-1).unsqueeze(-2)
        torch.addcmul(net.columns(z[t]), net.columns(z[t]), q, out=net.columns(states[t]))
        if mask is not None:
            torch.where(mask[t], states[t], states[t - 1] if t else first, out=states[t])

    return activate


def _activate_back(
    net: _Network, chunk: slice, z: Tensor, g: Tensor, d_z: Tensor, d_beta: Tensor
) -> Callable[[int], None]:
    """What sets d_z[t] and d_beta[t] from g[t + 1], and adds to g[t] the gradient by a state that was held.

    dz = (1 + q) g − q/(s (s + ε)) z Re(z̄ g) and dβ = Re(z̄ g)/(s + ε) where q > −1, and 0 elsewhere and at z = 0.
    """
    s = net.modulus(z)
    inverse = (s + net.epsilon).reciprocal_()
    q = net.beta.unsqueeze(-2) * inverse
    active = (q > -1) & (s > net.floor**0.5)
    if net.mask is not None:
        active &= net.mask[chunk].unsqueeze(-1)
    columns, scale = net.columns(z), (q + 1).mul_(active).unsqueeze(-2)
    turn = q.mul_(inverse).div_(s).neg_().mul_(active).unsqueeze(-2) * columns
    inverse.mul_(active)

    def activate_back(t: int) -> None:
        direct = net.columns(g[t + 1])
        along = (columns[t] * direct).sum(-2)
        torch.mul(direct, scale[t], out=net.columns(d_z[t])).addcmul_(turn[t], along.unsqueeze(-2))
        torch.mul(along, inverse[t], out=d_beta[t])
        if net.mask is not None:
            g[t] += g[t + 1].masked_fill(net.mask[chunk][t].unsqueeze(-1), 0)

    return activate_back


def _activate_compiled(net: _Network, chunk: slice, z: Tensor, states: Tensor, first: Tensor) -> Callable[[int], None]:
    """:func:`_activate` as one pass over memory."""
    kernel, arrays = kernels().activate, _arrays(net, chunk, z, states, first)
    return lambda t: kernel(t, *arrays)


def _activate_back_compiled(
    net: _Network, chunk: slice, z: Tensor, g: Tensor, d_z: Tensor, d_beta: Tensor
) -> Callable[[int], None]:
    """:func:`_activate_back` as one pass over memory."""
    kernel, arrays = kernels().activate_back, _arrays(net, chunk, z, g, d_z, d_beta)
    return lambda t: kernel(t, *arrays)


def _arrays(net: _Network, chunk: slice, *tensors: Tensor) -> tuple[Any, ...]:
    """What the compiled kernels take: NumPy's views, numbers of the same dtype, and an empty mask for none."""
    arrays = [t.numpy() for t in tensors]
    dtype = arrays[0].dtype.type
    mask = torch.empty(0, 0, 0, dtype=torch.bool) if net.mask is None else net.mask[chunk].contiguous()
    return *arrays, net.beta.numpy(), dtype(net.epsilon), dtype(net.floor), mask.numpy()


def _compiles(z: Tensor) -> bool:
    return z.device.type == "cpu" and z.dtype in (torch.float32, torch.float64) and kernels() is not None


def _chunks(steps: int, every: int) -> Iterator[slice]:
    return (slice(start, min(start + every, steps)) for start in range(0, steps, every))


def _rows(a: Tensor) -> Tensor:
    """(K, P, B, ·) as P matrices (P, K·B, ·)."""
    return a.transpose(0, 1).flatten(1, 2)


def _parts(a: Tensor) -> Tensor:
    """[Re | Im] along the last dimension of a complex tensor; a real one as it is."""
    return torch.cat((a.real, a.imag), -1) if a.is_complex() else a.resolve_neg()


def _copy_parts(out: Tensor, a: Tensor) -> None:
    """Write the parts of ``a`` into ``out``, one dimension of which stands for any number of them in ``a``."""
    if a.is_complex():
        for half, part in zip(out.chunk(2, -1), (a.real, a.imag), strict=True):
            half.copy_(part.reshape(half.shape))
    else:
        out.copy_(a.reshape(out.shape))


def _write(out: Tensor, parts: Tensor) -> None:
    """The inverse of :func:`_copy_parts`."""
    if out.is_complex():
        torch.complex(*parts.reshape(*out.shape[:-1], -1).chunk(2, -1), out=out)
    else:
        out.copy_(parts.reshape(out.shape))


def _real_matrix(A: Tensor, real_rows: bool = False) -> Tensor:
    """Real matrices M (P, ·, ·) with parts(x Aᵀ) = parts(x) M for rows x of complex numbers, or of real ones."""
    A = A.reshape(-1, *A.shape[-2:])
    if not A.is_complex():
        return A.mT.contiguous()
    upper = torch.cat((A.real, A.imag), -2).mT
    return upper if real_rows else torch.cat((upper, torch.cat((-A.imag, A.real), -2).mT), -2)


def _gradient_matrix(d: Tensor, A: Tensor) -> Tensor:
    """The gradient by A from that by ``_real_matrix(A)``."""
    n, m = A.shape[-2:]
    if A.is_complex():
        re, im = d[..., :m, :n], d[..., :m, n:]
        if d.shape[-2] > m:
            re, im = re + d[..., m:, n:], im - d[..., m:, :n]
        d = torch.complex(re, im)
    return d.mT.reshape(A.shape)
