"""Initialisations that ``torch.nn.init`` lacks: complex tensors, and orthogonal and unitary weights of any dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manopt_torch.manifolds import Stiefel, view_for
from manopt_torch.nn.factors import phases, random_permutation, restricted, unit


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


@torch.no_grad()
def restricted_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill complex matrices (*P, N, N) in place with random ones of the form D3 R2 F⁻¹ D2 P R1 F D1.

    θ uniform on (−π, π), reflection vectors uniform on a cube, P uniform among the permutations: what the full-capacity
    W of Wisdom et al. (2016, released code) starts from. The form is that of Arjovsky, Shah and Bengio (2016, eq. 6).

    Raises:
        ValueError: if the matrices are not square or not complex.
    """
    *P, N = _square(tensor, "restricted_")
    if not tensor.is_complex():
        raise ValueError(
            f"restricted_ fills complex tensors, as the Fourier transform is complex, got {tensor.dtype}: haar_, "
            "henaff_ and cayley_angle_ fill real ones"
        )
    theta = uniform_(tensor.real.new_empty(*P, 3, N), math.pi, generator)
    reflection = uniform_(tensor.new_empty(*P, 2, N), 1, generator)
    permutation = random_permutation(*P, N, device=tensor.device, generator=generator)
    rows = torch.eye(N, dtype=tensor.dtype, device=tensor.device).expand(*P, N, N)
    # its rows are (W eᵢ)ᵀ: the transposed matrix
    columns = restricted(rows, phases(theta), unit(reflection), permutation)
    return tensor.copy_(torch.einsum("...ij->...ji", columns))


@torch.no_grad()
def henaff_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill matrices (*P, N, N) in place with 2×2 rotations along the diagonal, by angles uniform on (−π, π).

    Henaff, Szlam and LeCun (2016), "Recurrent orthogonal networks and long-memory tasks". Complex tensors
    are given real values too. For odd N the last diagonal entry is 1.

    Raises:
        ValueError: if the matrices are not square.
    """
    return _rotations_(tensor, "henaff_", -math.pi, math.pi, generator)


@torch.no_grad()
def cayley_angle_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill matrices (*P, N, N) in place with the Cayley transform (I + A)⁻¹(I − A) of 2×2 blocks [[0, s], [−s, 0]].

    s = √((1 − cos t)/(1 + cos t)) = tan(t/2), t uniform on (0, π/2): a block becomes the rotation by t.
    Helfrich, Willmott and Ye (2018), "Orthogonal recurrent neural networks with scaled Cayley transform". Complex
    tensors are given real values too. For odd N the last diagonal entry is 1.

    Raises:
        ValueError: if the matrices are not square.
    """
    return _rotations_(tensor, "cayley_angle_", 0, math.pi / 2, generator)


def _rotations_(tensor: Tensor, name: str, low: float, high: float, generator: torch.Generator | None) -> Tensor:
    """[[cos t, −sin t], [sin t, cos t]] along the diagonal, t uniform between ``low`` and ``high``."""
    *P, N = _square(tensor, name)
    real = tensor.dtype.to_real()
    t = torch.empty(*P, N // 2, dtype=real, device=tensor.device).uniform_(low, high, generator=generator)
    top = torch.arange(0, N - 1, 2, device=tensor.device)
    value = torch.eye(N, dtype=real, device=tensor.device).repeat(*P, 1, 1)
    value[..., top, top] = value[..., top + 1, top + 1] = t.cos()
    value[..., top, top + 1] = -t.sin()
    value[..., top + 1, top] = t.sin()
    return tensor.copy_(value)


def _square(tensor: Tensor, name: str) -> tuple[int, ...]:
    """(*P, N) of matrices (*P, N, N)."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        raise ValueError(f"{name} fills square matrices (*P, N, N), got shape {tuple(tensor.shape)}")
    return tuple(tensor.shape[:-1])
