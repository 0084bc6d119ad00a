"""modReLU of one step and its derivative, each as one pass over memory; compiled by numba where it is installed.

Two layouts of complex states: all real parts and then all imaginary ones, which vector units like best, for a dense W;
and pairs, as torch stores them, for a W that is applied to complex numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

#: results may differ by the order of additions, but NaN and infinity stay what they are
FASTMATH = {"contract", "reassoc", "nsz", "arcp", "afn"}


def _compiled(function: Any) -> Any:
    options: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder to write to
        return numba.njit(**options)(function)


@_compiled
def activate(t, z, states, first, beta, epsilon, floor, mask):  # type: ignore[no-untyped-def]
    """states[t] = σ(z[t]) where mask[t], and the state before elsewhere; all (K, P, B, N or [Re | Im]), beta (P, N)."""
    units = beta.shape[1]
    one, before = z.dtype.type(1), first if t == 0 else states[t - 1]
    for p in range(z.shape[1]):
        for row in range(z.shape[2]):
            a, y, b = z[t, p, row], states[t, p, row], beta[p]
            if mask.size and not mask[t, p, row]:
                y[:] = before[p, row]
            elif a.size == units:
                for i in range(units):
                    square = a[i] * a[i] + epsilon
                    q = b[i] / (math.sqrt(max(square, floor)) + epsilon)
                    y[i] = a[i] * (one + (-one if q < -one or square <= floor else q))
            else:
                for i in range(units):
                    re, im = a[i], a[units + i]
                    square = re * re + im * im + epsilon
                    q = b[i] / (math.sqrt(max(square, floor)) + epsilon)
                    scale = one + (-one if q < -one or square <= floor else q)
                    y[i], y[units + i] = scale * re, scale * im


@_compiled
def activate_back(t, z, g, d_z, d_beta, beta, epsilon, floor, mask):  # type: ignore[no-untyped-def]
    """d_z[t] and d_beta[t] from g[t + 1], the gradient by state t; a state that was held passes its own on to g[t].

    g is (K + 1, P, B, N or [Re | Im]); g[t] is the gradient by the state before step t, d_beta (K, P, B, N).
    """
    units = beta.shape[1]
    zero, one = z.dtype.type(0), z.dtype.type(1)
    for p in range(z.shape[1]):
        for row in range(z.shape[2]):
            a, u, d, e, b = z[t, p, row], g[t + 1, p, row], d_z[t, p, row], d_beta[t, p, row], beta[p]
            if mask.size and not mask[t, p, row]:
                d[:], e[:] = zero, zero
                g[t, p, row] += u
            elif a.size == units:
                for i in range(units):
                    square = a[i] * a[i]
                    s = math.sqrt(max(square + epsilon, floor))
                    inverse = one / (s + epsilon)
                    q = b[i] * inverse
                    active = zero if q <= -one or square + epsilon <= floor else one
                    along = active * a[i] * u[i]
                    e[i] = along * inverse
                    d[i] = active * (one + q) * u[i] - q * inverse / s * along * a[i]
            else:
                for i in range(units):
                    re, im = a[i], a[units + i]
                    square = re * re + im * im
                    s = math.sqrt(max(square + epsilon, floor))
                    inverse = one / (s + epsilon)
                    q = b[i] * inverse
                    active = zero if q <= -one or square + epsilon <= floor else one
                    along = active * (re * u[i] + im * u[units + i])
                    turn = q * inverse / s * along
                    scale = active * (one + q)
                    e[i] = along * inverse
                    d[i], d[units + i] = scale * u[i] - turn * re, scale * u[units + i] - turn * im


@_compiled
def activate_pairs(t, z, product, states, first, bias, epsilon, floor, mask):  # type: ignore[no-untyped-def]
    """z[t] += product; states[t] = σ(z[t]) where mask[t], the state before elsewhere.

    Complex numbers in pairs (Re, Im): z, states (K, P, B, 2N); product, first (P, B, 2N); bias (P, N); mask (K, P, B),
    empty for none.
    """
    before, zero, ratio = first if t == 0 else states[t - 1], bias.dtype.type(0), np.empty_like(bias[0])
    for p in range(z.shape[1]):
        b = bias[p]
        for row in range(z.shape[2]):
            a, y, w = z[t, p, row], states[t, p, row], product[p, row]
            for i in range(len(a)):
                a[i] += w[i]
            for i in range(len(ratio)):
                square = a[2 * i] * a[2 * i] + a[2 * i + 1] * a[2 * i + 1] + epsilon
                s = math.sqrt(square)
                scale = max((s + b[i]) / (s + epsilon), zero)
                ratio[i] = scale if square > floor else zero
            for i in range(len(ratio)):
                y[2 * i] = ratio[i] * a[2 * i]
                y[2 * i + 1] = ratio[i] * a[2 * i + 1]
            if mask.size and not mask[t, p, row]:
                y[:] = before[p, row]


@_compiled
def activate_back_pairs(t, z, g, later, held, d_z, d_bias, bias, epsilon, floor, mask):  # type: ignore[no-untyped-def]
    """d_z[t] and its share of d_bias (P, N), from g[t] + later, the gradient by state t.

    z, g, d_z (K, P, B, 2N); later, held (P, B, 2N). Where the state was held, its gradient goes to ``held``, which is
    zero elsewhere; without a mask ``held`` is not looked at.
    """
    zero, ratio, turn = bias.dtype.type(0), np.empty_like(bias[0]), np.empty_like(bias[0])
    for p in range(z.shape[1]):
        b, d_b = bias[p], d_bias[p]
        for row in range(z.shape[2]):
            a, v, w, d = z[t, p, row], g[t, p, row], later[p, row], d_z[t, p, row]
            for i in range(len(d)):
                d[i] = v[i] + w[i]
            if mask.size:
                if not mask[t, p, row]:
                    held[p, row] = d
                    d[:] = zero
                    continue
                held[p, row] = zero
            for i in range(len(ratio)):
                re, im = a[2 * i], a[2 * i + 1]
                square = re * re + im * im + epsilon
                s = math.sqrt(square)
                inverse = 1 / (s + epsilon)
                scale = (s + b[i]) * inverse
                on = scale > zero and square > floor
                along = (re * d[2 * i] + im * d[2 * i + 1]) * inverse if on else zero
                d_b[i] += along
                turn[i] = (epsilon - b[i]) / s * inverse * along if on else zero
                ratio[i] = scale if on else zero
            for i in range(len(ratio)):
                d[2 * i] = ratio[i] * d[2 * i] + turn[i] * a[2 * i]
                d[2 * i + 1] = ratio[i] * d[2 * i + 1] + turn[i] * a[2 * i + 1]
