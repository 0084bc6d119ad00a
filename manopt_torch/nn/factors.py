"""Structured unitary factors as functions of rows: phases, reflections, the unitary Fourier transform, permutations.

A vector (*P, N) of factor entries acts on rows ``h`` (..., *P, B, N), and on (..., N) where there is no batch *P. The
entries are complex or real; reflections are given by vectors of length 1, see :func:`unit`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def phases(theta: Tensor) -> Tensor:
    """e^{iθ}, elementwise."""
    return torch.complex(theta.cos(), theta.sin())


def unit(v: Tensor) -> Tensor:
    """v / ‖v‖ over the last dimension, and 0 where v = 0, of which the reflection is the identity."""
    parts = torch.view_as_real(v.resolve_conj()).flatten(-2) if v.is_complex() else v
    square = parts.square().sum(-1, keepdim=True)
    return v * torch.where(square > 0, square, 1).rsqrt()


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


def random_permutation(
    *shape: int, device: torch.device | str | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Uniform permutations of 0..N−1 along the last dimension: (*P, N)."""
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generator).argsort(-1)


def _rows(v: Tensor) -> Tensor:
    return v.unsqueeze(-2) if v.dim() > 1 else v
