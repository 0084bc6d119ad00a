"""Matrix kernels of the library: everything here works on ``(*B, n, p)``, real and complex.

Any batch dimensions (they broadcast), any strides in, contiguous out; float32 and float64. Every function is
differentiable as often as asked, in reverse and forward mode, and under ``torch.func.vmap``. No function looks at
values on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def herm(a: Tensor) -> Tensor:
    """Hermitian part ``(A + Aᴴ)/2``: (*B, n, n) -> (*B, n, n)."""
    return (a + a.mH) / 2


def skew(a: Tensor) -> Tensor:
    """Skew-Hermitian part ``(A − Aᴴ)/2``: (*B, n, n) -> (*B, n, n)."""
    return (a - a.mH) / 2


def _eye(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def cayley(x: Tensor, u: Tensor, *vs: Tensor, polish: int = 1) -> tuple[Tensor, ...]:
    """Cayley step from ``x`` along ``u``, and the vectors ``vs`` carried by the same unitary matrix Q."""
    n, p = x.shape[-2:]
    if p == n:
        w = skew(u @ x.mH)
        f = torch.linalg.solve_ex(_eye(w) - w / 2, w)[0]
        active = (w != 0).any(-1).any(-1)[..., None, None]
        y = x + f @ x
        carried = [v + f @ v for v in vs]
    else:
        s = x.mH @ u
        normal = u - x @ s
        m = skew(s) / 2 - normal.mH @ normal / 4
        h = torch.linalg.inv_ex(_eye(m) - m)[0]
        active = (m != 0).any(-1).any(-1)[..., None, None]
        t = 2 * x + normal
        y = t @ h - x
        carried = [v - 2 * (x @ (x.mH @ v)) + t @ (h @ (x.mH @ v - normal.mH @ v / 2)) for v in vs]
    for _ in range(polish):
        y = y + y @ ((_eye(y) - y.mH @ y) * (active / 2))
    return (y, *carried)


def newton_schulz(x: Tensor, steps: int = 1) -> Tensor:
    """``steps`` times ``X ← X(3I − XᴴX)/2``."""
    for _ in range(steps):
        x = x + x @ (_eye(x) - x.mH @ x) / 2
    return x


class _Lyapunov(torch.autograd.Function):
    """X with AX + XA = C for Hermitian A; its derivatives are Lyapunov equations again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(a)
        sums = values[..., :, None] + values[..., None, :]
        return vectors @ ((vectors.mH @ c @ vectors) / sums) @ vectors.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, x = ctx.saved_tensors
        dc = lyapunov(a, grad)
        return -(dc @ x.mH + x.mH @ dc), dc

    @staticmethod
    def jvp(ctx: Any, da: Tensor, dc: Tensor) -> Tensor:  # type: ignore[override]
        a, x = ctx.saved_tensors
        return lyapunov(a, dc - da @ x - x @ da)


def lyapunov(a: Tensor, c: Tensor) -> Tensor:
    """``X`` with ``AX + XA = C`` for Hermitian ``A``: (*B, n, n), (*B, n, n) -> (*B, n, n)."""
    a, c = torch.broadcast_tensors(a, c)
    return _Lyapunov.apply(a, c)  # type: ignore[no-any-return]


class _Polar(torch.autograd.Function):
    """Unitary polar factor of X, by SVD."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def _derivative(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        p = herm(y.mH @ x)
        s = y.mH @ z
        turn = lyapunov(p, s - s.mH)
        normal = torch.linalg.solve_ex(p, z - y @ s, left=False)[0]
        return y @ turn + normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _Polar._derivative(*ctx.saved_tensors, grad)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return _Polar._derivative(*ctx.saved_tensors, dx)


def polar(x: Tensor) -> Tensor:
    """Unitary polar factor ``Y = X(XᴴX)^-½``: the nearest matrix with orthonormal columns."""
    return _Polar.apply(x)  # type: ignore[no-any-return]


def polar_newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Unitary polar factor by ``steps`` Newton-Schulz steps from X/‖X‖: GEMMs only."""
    return newton_schulz(x / torch.linalg.matrix_norm(x, keepdim=True), steps)


def qr_positive(x: Tensor) -> tuple[Tensor, Tensor]:
    """Thin QR factors ``X = QR`` with ``diag(R) > 0``."""
    q, r = torch.linalg.qr(x)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1).real < 0, -1, 1).to(r.dtype)
    return q * sign[..., None, :], r * sign[..., :, None]


def expm_skew(a: Tensor) -> Tensor:
    """Exponential of a skew-Hermitian matrix, re-orthonormalised."""
    return newton_schulz(torch.linalg.matrix_exp(a))


def log_unitary(q: Tensor) -> Tensor:
    """Principal logarithm of a unitary matrix, skew-Hermitian."""
    halvings = 4
    for _ in range(halvings):
        q = polar(_eye(q) + q)
    s = skew(torch.linalg.solve_ex(_eye(q) + q, q - _eye(q))[0])
    square = s @ s
    series = _eye(s) / 19
    for k in range(17, 0, -2):
        series = _eye(s) / k + square @ series
    return 2 ** (halvings + 1) * skew(s @ series)


def keep_zero_steps(x: Tensor, u: Tensor, y: Tensor, event_dim: int) -> Tensor:
    """``y``, but ``x`` bit for bit where ``u`` is exactly zero; the derivatives of ``y`` are kept."""
    moved = (u != 0).flatten(u.dim() - event_dim).any(-1) if event_dim else u != 0
    moved = moved.reshape(moved.shape + (1,) * event_dim)
    return torch.where(moved, y, x.detach() - (y.detach() - y))
