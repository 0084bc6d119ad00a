"""The normal distribution truncated on both sides: log-partition, moments, end-point densities, samples.

``h ~ N(loc, scale²)`` restricted to ``low < h < high``, either of which may be infinite. With φ and Φ the standard
normal density and distribution function, a = (low − loc)/scale and b = (high − loc)/scale::

    P = Φ(b) − Φ(a),    A = φ(a)/P,    B = φ(b)/P
    E h = loc + scale (A − B),    Var h = scale² (1 + a A − b B − (A − B)²)

(Johnson, Kotz and Balakrishnan, 1994, section 13.10.1). Evaluated so, P is 0/0 beyond 38 standard deviations (beyond
8 on the upper side) and the variance cancels. Here everything is computed after a reflection that makes a + b ≥ 0,
relative to the end point a, in float64 whatever the dtype of the arguments::

    a ≤ 6, w ≥ 1              D = P/φ(a) = R(a) − exp(−Δ) R(b),   A = 1/D,   B = exp(−Δ)/D
                              with w = b − a, Δ = (b² − a²)/2 = w (a + b)/2 and R Mills' ratio, a scaled erfc; central
                              moments by c₂ = 1 − (m−a) A − (b−m) B,  c_{k+1} = k c_{k−1} − m c_k + (a−m)ᵏ A − (b−m)ᵏ B
    a > 3, Δ > 42             the upper end has no part: D = R(a) = 1/(a + r₁), r_k = k/(a + r_{k+1}) = E tᵏ/E tᵏ⁻¹,
                              t = x − a
    elsewhere                 Gauss-Legendre quadrature of tᵏ exp(−a t − t²/2) over [0, min(w, T)]: positive terms only

Relative errors are below 1e-11 for locations up to 10⁴ scales outside the interval and widths from 10⁻¹² scales on.

**Derivatives** are closed forms in the same quantities: with p₁ = A/scale, p₂ = B/scale, μ, v and the central moments
c_k of h, for instance

    ∂μ/∂loc = v/scale²    ∂μ/∂low = p₁ (μ − low)    ∂μ/∂high = p₂ (high − μ)    ∂μ/∂scale = (c₃ + 2 (μ − loc) v)/scale³

They are finite everywhere, zero with respect to an infinite end, and of any order in reverse and forward mode, nested
in any way. Derivatives of order k need central moments of order k + 1, which are computed when asked for.

All functions take ``loc``, ``scale``, ``low``, ``high``, tensors or numbers that broadcast against each other, and
return tensors in their common dtype. Where not ``low < high`` and ``scale > 0`` the result means nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

#: beyond so many standard deviations the normal density is taken to be zero: underflow takes 20 times as long
_EDGE, _UNDERFLOW = 37.4, 2e-304
#: up to this a the moments come from erfc and exp (they lose a⁴ ε), up to the other one from Mills' ratio
_BODY, _CLOSED = 3.0, 6.0
#: smallest w for the closed form, which loses ε/w² of the variance
_CLOSED_WIDTH = 1.0
#: below this a w a narrow interval needs few nodes
_COARSE_FALL = 6.0
#: exp(−a t − t²/2) is below exp(−42) < 1e-18 beyond the t where a t + t²/2 = _TAIL/2
_TAIL = 84.0
#: so many terms above those that are needed: r₁ is right to 1e-13 at a = 3, and less is lost above
_TERMS = 28
#: from this a on samples come from the logarithm of the tail probability
_SAMPLE_TAIL = 3.0
_NEWTON_STEPS = 6
#: elements worked on at a time: so that the closed form stays in the cache, and 28 nodes of each remain small
_BLOCK, _ROWS = 1 << 16, 1 << 12
#: distance of the smallest and the largest u from 0 and 1
_LEAST = 2.0**-53
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def _rule(count: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return torch.as_tensor((1 + nodes) / 2), torch.as_tensor(weights / 2)


_FINE, _COARSE = _rule(28), _rule(16)


class Moments(NamedTuple):
    """What :func:`moments` returns, each of the broadcast shape."""

    #: ln P, the logarithm of the probability of the interval under the untruncated normal
    log_partition: Tensor
    mean: Tensor
    variance: Tensor
    #: E (h − E h)³
    third: Tensor
    #: the density of h at ``low`` and at ``high``; zero at an infinite end
    density_low: Tensor
    density_high: Tensor


# ------------------------------------------------------------------ values
def _tail(x: Tensor) -> Tensor:
    """``1 − Φ(x)``."""
    return 0.5 * torch.special.erfc(x * math.sqrt(0.5))


def _exp(x: Tensor) -> Tensor:
    """``exp(x)`` for x ≤ 0."""
    return torch.threshold_(x.clamp(min=-0.5 * _EDGE**2).exp_(), _UNDERFLOW, 0)


def _mills(x: Tensor) -> Tensor:
    """Mills' ratio ``(1 − Φ(x))/φ(x)``."""
    return math.sqrt(math.pi / 2) * torch.special.erfcx(x * math.sqrt(0.5))


