"""Functions of Hermitian matrices: ``f(A) = V f(λ) Vᴴ`` for ``A = V diag(λ) Vᴴ``, and their derivatives.

The derivatives are those of Daleckii and Krein (1965; Bhatia, Matrix Analysis, 1997, Theorem V.3.3). With ``Ẽ = VᴴEV``
and the divided differences f[a, b] = (f(a) − f(b))/(a − b), f[a, b, c] = (f[a, b] − f[b, c])/(a − c)::

    Df(A)[E]     = V ( f[λᵢ, λⱼ] Ẽᵢⱼ ) Vᴴ
    D²f(A)[E, G] = V ( Σₖ f[λᵢ, λₖ, λⱼ] (Ẽᵢₖ G̃ₖⱼ + G̃ᵢₖ Ẽₖⱼ) ) Vᴴ

They do not depend on the choice of eigenvectors, and the divided differences are evaluated in forms that do not cancel
and have no 0/0: the derivatives are right at the identity and at any other repeated eigenvalue. Two derivatives are
implemented, in reverse and in forward mode and nested; asking for the third raises ``NotImplementedError``. The second
takes O(n³) memory per matrix.

All functions map (*B, n, n) to (*B, n, n), real or complex, float32 or float64. They see the Hermitian part
``(A + Aᴴ)/2`` of their argument; results and gradients are exactly Hermitian. A matrix with an entry that is not finite
gives NaN throughout, without an error and without touching the rest of the batch.

**Floor.** ``eigh`` is backward stable: computed eigenvalues are off by a small multiple of ``ε max|λ|``, ε the machine
epsilon of the dtype (LAPACK Users' Guide, 1999, section 4.7), so that those of a positive definite matrix with a
condition number near 1/ε come out zero or negative. The functions with domain λ > 0 (``logm``, ``sqrtm``,
``inv_sqrtm``, ``powm``; ``log1pm`` with 1 + λ in the place of λ) therefore replace every eigenvalue below
``ε max|λ|`` by that value; a zero matrix is taken as ``ε I``. Value and derivatives are those of ``f`` at the matrix so
changed, hence finite, and a descent direction still pushes a floored eigenvalue back up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manopt_torch import linalg

#: in units of the machine epsilon of the dtype, relative to the largest |λ| (LAPACK Users' Guide, 1999, section 4.7)
EIGENVALUE_FLOOR = 1.0

# Gauss-Legendre nodes and weights on [0, 1]. The integrands below are analytic on the part of the plane where 8 nodes
# are good to (5 + √24)⁻¹⁶ ≈ 1e-16 (Trefethen, Approximation Theory and Approximation Practice, 2013, theorem 19.3).
_NODES = [((1 + x) / 2, w / 2) for x, w in zip(*(z.tolist() for z in np.polynomial.legendre.leggauss(8)), strict=True)]
# Pairs a > b > 0 with a/b beyond this (a − b for exp) are far apart: differences of their divided differences are safe.
_FAR_RATIO, _FAR_GAP = 1.5, 1.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """A function of one real variable, with its first and second divided differences, elementwise and symmetric."""

    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor, Tensor], Tensor]
    second: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: lower end of the domain, above which eigenvalues are kept; None: all real numbers
    domain: float | None = None


def _divide(numerator: Tensor, gap: Tensor, limit: Tensor) -> Tensor:
    """``numerator/gap``, and its ``limit`` where the gap is zero or subnormal."""
    return torch.where(gap < torch.finfo(gap.dtype).tiny, limit, numerator / gap)


def _second(
    first: Callable[[Tensor, Tensor], Tensor],
    first_of_derivative: Callable[[Tensor, Tensor], Tensor],
    far: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Second divided differences of f from the first ones of f and f′.

    Over the widest gap when that is ``far``, otherwise by quadrature: f[a, b, c] = ∫₀¹ s f′[c + s(a−c), c + s(b−c)] ds.
    """

    def second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        low, high = torch.minimum(a, b), torch.maximum(a, b)
        low, middle, high = torch.minimum(low, c), torch.maximum(low, torch.minimum(high, c)), torch.maximum(high, c)
        across = (first(high, middle) - first(middle, low)) / (high - low)
        near = sum(w * s * first_of_derivative(low + s * (high - low), low + s * (middle - low)) for s, w in _NODES)
        return torch.where(far(low, high), across, near)

    return second


def _exp_first(a: Tensor, b: Tensor) -> Tensor:
    high, gap = torch.maximum(a, b), (a - b).abs()
    return high.exp() * _divide(-torch.expm1(-gap), gap, torch.ones_like(gap))


def _far_ratio(low: Tensor, high: Tensor) -> Tensor:
    return high > _FAR_RATIO * low


