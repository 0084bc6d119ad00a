"""Means, distances and geodesics on any manifold that has ``exp`` and ``log``.

The points of a sample stand in the first dimension: (K, *B, *S), K points in each of the batches ``*B``. Half precision
is computed in float32, and there is no autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manopt_torch.manifolds import SPD, Euclidean, Manifold
from manopt_torch.precision import WIDER

__all__ = ["frechet_mean", "geodesic", "pairwise_dist"]

#: bounds of sectional curvatures. That of positive definite matrices with the metric Re tr(X⁻¹U X⁻¹V) is −‖[U, V]‖²/4
#: for orthonormal U and V at I, and ‖[U, V]‖² ≤ 2 (Böttcher, Wenzel 2008); that of the unit sphere is 1
CURVATURE: dict[type[Manifold], tuple[float, float]] = {SPD: (-0.5, 0.0), Euclidean: (0.0, 0.0)}
OTHER = (-0.5, 1.0)
#: default of ``tol``, in units of the machine epsilon
TOLERANCE = 20.0
#: least second derivative of the cost that is reckoned with; it falls to 0 where curvature 1 meets a distance of π/2
LEAST = 0.1


def frechet_mean(
    manifold: Manifold,
    points: Tensor,
    weights: Tensor | None = None,
    *,
    start: Tensor | None = None,
    tol: float | None = None,
    max_iter: int = 200,
) -> Tensor:
    """The Fréchet (Karcher) mean ``argmin_x Σ wᵢ d(x, pᵢ)²``: (K, *B, *S) -> (*B, *S).

    By the Riemannian gradient iteration, from ``start`` on::

        x ← exp_x(t g),   g = Σ wᵢ log_x(pᵢ),   t = 2/(l + L)
        L = Σ wᵢ rᵢ coth rᵢ,   rᵢ = √½ d(x, pᵢ)

    L bounds the second derivative of the cost along geodesics from above where sectional curvatures are at least −½,
    and l, which is 1 on ``SPD`` and ``Euclidean``, does so from below (Karcher 1977; Afsari, Tron, Vidal 2013, "On the
    convergence of gradient descent for finding the Riemannian center of mass"). Near the mean the error falls by
    ρ = (L − l)/(L + l) in each iteration, without a line search; on ``SPD`` there is one mean, and it is found from
    everywhere. Elsewhere curvature up to 1 is reckoned with, l = Σ wᵢ dᵢ cot dᵢ, dᵢ = d(x, pᵢ), and the points should
    lie within a ball of radius π/4 (Afsari 2011; on the sphere the mean is unique in one of π/2).

    **Derivatives.** Autograd goes through the iteration, with t held fixed, and derivatives, first and second, converge
    at the rate of the point (Gilbert 1992, "Automatic differentiation and iterative processes"). When they are asked
    for, the iteration goes on until the product of all ρ is below ``tol`` too: they are then exact to the order of
    ``tol``, whatever the start was. When ``max_iter`` ends it they are those of the point that is returned.

    Args:
        manifold: one with ``exp`` and ``log``.
        points: (K, *B, *S).
        weights: (K,) or (K, *B), real, at least 0; they are divided by their sum. None: all alike.
        start: where the iteration starts, (*B, *S), not differentiated; the first point unless given.
        tol: what ``‖g‖`` in units of 1 + Σ wᵢ dᵢ is to be; 20 machine epsilons unless given. The iteration ends when
            all batches are there; under ``torch.compile``, which cannot look, after ``max_iter``.
        max_iter: at most so many.

    Raises:
        ValueError: no points, or shapes that do not fit, or ``max_iter`` below 1.
        NotImplementedError: the manifold has no ``exp`` or ``log``.
    """
    batch = points.ndim - manifold.event_dim
    if batch < 1 or points.shape[0] == 0:
        raise ValueError(
            f"points of {manifold!r} must have shape (K, *B, *S), K >= 1, with {manifold.event_dim} dimension(s) in S; "
            f"got {tuple(points.shape)}"
        )
    manifold.check_shape(tuple(points.shape))
    if max_iter < 1:
        raise ValueError(f"max_iter must be at least 1, got {max_iter}")
    start = points[0] if start is None else start
    if start.shape != points.shape[1:]:
        raise ValueError(f"start must have the shape {tuple(points.shape[1:])} of the mean, got {tuple(start.shape)}")
    wide = WIDER.get(points.dtype, points.dtype)
    points, dtype = points.to(wide), points.dtype
    weights = torch.ones(points.shape[0], device=points.device) if weights is None else weights
    if weights.is_complex() or weights.shape not in (points.shape[:1], points.shape[:batch]):
        raise ValueError(
            f"weights must be real and of shape {tuple(points.shape[:1])} or {tuple(points.shape[:batch])}, got "
            f"{weights.dtype} of shape {tuple(weights.shape)}"
        )
    weights = weights.to(wide.to_real() if wide.is_complex else wide)
    weights = (
        (weights / weights.sum(0)).reshape(weights.shape + (1,) * (batch - weights.ndim)).expand(points.shape[:batch])
    )
    tol = TOLERANCE * torch.finfo(wide).eps if tol is None else tol
    with torch.autocast(points.device.type, enabled=False):
        return _iterate(manifold, points, weights, start.to(wide), tol, max_iter).to(dtype)


def _iterate(manifold: Manifold, points: Tensor, weights: Tensor, start: Tensor, tol: float, max_iter: int) -> Tensor:
    differentiated = torch.is_grad_enabled() and (points.requires_grad or weights.requires_grad)
    x = start.detach()
    rate = torch.ones_like(weights[0])  # product of all ρ: how much of the derivative's error is left
    for _ in range(max_iter):
        at = x.expand_as(points)
        logs = manifold.log(at, points)
        g = manifold.scale(weights, logs).sum(0)
        with torch.no_grad():
            distances = manifold.norm(at, logs)
            low, high = ((weights * bound).sum(0) for bound in _second_derivatives(manifold, distances))
            done = manifold.norm(x, g) <= tol * (1 + (weights * distances).sum(0))
            done = done & (rate <= tol) if differentiated else done
            step = 2 / (low + high)
            rate = rate * (high - low) / (high + low)
        if not torch.compiler.is_compiling() and bool(done.all()):
            break
        x = manifold.exp(x, manifold.scale(step, g))
    return x


def _second_derivatives(manifold: Manifold, d: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the second derivative of ``d²/2`` along geodesics of unit speed, where the distance is ``d``."""
    below, above = CURVATURE.get(type(manifold), OTHER)
    near, far = d * above**0.5, d * (-below) ** 0.5
    tiny = 1e-4  # where the next term of the series is below rounding, also in double
    low = torch.where(near < tiny, 1, near / torch.tan(near.clamp(tiny, 1.5))).clamp(LEAST, 1)
    return low, torch.where(far < tiny, 1, far / torch.tanh(far.clamp(min=tiny)))


def pairwise_dist(manifold: Manifold, x: Tensor, y: Tensor) -> Tensor:
    """Distances of all points of ``x`` from all of ``y``: (K, *B, *S), (J, *B, *S) -> (K, J, *B), real.

    Derivatives are those of ``manifold.dist``, exact, and zero where two points are one.

    Raises:
        ValueError: fewer dimensions than (K, *S).
    """
    for name, points in (("x", x), ("y", y)):
        if points.ndim <= manifold.event_dim:
            raise ValueError(
                f"{name} must be a sample of points of {manifold!r}, (K, *B, *S), got shape {tuple(points.shape)}"
            )
    shape = (x.shape[0], y.shape[0], *torch.broadcast_shapes(x.shape[1:], y.shape[1:]))
    return manifold.dist(x[:, None].expand(shape), y[None].expand(shape))


def geodesic(manifold: Manifold, x: Tensor, y: Tensor, t: float | Tensor) -> Tensor:
    """The point ``exp_x(t log_x(y))`` on the shortest geodesic, x at t = 0 and y at t = 1: (*B, *S) -> (*B, *S).

    ``t`` is a number, or real and of shape (*B,); values outside [0, 1] go on beyond the ends. Derivatives in x, y and
    t are exact. On ``SPD`` and t = ½ it is the geometric mean of two matrices.
    """
    u = manifold.log(x, y)
    return manifold.exp(x, t * u if not isinstance(t, Tensor) or t.ndim == 0 else manifold.scale(t, u))