def _central(a: Tensor, b: Tensor, A: Tensor, B: Tensor, order: int) -> list[Tensor]:
    """m, m − a, b − m, A, B, c₂, …, c_order from the two end-point terms, by the recursion of central moments."""
    mean = A - B
    below, above = mean - a, b - mean
    rise, drop = below * A, above * B
    central: list[Any] = [1.0, 0.0, 1 - rise - drop]
    for k in range(2, order):
        rise, drop = -below * rise, above * drop
        central.append(k * central[-2] - mean * central[-1] - rise - drop)
    return [mean, below, above, A, B, *central[2:]]


def _body(a: Tensor, b: Tensor, order: int, log: bool) -> list[Tensor]:
    """In units of the scale: m, m − a, b − m, A, B, c₂, …, c_order, then ln P if ``log``.

    An end beyond the edge is taken to be there; its density is zero all the same. One of a and b may be one infinite
    number for all.
    """
    a, b = a.clamp(-_EDGE, _EDGE), b.clamp(-_EDGE, _EDGE)
    if b.numel() < a.numel():
        near, far = a, b
    elif a.numel() < b.numel():
        near, far = -b, -a
    else:
        near, far = torch.maximum(a, -b), torch.maximum(b, -a)
    inside = _tail(near).sub_(_tail(far))
    factor = inside.reciprocal().mul_(1 / math.sqrt(2 * math.pi))
    A, B = (factor * torch.threshold_(x.square().mul_(-0.5).exp_(), _UNDERFLOW, 0) for x in (a, b))
    result = _central(a, b, A, B, order)
    if log:
        outside = torch.threshold_(_tail(-near).add_(_tail(far)), _UNDERFLOW, 0)
        result.append(torch.where(outside < 0.5, torch.log1p(-outside), inside.log()))
    return result


def _slope(a: Tensor, w: Tensor, order: int, log: bool) -> list[Tensor]:
    """The same for 0 < a < b = a + w, with Mills' ratios."""
    w = w.clamp(max=_EDGE)
    fall = _exp(-w * (a + 0.5 * w))
    partition = _mills(a) - fall * _mills(a + w)
    result = _central(a, a + w, 1 / partition, fall / partition, order)
    return [*result, partition.log() - 0.5 * a.square() - _LOG_SQRT_2PI] if log else result


