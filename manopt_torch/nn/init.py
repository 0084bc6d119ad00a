"""Initialisations that ``torch.nn.init`` lacks: complex tensors, and Haar-distributed weights of any dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manopt_torch.manifolds import Stiefel, view_for


@torch.no_grad()
def uniform_(tensor: Tensor, bound: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill ``tensor`` in place, uniformly on (−bound, bound); Re and Im alike where it is complex."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    parts.uniform_(-bound, bound, generator=generator)
    return tensor


def glorot_uniform_(tensor: Tensor, fan_in: int, fan_out: int, generator: torch.Generator | None = None) -> Tensor:
    """Uniform on ±√(6 / (fan_in + fan_out)), in place; Re and Im alike where ``tensor`` is complex.

    Fans are counted in real numbers: a complex layer of N units has 2N (Glorot and Bengio, 2010, eq. 16).
    """
    return uniform_(tensor, math.sqrt(6 / (fan_in + fan_out)), generator)


@torch.no_grad()
def haar_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a matrix in place with orthonormal columns, or rows if it is wide, Haar-distributed; a kernel as its matrix.

    What ``torch.nn.init.orthogonal_`` does, for complex and half-precision tensors too: shape (n, p), or
    (out, in, *kernel_size), which is read as (out, in·∏kernel_size).
    """
    manifold = view_for(Stiefel(), tuple(tensor.shape))
    value = manifold.random(*tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)
    return tensor.copy_(value)
