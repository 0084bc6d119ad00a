"""How much of the unitary group a parametrization reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from manopt_torch.manifolds import Unitary

M = TypeVar("M", bound=nn.Module)

#: singular values of the Jacobian below this share of the largest count as zero; rounding leaves about 1e-15
RANK_TOLERANCE = 1e-9
#: largest ‖WᴴW − I‖ of a value that counts as unitary, in float64
UNITARY_TOLERANCE = 1e-8


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What :func:`capacity` finds.

    * ``num_params``: P, the number of real parameters.
    * ``dim``: the dimension of the group, N² of U(N), or N(N − 1)/2 of O(N) if the matrices are real.
    * ``restricted``: whether P < dim, so that the parametrization cannot be onto: its image has measure zero (Wisdom et
      al., 2016, theorem 3.2, from Sard's theorem).
    * ``rank``: the largest rank of the Jacobian found, the dimension of the image. ``rank < dim`` shows restricted
      capacity where the count of parameters does not, because some of them are redundant.
    """

    num_params: int
    dim: int
    restricted: bool
    rank: int


def capacity(
    f: Callable[[Tensor], Tensor],
    num_params: int,
    N: int,
    *,
    points: int = 3,
    generator: torch.Generator | None = None,
) -> Capacity:
    """Number of parameters, dimension of the group and numerical rank of a smooth f: Rᴾ → U(N), or O(N).

    The rank is that of the real Jacobian of (Re f, Im f), (2N², P), in float64, at ``points`` random points with
    standard normal coordinates, of which the largest counts: f real-analytic has that rank almost everywhere. Takes N²
    reverse derivatives for each point.

    Args:
        f: takes a float64 tensor (P,), returns a float64 or complex128 tensor (N, N), unitary and differentiable; see
            :func:`parametrization` for modules.
        num_params: P.
        N: size of the matrices.
        points: where the Jacobian is evaluated.
        generator: draws the points.

    Raises:
        ValueError: for a number below 1; or if a value of f has another shape or dtype, is not unitary, or has no
            derivative.
    """
    for name, number in (("num_params", num_params), ("N", N), ("points", points)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    ranks = []
    for _ in range(points):
        theta = torch.randn(num_params, dtype=torch.float64, generator=generator).requires_grad_()
        with torch.enable_grad():
            W = f(theta)
            _check(W, N)
            ranks.append(_rank(W, theta))
    dim = Unitary().dim(N, N, dtype=W.dtype)
    return Capacity(num_params, dim, num_params < dim, max(ranks))


def parametrization(module: M, matrix: Callable[[M], Tensor]) -> tuple[Callable[[Tensor], Tensor], int]:
    """``(f, num_params)`` for :func:`capacity`, of the matrix that ``matrix(module)`` computes from a module.

    f takes all parameters of the module as one vector, of complex ones the real parts and then the imaginary parts::

        unitary = RestrictedUnitary(8, dtype=torch.complex128)
        capacity(*parametrization(unitary, RestrictedUnitary.matrix), 8)
    """
    caller = _Caller(module, matrix)
    parameters = dict(caller.named_parameters())
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters.values()]

    def f(theta: Tensor) -> Tensor:
        values = {}
        for (name, p), part in zip(parameters.items(), theta.split(sizes), strict=True):
            values[name] = torch.complex(*part.reshape(2, *p.shape)) if p.is_complex() else part.reshape(p.shape)
        return torch.func.functional_call(caller, values, ())

    return f, sum(sizes)


class _Caller(nn.Module, Generic[M]):
    """Calls ``function(module)``; ``functional_call`` knows ``forward`` only."""

    def __init__(self, module: M, function: Callable[[M], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.module)


def _check(W: Tensor, N: int) -> None:
    if not isinstance(W, Tensor) or W.shape != (N, N):
        came = tuple(W.shape) if isinstance(W, Tensor) else type(W).__name__
        raise ValueError(f"f must return an {N} x {N} matrix, got {came}")
    if W.dtype not in (torch.float64, torch.complex128):
        raise ValueError(
            f"f must return float64 or complex128, got {W.dtype}: the rank of a Jacobian needs double precision"
        )
    residual = torch.linalg.matrix_norm(W.detach().mH @ W.detach() - torch.eye(N, dtype=W.dtype)).item()
    if not residual <= UNITARY_TOLERANCE:
        raise ValueError(f"f must return unitary matrices, got one with ‖WᴴW − I‖ = {residual:.1e}")
    if not W.requires_grad:
        raise ValueError("f must be differentiable by torch: its value does not depend on its argument")


def _rank(W: Tensor, theta: Tensor) -> int:
    """Rank of dW/dθ, from the coordinates of WᴴdW, which is skew-Hermitian: what is on and below its diagonal."""
    local = W.detach().mH @ W
    parts = torch.stack([local.real, local.imag]) if W.is_complex() else local
    rows = parts.tril().flatten()[parts.detach().new_ones(parts.shape).tril().flatten() > 0]
    jacobian = [torch.autograd.grad(row, theta, retain_graph=True)[0] for row in rows]
    return int(torch.linalg.matrix_rank(torch.stack(jacobian), rtol=RANK_TOLERANCE))