def _quadrature(a: Tensor, w: Tensor, order: int, log: bool, rule: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The same for a ≥ −w/2 by quadrature."""
    nodes, weights = (r.to(a.device) for r in rule)
    length = torch.minimum(w, _TAIL / (a + (a.square() + _TAIL).sqrt()))
    t = length[:, None] * nodes
    mass = weights * torch.exp(-t * (a[:, None] + 0.5 * t))
    total = mass.sum(-1)
    mass = mass / total[:, None]
    partition = length * total
    w = w.clamp(max=_EDGE)
    below = (mass * t).sum(-1)
    deviation = t - below[:, None]
    A = 1 / partition
    result = [a + below, below, w - below, A, A * _exp(-w * (a + 0.5 * w))]
    power = mass * deviation
    for _ in range(2, order + 1):
        power = power * deviation
        result.append(power.sum(-1))
    return [*result, partition.log() - 0.5 * a.square() - _LOG_SQRT_2PI] if log else result


def _far(a: Tensor, w: Tensor, order: int, log: bool) -> list[Tensor]:
    """The same for a > 3 where the upper end has no part, from the ratios of the moments E tᵏ."""
    last = _TERMS + order
    ratio = (2 * last - 1) / (a + (a.square() + (4 * last - 2)).sqrt())
    for k in range(last - 1, order, -1):
        ratio.add_(a).reciprocal_().mul_(k)
    ratios = [ratio]
    for k in range(order, 0, -1):
        ratios.insert(0, k / (a + ratios[0]))
    below, *raw = itertools.accumulate(ratios[:order], torch.mul)
    w, A = w.clamp(max=_EDGE), a + below
    result = [A, below, w - below, A, A * _exp(-w * (a + 0.5 * w))]
    for k in range(2, order + 1):
        central = (k - 1) * below  # Σ_j binomial(k, j) E tʲ (−E t)ᵏ⁻ʲ by Horner's rule
        for j in range(2, k + 1):
            central = math.comb(k, j) * raw[j - 2] - central * below
        result.append(central)
    return [*result, -A.log() - 0.5 * a.square() - _LOG_SQRT_2PI] if log else result


def _reflected(a: Tensor, w: Tensor, order: int, log: bool) -> list[Tensor]:
    """The same for a ≥ −w/2 outside of the body, each element by the method that is right there."""
    wide = w >= _CLOSED_WIDTH
    far = wide & (w * (a + 0.5 * w) > 0.5 * _TAIL)
    mills, coarse = wide & ~far & (a <= _CLOSED), ~wide & (a * w < _COARSE_FALL)
    coarsely, finely = (functools.partial(_quadrature, rule=rule) for rule in (_COARSE, _FINE))
    found = [torch.empty_like(a) for _ in range(order + 4 + log)]
    for chosen, method in (
        (far, _far), (mills, _slope), (coarse, coarsely), (~(far | mills | coarse), finely),
    ):  # fmt: skip
        for i in chosen.nonzero().squeeze(-1).split(_ROWS):
            for whole, part in zip(found, method(a[i], w[i], order, log), strict=True):
                whole.index_copy_(0, i, part)
    return found


def _standard(z: Tensor, s: Tensor, low: Tensor, high: Tensor, order: int, log: bool) -> list[Tensor]:
    """E h, then in units of the scale m = E h − loc, m − a, b − m, A, B, c₂, …, c_order, then ln P if ``log``."""
    rate = 1 / s
    w = (high - low) * rate
    infinite = [bool(end.isinf().all()) for end in (low, high)]
    a = low[:1] if infinite == [True, False] else (low - z).mul_(rate)
    b = high[:1] if infinite == [False, True] else (high - z).mul_(rate)
    found = _body(a, b, order, log)
    found.insert(0, torch.addcmul(z, s, found[0]))
    near = torch.maximum(a, -b)
    i = ((near <= _BODY) & (w >= _CLOSED_WIDTH)).logical_not_().nonzero().squeeze(-1)
    if len(i):
        s, low, high, w, a, b = (t.expand_as(z).index_select(0, i) for t in (s, low, high, w, a, b))
        m, below, above, A, B, *rest = _reflected(torch.maximum(a, -b), w, order, log)
        flip = a < -b
        sign = torch.where(flip, -1.0, 1.0)
        mean = torch.where(flip, high, low) + sign * s * below
        pairs = [torch.where(flip, y, x) for x, y in ((below, above), (above, below), (A, B), (B, A))]
        odd = [c * sign if k % 2 and k <= order else c for k, c in enumerate(rest, 2)]
        for whole, part in zip(found, [mean, sign * m, *pairs, *odd], strict=True):
            whole.index_copy_(0, i, part)
    return found


def _blocks(function: Callable[..., list[Tensor]], *arguments: Tensor) -> list[Tensor]:
    """An elementwise function of tensors of one shape, block by block; all but the first may be one number for all."""
    shape = arguments[0].shape
    flat = [arguments[0].reshape(-1).split(_BLOCK)]
    for x in arguments[1:]:
        if shape.numel() > 1 and all(step == 0 or size == 1 for step, size in zip(x.stride(), shape, strict=True)):
            flat.append([x[(0,) * x.dim()].view(1)] * len(flat[0]))
        else:
            flat.append(x.reshape(-1).split(_BLOCK))
    blocks = [function(*block) for block in zip(*flat, strict=True)]
    return [torch.cat(parts).view(shape) for parts in zip(*blocks, strict=True)]


@torch.library.custom_op(
    "manopt_torch::truncated_normal_moments",
    mutates_args=(),
    schema="(Tensor z, Tensor s, Tensor low, Tensor high, int order) -> Tensor[]",
)
def _moments_kernel(z: Tensor, s: Tensor, low: Tensor, high: Tensor, order: int) -> list[Tensor]:
    """E h, E h − loc, E h − low, high − E h, p₁, p₂, ln P, c₂, …, c_order in float64, of tensors of one shape."""

    def moments(z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
        mean, m, below, above, A, B, *central, log_partition = _standard(z, s, low, high, order, True)
        scaled = [c * s**k for k, c in enumerate(central, 2)]
        return [mean, s * m, s * below, s * above, A / s, B / s, log_partition, *scaled]

    return _blocks(moments, z, s, low, high)


@_moments_kernel.register_fake
def _(z: Tensor, s: Tensor, low: Tensor, high: Tensor, order: int) -> list[Tensor]:
    return [z.new_empty(z.shape) for _ in range(7 + order - 1)]


@torch.library.custom_op(
    "manopt_torch::truncated_normal_mean",
    mutates_args=(),
    schema="(Tensor z, Tensor s, Tensor low, Tensor high) -> Tensor[]",
)
def _mean_kernel(z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
    """E h and its derivatives with respect to ``loc``, ``low`` and ``high``, as in :func:`_moments_kernel`."""

    def mean(z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
        mean, _, below, above, A, B, variance = _standard(z, s, low, high, 2, False)
        return [mean, variance, A.mul_(below), B.mul_(above)]

    return _blocks(mean, z, s, low, high)


@_mean_kernel.register_fake
def _(z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
    return [z.new_empty(z.shape) for _ in range(4)]


def _quantile(u: Tensor, z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> list[Tensor]:
    """h with P(h' < h) = u, by inversion in the reflected frame."""
    z, s, low, high = (t.expand_as(u) for t in (z, s, low, high))
    a, b, w = (low - z) / s, (high - z) / s, (high - low) / s
    flip = a < -b
    sign = torch.where(flip, -1.0, 1.0)
    near, far = torch.maximum(a, -b), torch.maximum(b, -a)
    v = torch.where(flip, 1 - u, u)
    above = _tail(near.clamp(max=_EDGE))
    above = above - v * (above - _tail(far.clamp(max=_EDGE)))
    below = _tail(-near) * (1 - v) + _tail(-far) * v
    x = torch.where(above < 0.5, -torch.special.ndtri(above), torch.special.ndtri(below))
    h = z + s * sign * x
    wide = w >= _CLOSED_WIDTH
    body = wide & (near < _SAMPLE_TAIL)
    if not body.all():
        coarse = ~wide & (near * w < _COARSE_FALL)
        for chosen, method in ((coarse, _narrow_quantile), (~(body | coarse), _tail_quantile)):
            for i in chosen.nonzero().squeeze(-1).split(_ROWS):
                t = torch.minimum(method(v[i], near[i], w[i]).clamp(min=0), w[i])
                h[i] = torch.where(flip[i], high[i], low[i]) + sign[i] * s[i] * t
    return [torch.minimum(torch.maximum(h, low), high)]


def _narrow_quantile(u: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """t with G(t) = u G(w), G(t) = ∫₀ᵗ exp(−a x − x²/2) dx, by Newton's method from the quantile of exp(−a x)."""
    nodes, weights = (r.to(a.device) for r in _COARSE)

    def integrand(t: Tensor) -> Tensor:
        return torch.exp(-t * (a[:, None] + 0.5 * t))

    def integral(t: Tensor) -> Tensor:
        return t * (weights * integrand(t[:, None] * nodes)).sum(-1)

    rate = a.clamp(min=1e-8)
    t, total = -torch.log1p(u * torch.expm1(-rate * w)) / rate, u * integral(w)
    for _ in range(_NEWTON_STEPS):
        t = t - (integral(t) - total) / integrand(t[:, None]).squeeze(-1)
    return t


def _tail_quantile(u: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """t with ln Q(a + t) − ln Q(a) = ln(1 − u (1 − Q(a + w)/Q(a))), Q = 1 − Φ, by Newton's method."""
    w = w.clamp(max=_EDGE)
    start = _mills(a)
    rest = torch.exp(-w * (a + 0.5 * w)) * _mills(a + w) / start
    level = torch.log1p(-u * (1 - rest))
    t = -2 * level / (a + (a.square() - 2 * level).sqrt())
    for _ in range(_NEWTON_STEPS):
        ratio = _mills(a + t)
        t = t + ratio * ((ratio / start).log() - t * (a + 0.5 * t) - level)
    return t


@torch.library.custom_op(
    "manopt_torch::truncated_normal_quantile",
    mutates_args=(),
    schema="(Tensor u, Tensor z, Tensor s, Tensor low, Tensor high) -> Tensor",
)
def _quantile_kernel(u: Tensor, z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return _blocks(_quantile, u, z, s, low, high)[0]


@_quantile_kernel.register_fake
def _(u: Tensor, z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return u.new_empty(u.shape)


# ------------------------------------------------------------------ derivatives
# Derivatives are ordinary expressions of what the functions below return, and so have derivatives themselves. torch
# disables forward mode inside ``jvp``, which loses the tangents of an outer forward mode (pytorch issue 197867): it is
# enabled again there, for the primal values, which have no tangent at the level being computed.
def _partials(j: int, x: Sequence[Tensor], outputs: Sequence[Tensor], scale: bool) -> list[Tensor | None]:
    """Derivatives of the j-th of ``outputs`` (those of ``_moments_kernel``) with respect to z, s, low and high.

    Written in the outputs themselves, which makes them differentiable in turn. That with respect to s if ``scale``.
    """
    z, s, low_end, high_end = x
    _, shift, low, high, p1, p2, _, *known = outputs

    def c(k: int) -> Tensor | float:
        nonlocal known
        if k < 2:
            return 1.0 - k
        if k - 2 >= len(known):
            known = list(_moments(k + 1, *x)[7:])
        return known[k - 2]

    v, s2 = known[0], s.square()
    ds: Tensor | None = None
    if j < 4:
        dz, dlow, dhigh = v / s2, p1 * low, p2 * high
        ds = (c(3) + 2 * shift * v) / s**3 if scale else None
        if j == 1:
            return [dz - 1, ds, dlow, dhigh]
        if j == 2:
            return [dz, ds, -(dz + dhigh), dhigh]
        if j == 3:
            return [-dz, None if ds is None else -ds, -dlow, dz + dlow]
        return [dz, ds, dlow, dhigh]
    if j == 4:
        ds = p1 * (low.square() - 2 * shift * low - v) / s**3 if scale else None
        return [-p1 * low / s2, ds, p1 * (low / s2 + p2), -p1 * p2]
    if j == 5:
        ds = p2 * (high.square() + 2 * shift * high - v) / s**3 if scale else None
        return [p2 * high / s2, ds, p1 * p2, -p2 * (high / s2 + p1)]
    if j == 6:
        ds = (v + shift.square()) / s**3 - 1 / s if scale else None
        return [shift / s2, ds, -p1, p2]
    k = j - 5
    dz = (c(k + 1) - k * c(k - 1) * v) / s2
    dlow = p1 * (c(k) - (-low) ** k - k * c(k - 1) * low)
    dhigh = p2 * (high**k - c(k) - k * c(k - 1) * high)
    if scale:
        ds = (c(k + 2) - c(k) * v + 2 * shift * (c(k + 1) - k * c(k - 1) * v) - k * c(k - 1) * c(3)) / s**3
    # the three sum to zero; the one at the end where the mass is, in a tail, is the difference of nearly equal terms
    return [dz, ds, torch.where(z < low_end, -(dz + dhigh), dlow), torch.where(z > high_end, -(dz + dlow), dhigh)]


def _sum(terms: Sequence[tuple[Tensor | None, Tensor | None]]) -> Tensor | None:
    """Σ x y over the pairs where both are there, None if there is none."""
    products = [x * y for x, y in terms if x is not None and y is not None]
    return functools.reduce(torch.add, products) if products else None


def _batched(size: int, dims: Sequence[int | None], x: Sequence[Tensor]) -> list[Tensor]:
    return [t.expand(size, *t.shape) if d is None else t.movedim(d, 0) for d, t in zip(dims, x, strict=True)]


class _Moments(torch.autograd.Function):
    """:func:`_moments_kernel` with derivatives."""

    @staticmethod
    def forward(order: int, z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        return tuple(_moments_kernel(z, s, low, high, order))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, outputs, needed = ctx.saved_tensors[:4], ctx.saved_tensors[4:], ctx.needs_input_grad[1:]
        rows = [(g, _partials(j, x, outputs, needed[1])) for j, g in enumerate(grads) if g is not None]
        return None, *(_sum([(g, row[i]) for g, row in rows]) if needed[i] else None for i in range(4))

    @staticmethod
    def vmap(
        info: Any, dims: Sequence[int | None], order: int, *x: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = _moments(order, *_batched(info.batch_size, dims[1:], x))
        return outputs, (0,) * len(outputs)


class _MomentsWithJvp(_Moments):
    """The same with forward mode, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]
            x, outputs = saved[:4], saved[4:]
            rows = (_partials(j, x, outputs, tangents[1] is not None) for j in range(len(outputs)))
            return tuple(_sum(list(zip(tangents, row, strict=True))) for row in rows)


class _Mean(torch.autograd.Function):
    """:func:`_mean_kernel` with the derivatives of its first output; the others are there for the first backward."""

    @staticmethod
    def forward(z: Tensor, s: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        return tuple(_mean_kernel(z, s, low, high))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needed, x, (dz, dlow, dhigh) = ctx.needs_input_grad, ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        row: list[Tensor | None] = [dz, None, dlow, dhigh]
        if torch.is_grad_enabled() or needed[1]:
            row = _partials(0, x, _moments(3, *x), needed[1])
        return tuple(_sum([(grad, d)]) if need else None for need, d in zip(needed, row, strict=True))

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], *x: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _means(*_batched(info.batch_size, dims, x)), (0,) * 4


class _MeanWithJvp(_Mean):
    """The same with forward mode, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with forward_ad._set_fwd_grad_enabled(True):
            x = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]
            row = _partials(0, x, _moments(3, *x), tangents[1] is not None)
            return _sum(list(zip(tangents, row, strict=True))), None, None, None


class _Quantile(torch.autograd.Function):
    """:func:`_quantile_kernel` with its implicit derivatives (Figurnov, Mohamed and Mnih, 2018, eq. 5)."""

    @staticmethod
    def forward(*x: Tensor) -> Tensor:
        return _quantile_kernel(*x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row = _quantile_partials(ctx.saved_tensors, ctx.needs_input_grad[0])
        return tuple(_sum([(grad, d)]) if need else None for need, d in zip(ctx.needs_input_grad, row, strict=True))

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], *x: Tensor) -> tuple[Tensor, int]:
        return _quantiles(*_batched(info.batch_size, dims, x)), 0


class _QuantileWithJvp(_Quantile):
    """The same with forward mode, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]
            row = _quantile_partials(saved, tangents[0] is not None)
            return _sum(list(zip(tangents, row, strict=True)))


def _quantile_partials(saved: Sequence[Tensor], level: bool) -> list[Tensor | None]:
    """Derivatives of the quantile with respect to u (if ``level``), z, s, low, high, from F(h; z, s, low, high) = u."""
    u, z, s, low, high, h = saved
    du = torch.exp(-_log_density(h, z, s, low, high)) if level else None
    # an infinite end, put where the density is zero beside that of h
    low = torch.where(low == -torch.inf, torch.minimum(h, z).detach() - 2 * _EDGE * s.detach(), low)
    high = torch.where(high == torch.inf, torch.maximum(h, z).detach() + 2 * _EDGE * s.detach(), high)
    twice = 2 * s.square()
    dlow = (1 - u) * torch.exp((h - low) * (h + low - 2 * z) / twice)
    dhigh = u * torch.exp((h - high) * (h + high - 2 * z) / twice)
    ds = ((h - z) - dlow * (low - z) - dhigh * (high - z)) / s
    return [du, 1 - dlow - dhigh, ds, dlow, dhigh]


def _top(x: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The mode r, E h − r, and the logarithm of the density there, without cancellation in the tails."""
    z, s, low_end, high_end = x
    _, shift, low, high, p1, p2, log_partition = found[:7]
    left, right = z < low_end, z > high_end
    mode = torch.where(left, low_end, torch.where(right, high_end, z))
    end = torch.where(left, p1, torch.where(right, p2, 1.0)).log()
    top = torch.where(left | right, end, -s.log() - _LOG_SQRT_2PI - log_partition)
    return mode, torch.where(left, low, torch.where(right, -high, shift)), top


def _log_density(y: Tensor, *x: Tensor) -> Tensor:
    """Log-density at y inside the interval, from that at the mode r: L − (y − r)(y + r − 2 z)/(2 s²)."""
    mode, _, top = _top(x, _moments(2, *x))
    return top - (y - mode) * (y + mode - 2 * x[0]) / (2 * x[1].square())


def _quantiles(*x: Tensor) -> Tensor:
    function = _Quantile if torch.compiler.is_compiling() else _QuantileWithJvp
    return function.apply(*x)


def _moments(order: int, *x: Tensor) -> tuple[Tensor, ...]:
    function = _Moments if torch.compiler.is_compiling() else _MomentsWithJvp
    return function.apply(order, *x)


def _means(*x: Tensor) -> tuple[Tensor, ...]:
    function = _Mean if torch.compiler.is_compiling() else _MeanWithJvp
    return function.apply(*x)


def _arguments(*values: Tensor | float) -> tuple[list[Tensor], torch.dtype]:
    """The arguments in float64, broadcast against each other, and the dtype of the result."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors)) if tensors else torch.get_default_dtype()
    if not dtype.is_floating_point:
        raise TypeError(f"the truncated normal distribution takes real floating point tensors, got {dtype}")
    device = tensors[0].device if tensors else None
    wide = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]
    return list(torch.broadcast_tensors(*wide)), dtype


# ------------------------------------------------------------------ what others use
def mean(loc: Tensor | float, scale: Tensor | float, low: Tensor | float, high: Tensor | float) -> Tensor:
    """``E h``, the cheapest of the moments: its derivatives come out of the same pass."""
    x, dtype = _arguments(loc, scale, low, high)
    return _means(*x)[0].to(dtype)


def moments(loc: Tensor | float, scale: Tensor | float, low: Tensor | float, high: Tensor | float) -> Moments:
    """Log-partition, mean, variance, third central moment and end-point densities."""
    x, dtype = _arguments(loc, scale, low, high)
    mean, _, _, _, density_low, density_high, log_partition, variance, third = _moments(3, *x)
    found = (log_partition, mean, variance, third, density_low, density_high)
    return Moments(*(t.to(dtype) for t in found))


def log_density(
    x: Tensor | float, loc: Tensor | float, scale: Tensor | float, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """Logarithm of the density of h at ``x``; −inf outside ``low ≤ x ≤ high``."""
    (value, *rest), dtype = _arguments(x, loc, scale, low, high)
    outside = (value < rest[2]) | (value > rest[3])
    return torch.where(outside, -torch.inf, _log_density(value, *rest)).to(dtype)


def entropy(loc: Tensor | float, scale: Tensor | float, low: Tensor | float, high: Tensor | float) -> Tensor:
    """``−E ln p(h)``."""
    x, dtype = _arguments(loc, scale, low, high)
    found = _moments(2, *x)
    mode, move, top = _top(x, found)
    return ((found[7] + move.square() + 2 * move * (mode - x[0])) / (2 * x[1].square()) - top).to(dtype)


def cumulative(
    x: Tensor | float, loc: Tensor | float, scale: Tensor | float, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """``P(h ≤ x)``: the probability of one side of ``x`` beside that of the interval."""
    (value, z, s, low, high), dtype = _arguments(x, loc, scale, low, high)
    left, right, inside = z < low, z > high, (value > low) & (value < high)
    part = _moments(2, z, s, torch.where(right & inside, value, low), torch.where(inside & ~right, value, high))
    whole = _moments(2, z, s, low, high)
    # densities at an end that both intervals have are inverse to their probabilities
    below = torch.where(left, whole[4], 1.0) / torch.where(left, part[4], 1.0)
    above = torch.where(right, whole[5], 1.0) / torch.where(right, part[5], 1.0)
    between = torch.exp(torch.where(left | right, 0.0, part[6] - whole[6]))
    # rounding errors: ε of a difference from 1, and ε |ln P| times the probability of a difference of logarithms
    lower = _moments(2, z, s, low, torch.where(inside, value, high))
    rest = torch.exp(torch.where(right, lower[6] - whole[6], 0.0))
    rest = torch.where((1 - above) * whole[6].abs() > 1, 1 - above, rest)
    found = torch.where(left, below, torch.where(right, rest, between))
    edge = torch.where(value.isnan(), value, (value >= high).to(value.dtype))
    return torch.where(inside, found, edge).to(dtype)


def quantile(
    u: Tensor | float, loc: Tensor | float, scale: Tensor | float, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """The x with ``P(h ≤ x) = u``, differentiable in all arguments; u is clipped to what lies inside (0, 1)."""
    (level, *rest), dtype = _arguments(u, loc, scale, low, high)
    return _quantiles(level.clamp(_LEAST, 1 - _LEAST), *rest).to(dtype)


def sample(
    loc: Tensor | float,
    scale: Tensor | float,
    low: Tensor | float,
    high: Tensor | float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One h for each element, by inversion of the distribution function at a uniform number.

    Reparametrized: the derivative is that of the quantile at that number.
    """
    x, dtype = _arguments(loc, scale, low, high)
    u = torch.rand(x[0].shape, dtype=x[0].dtype, device=x[0].device, generator=generator)
    return _quantiles(u.clamp(_LEAST, 1 - _LEAST), *x).to(dtype)