def _log_quotient(low: Tensor, gap: Tensor) -> Tensor:
    return _divide(torch.log1p(gap / low), gap, 1 / low)


def _log_first(a: Tensor, b: Tensor) -> Tensor:
    return _log_quotient(torch.minimum(a, b), (a - b).abs())


def _log1p_first(a: Tensor, b: Tensor) -> Tensor:
    return _log_quotient(1 + torch.minimum(a, b), (a - b).abs())


_log_second = _second(_log_first, lambda p, q: -1 / (p * q), _far_ratio)


def _power(t: float) -> Rule:
    """λᵗ."""

    def first_of(t: float) -> Callable[[Tensor, Tensor], Tensor]:
        def first(a: Tensor, b: Tensor) -> Tensor:
            low, high, gap = torch.minimum(a, b), torch.maximum(a, b), (a - b).abs()
            drop = -torch.expm1(-abs(t) * torch.log1p(gap / low))  # 1 − (smaller power)/(larger power)
            return _divide(math.copysign(1, t) * (high if t > 0 else low) ** t * drop, gap, t * high ** (t - 1))

        return first

    derivative = first_of(t - 1)
    second = _second(first_of(t), lambda p, q: t * derivative(p, q), _far_ratio)
    return Rule(lambda x: x**t, first_of(t), second, 0.0)


def _sqrt_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = a.sqrt(), b.sqrt(), c.sqrt()
    return -1 / ((a + b) * (b + c) * (c + a))


def _inv_sqrt_first(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.sqrt(), b.sqrt()
    return -1 / (a * b * (a + b))


def _inv_sqrt_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = a.sqrt(), b.sqrt(), c.sqrt()
    return (a + b + c) / (a * b * c) / ((a + b) * (b + c) * (c + a))


def _relu_first(a: Tensor, b: Tensor) -> Tensor:
    return _divide((a.relu() - b.relu()).abs(), (a - b).abs(), (a > 0).to(a.dtype) + torch.zeros_like(b))


_exp_second = _second(_exp_first, _exp_first, lambda low, high: high - low > _FAR_GAP)
_EXP = Rule(torch.exp, _exp_first, _exp_second)
_EXPM1 = Rule(torch.expm1, _exp_first, _exp_second)
_LOG = Rule(torch.log, _log_first, _log_second, 0.0)
_LOG1P = Rule(torch.log1p, _log1p_first, lambda a, b, c: _log_second(1 + a, 1 + b, 1 + c), -1.0)
_SQRT = Rule(torch.sqrt, lambda a, b: 1 / (a.sqrt() + b.sqrt()), _sqrt_second, 0.0)
_INV_SQRT = Rule(torch.rsqrt, _inv_sqrt_first, _inv_sqrt_second, 0.0)
_RELU = Rule(torch.relu, _relu_first, _second(_relu_first, lambda p, q: torch.zeros_like(p), torch.lt))


@dataclasses.dataclass(frozen=True)
class _Terms:
    """A sum of derivatives of f; ``orders`` has the k of each."""

    rule: Rule
    orders: tuple[int, ...]

    def split(self, flat: Iterable[Any]) -> list[list[Any]]:
        flat = iter(flat)
        return [[next(flat) for _ in range(k)] for k in self.orders]


class _Derivatives(torch.autograd.Function):
    """Sum of terms ``Dᵏf(A)[E₁, …, E_k]``, k = 0, 1, 2, given the eigenvalues and -vectors of A; all E are Hermitian.

    ``Re tr(G Dᵏf(A)[E₁, …, E_k])`` is symmetric in G, E₁, …, E_k, so that all derivatives are again of this form. That
    they are one call, and no sum is left outside, is needed too: a native operation inside ``jvp`` would lose the
    tangent of an outer forward mode (pytorch issue 197867).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(terms: _Terms, a: Tensor, values: Tensor, vectors: Tensor, *flat: Tensor) -> Tensor:
        rule = terms.rule
        if not flat:
            return linalg.herm((vectors * rule.value(values)[..., None, :]) @ vectors.mH)
        inner = torch.zeros_like(a)
        for es in terms.split(vectors.mH @ e @ vectors for e in flat):
            if len(es) > 2:
                raise NotImplementedError("functions of Hermitian matrices have first and second derivatives only")
            if len(es) == 1:
                inner = inner + rule.first(values[..., :, None], values[..., None, :]) * es[0]
            else:
                f = rule.second(values[..., :, None, None], values[..., None, :, None], values[..., None, None, :])
                inner = inner + 2 * linalg.herm((f * es[0][..., :, :, None] * es[1][..., None, :, :]).sum(-2))
        return linalg.herm(vectors @ inner @ vectors.mH)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.terms = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rule, (a, values, vectors, *flat) = ctx.terms.rule, ctx.saved_tensors
        if grad is None:
            return (None,) * (4 + len(flat))
        grad, terms = linalg.herm(grad), ctx.terms.split(flat)
        needed = ctx.needs_input_grad[1]
        by_a = _derivatives(rule, a, values, vectors, [[*es, grad] for es in terms]) if needed else None
        by_e = [
            _derivatives(rule, a, values, vectors, [[*es[:i], *es[i + 1 :], grad]])
            for es in terms
            for i in range(len(es))
        ]
        return (None, by_a, None, None, *by_e)


class _DerivativesWithJvp(_Derivatives):
    """The same with forward mode, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, _: None, da: Tensor | None, *tangents: Tensor | None) -> Tensor:
        a, values, vectors, *flat = ctx.saved_tensors
        terms = []
        for es, des in zip(ctx.terms.split(flat), ctx.terms.split(tangents[2:]), strict=True):
            terms += [[*es, da], *([*es[:i], de, *es[i + 1 :]] for i, de in enumerate(des))]
        known = [term for term in terms if all(e is not None for e in term)]
        return _derivatives(ctx.terms.rule, a, values, vectors, known)


