"""Structured unitary factors as functions of rows: phases, reflections, the unitary Fourier transform, permutations.

A vector (*P, N) of factor entries acts on rows ``h`` (..., *P, B, N), and on (..., N) where there is no batch *P. The
entries are complex or real; reflections are given by vectors of length 1, see :func:`unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: lengths made of these MKL transforms without a detour
RADICES = (2, 3, 5, 7, 11, 13)
#: a product with a matrix, for every row
Product = Callable[[Tensor], Tensor]


def phases(theta: Tensor) -> Tensor:
    """e^{iθ}, elementwise."""
    return torch.complex(theta.cos(), theta.sin())


def unit(v: Tensor) -> Tensor:
    """v / ‖v‖ over the last dimension, and 0 where v = 0, of which the reflection is the identity."""
    parts = torch.view_as_real(v.resolve_conj()).flatten(-2) if v.is_complex() else v
    largest = parts.detach().abs().amax(-1, keepdim=True)  # lest squares over- or underflow
    largest = torch.where(largest > 0, largest, 1)
    square = (parts / largest).square().sum(-1, keepdim=True)
    return v / largest * torch.where(square > 0, square, 1).rsqrt()


def scale(h: Tensor, d: Tensor) -> Tensor:
    """diag(d) h for every row h; ``d`` (*P, N)."""
    return h * _rows(d)


def reflect(h: Tensor, u: Tensor) -> Tensor:
    """(I − 2 u uᴴ) h for every row h; ``u`` (*P, N) of length 1 or 0. Hermitian: its own adjoint."""
    return torch.addcmul(h, h @ u.conj_physical().unsqueeze(-1), _rows(u), value=-2)


def permute(h: Tensor, permutation: Tensor) -> Tensor:
    """(P h)_i = h_{permutation[i]} for every row h; ``permutation`` (*P, N) of integers."""
    return h.gather(-1, _rows(permutation).expand(h.shape))  # ten times faster than h[..., permutation]


def restricted(h: Tensor, d: Tensor, u: Tensor, permutation: Tensor) -> Tensor:
    """D3 R2 F⁻¹ D2 P R1 F D1 h for every row h, in O(N log N): Arjovsky, Shah and Bengio (2016), eq. (6).

    ``d`` (*P, 3, N) the diagonals, ``u`` (*P, 2, N) the unit vectors of the reflections, ``permutation`` (*P, N); F is
    the discrete Fourier transform, times 1/√N either way.
    """
    h = torch.fft.fft(scale(h, d[..., 0, :]), norm="ortho")
    h = permute(reflect(h, u[..., 0, :]), permutation)
    h = torch.fft.ifft(scale(h, d[..., 1, :]), norm="ortho")
    return scale(reflect(h, u[..., 1, :]), d[..., 2, :])


def restricted_adjoint(g: Tensor, d: Tensor, u: Tensor, inverse: Tensor) -> Tensor:
    """D1ᴴ F⁻¹ R1 P⁻¹ D2ᴴ F R2 D3ᴴ g for every row g: the adjoint of :func:`restricted`.

    ``inverse`` (*P, N) is the inverse permutation.
    """
    d = d.conj_physical()
    g = torch.fft.fft(reflect(scale(g, d[..., 2, :]), u[..., 1, :]), norm="ortho")
    g = reflect(permute(scale(g, d[..., 1, :]), inverse), u[..., 0, :])
    return scale(torch.fft.ifft(g, norm="ortho"), d[..., 0, :])


def restricted_bound(d: Tensor, u: Tensor, permutation: Tensor, inverse: Tensor) -> tuple[Product, Product]:
    """:func:`restricted` and :func:`restricted_adjoint` for loops without derivatives, with fewer and shorter steps."""
    (d1, d2, d3), (u1, u2) = ([_rows(t) for t in x.unbind(-2)] for x in (d, u))
    c1, c2, c3 = (t.conj_physical() for t in (d1, d2, d3))
    v1, v2 = (t.conj_physical().unsqueeze(-1) for t in u.unbind(-2))

    fourier, back = _transforms(d)

    def reflect_(h: Tensor, u: Tensor, v: Tensor) -> Tensor:  # v is conj(u) as a column
        return h.addcmul_(h @ v, u, value=-2)

    def product(h: Tensor) -> Tensor:
        h = reflect_(fourier(h * d1), u1, v1)
        h = back(permute(h, permutation).mul_(d2))
        return reflect_(h, u2, v2).mul_(d3)

    def adjoint(g: Tensor) -> Tensor:
        g = fourier(reflect_(g * c3, u2, v2))
        g = reflect_(permute(g.mul_(c2), inverse), u1, v1)
        return back(g).mul_(c1)

    return product, adjoint


def _transforms(like: Tensor) -> tuple[Product, Product]:
    """F and F⁻¹ of rows like the last dimension of ``like``, for loops without derivatives.

    On the CPU torch plans every transform anew, which takes MKL longer than twenty rows of some hundred numbers if the
    length has a prime factor above 13; NumPy keeps its plans, and from version 2 on has single precision.
    """
    rest = like.shape[-1]
    for prime in RADICES:
        while rest % prime == 0:
            rest //= prime
    if rest == 1 or like.device.type != "cpu" or np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return lambda h: torch.fft.fft(h, norm="ortho"), lambda h: torch.fft.ifft(h, norm="ortho")

    def by_numpy(transform: Callable[..., Any], h: Tensor) -> Tensor:
        out = torch.empty_like(h)
        transform(h.numpy(), norm="ortho", out=out.numpy())
        return out

    return partial(by_numpy, np.fft.fft), partial(by_numpy, np.fft.ifft)


def restricted_gradients(h: Tensor, Wh: Tensor, g: Tensor, Wg: Tensor, d: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of Re⟨g, W h⟩ by ``d`` and ``u``, where W is that of :func:`restricted`, summed over (T, *P, B, N).

    ``Wh`` and ``Wg`` are W h and Wᴴ g. As all factors are unitary, what enters and leaves D3 R2 is known from (W h, g),
    and what enters and leaves R1 F D1 from (h, Wᴴg): sums over rows are taken there, and transformed as one vector.
    Only D2, in the middle, takes two more Fourier transforms of all rows.
    """
    (d1, d2, d3), (u1, u2) = d.unbind(-2), u.unbind(-2)
    back3 = d3.conj_physical()
    middle = [torch.fft.fft(reflect(scale(x, back3), u2), norm="ortho") for x in (Wh, g)]
    d_d = [d1 * _correlation(h, Wg), d2 * _correlation(*middle), d3 * _correlation(Wh, g)]

    # R f = f − 2u(uᴴf) with gradient c behind it: −2 Σ conj(uᴴf) c + conj(uᴴc) f, and uᴴf = −uᴴRf
    def behind(x: Tensor) -> Tensor:
        """D3ᴴ x, of vectors (*P, N)."""
        return back3 * x

    def before(x: Tensor) -> Tensor:
        """F D1 x."""
        return torch.fft.fft(d1 * x, norm="ortho")

    w2, w1 = d3 * u2, d1.conj_physical() * torch.fft.ifft(u1, norm="ortho")
    d_u2 = behind(_weighted(Wh, w2, g)) - _reflect_vector(behind(_weighted(g, w2, Wh)), u2)
    d_u1 = before(_weighted(Wg, w1, h)) - _reflect_vector(before(_weighted(h, w1, Wg)), u1)
    return torch.stack(d_d, -2), 2 * torch.stack([d_u1, d_u2], -2)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Σ conj(a) b over the rows of (T, *P, B, N): (*P, N)."""
    return (a.conj_physical() * b).sum((0, -2))


def _weighted(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Σ conj(wᴴa) b over the rows of (T, *P, B, N): (*P, N)."""
    return ((a @ w.conj_physical().unsqueeze(-1)).mH @ b).sum(0).squeeze(-2)


def _reflect_vector(x: Tensor, u: Tensor) -> Tensor:
    """(I − 2 u uᴴ) x for vectors (*P, N), one for each reflection."""
    return reflect(x.unsqueeze(-2), u).squeeze(-2)


def random_permutation(
    *shape: int, device: torch.device | str | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Uniform permutations of 0..N−1 along the last dimension: (*P, N)."""
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generator).argsort(-1)


def _rows(v: Tensor) -> Tensor:
    return v.unsqueeze(-2) if v.dim() > 1 else v