def _derivatives(rule: Rule, a: Tensor, values: Tensor, vectors: Tensor, terms: list[list[Tensor]]) -> Tensor:
    which, flat = _Terms(rule, tuple(len(term) for term in terms)), [e for term in terms for e in term]
    if not torch.compiler.is_compiling():
        return _DerivativesWithJvp.apply(which, a, values, vectors, *flat)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (a, *flat)):
        return _Derivatives.apply(which, a, values, vectors, *flat)
    return _Derivatives.forward(which, a, values, vectors, *flat)  # where torch.compile (2.13) would pass a context


def _finite(a: Tensor) -> tuple[Tensor, Tensor]:
    """Whether all entries are finite, (*B, 1), and ``a`` detached, with zeros where they are not."""
    a = a.detach()
    finite = (0 * a).sum((-2, -1))[..., None] == 0
    return finite, torch.where(finite[..., None], a, 0)


def _floor(values: Tensor) -> Tensor:
    scale = values.abs().amax(-1, keepdim=True)
    return EIGENVALUE_FLOOR * torch.finfo(values.dtype).eps * torch.where(scale == 0, 1, scale)


def function(a: Tensor, rule: Rule) -> Tensor:
    """``f(A)`` for the function that ``rule`` describes: (*B, n, n) -> (*B, n, n)."""
    a = linalg.herm(a)
    finite, safe = _finite(a)
    values, vectors = torch.linalg.eigh(safe)
    values = torch.where(finite, values, torch.nan)
    if rule.domain is not None:
        values = torch.maximum(values, rule.domain + _floor(values - rule.domain))
    return _derivatives(rule, a, values, vectors, [[]])


def expm(a: Tensor) -> Tensor:
    """``exp(A)``."""
    return function(a, _EXP)


def expm1m(a: Tensor) -> Tensor:
    """``exp(A) − I``, to full relative accuracy for small A."""
    return function(a, _EXPM1)


def logm(a: Tensor) -> Tensor:
    """``log(A)`` of a positive definite matrix."""
    return function(a, _LOG)


def log_gram(w: Tensor) -> Tensor:
    """``log(WWᴴ)`` of an invertible W, from its singular values: (*B, n, n) -> (*B, n, n).

    Their ratios may come near 1/ε, those of the eigenvalues of WWᴴ near 1/ε²: ``logm(W @ W.mH)`` loses the small ones.
    Singular values have the floor that eigenvalues have elsewhere.
    """
    finite, safe = _finite(w)
    vectors, values, _ = torch.linalg.svd(safe)
    values = torch.where(finite, values, torch.nan)
    values = torch.maximum(values, _floor(values))
    return _derivatives(_LOG, linalg.herm(w @ w.mH), values**2, vectors, [[]])


def log1pm(a: Tensor) -> Tensor:
    """``log(I + A)`` with I + A positive definite; to full relative accuracy for small A."""
    return function(a, _LOG1P)


def sqrtm(a: Tensor) -> Tensor:
    """``A^½`` of a positive definite matrix, itself positive definite."""
    return function(a, _SQRT)


def inv_sqrtm(a: Tensor) -> Tensor:
    """``A^-½`` of a positive definite matrix, itself positive definite."""
    return function(a, _INV_SQRT)


def powm(a: Tensor, t: float) -> Tensor:
    """``Aᵗ`` of a positive definite matrix, for any real exponent ``t``."""
    return function(a, _power(t))


def relum(a: Tensor) -> Tensor:
    """``max(λ, 0)`` on the eigenvalues: the positive semidefinite matrix nearest to A (Higham, 1988, theorem 2.1)."""
    return function(a, _RELU)
