"""Unitary matrices as products of cheap factors, applied to vectors without ever being formed."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn

from manopt_torch.nn.complex import ComplexModule
from manopt_torch.nn.factors import (
    Product,
    phases,
    random_permutation,
    restricted,
    restricted_adjoint,
    restricted_bound,
    restricted_gradients,
    scale,
    unit,
)
from manopt_torch.nn.init import glorot_uniform_, uniform_


class UnitaryMap(ComplexModule, abc.ABC):
    """A unitary matrix W (N, N), or independent ones (*P, N, N), given by its action on vectors.

    ``map(h)`` is W h and ``map.adjoint(g)`` is Wᴴ g, for the vectors in the last dimension of ``h``: (..., N), or
    (..., *P, B, N) with ``batch_shape`` P, whose b-th rows all meet the p-th matrix. ``map.matrix()`` is W.

    A subclass writes :meth:`factors`, what both products are computed from, as tensors that depend differentiably on
    its parameters; and the products themselves as static functions of these, linear in the vectors. A recurrence
    computes the factors once, and then multiplies many times.

    Args:
        size: N.
        batch_shape: P.
        dtype: of the vectors.

    Raises:
        ValueError: for a size below 1, a dtype that is not floating point, or vectors of a wrong shape.
        TypeError: for vectors of another dtype.
    """

    def __init__(self, size: int, batch_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size of {type(self).__name__} must be at least 1, got {size}")
        if not (dtype.is_complex or dtype.is_floating_point):
            raise ValueError(f"dtype of {type(self).__name__} must be complex or real floating point, got {dtype}")
        self.size = size
        self.batch_shape = tuple(batch_shape)

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Draw all parameters anew."""

    @abc.abstractmethod
    def factors(self) -> tuple[Tensor, ...]:
        """What the products need: tensors, the first of them in the dtype of the vectors."""

    @staticmethod
    @abc.abstractmethod
    def product(h: Tensor, *factors: Tensor) -> Tensor:
        """W h, for ``h`` (..., *P, B, N) and the tensors of :meth:`factors`."""

    @staticmethod
    @abc.abstractmethod
    def adjoint_product(g: Tensor, *factors: Tensor) -> Tensor:
        """Wᴴ g, for ``g`` (..., *P, B, N) and the tensors of :meth:`factors`."""

    @classmethod
    def bind(cls, *factors: Tensor) -> tuple[Product, Product]:
        """h ↦ W h and g ↦ Wᴴ g with given factors, for loops without derivatives; a subclass may know faster ones."""
        return lambda h: cls.product(h, *factors), lambda g: cls.adjoint_product(g, *factors)

    @classmethod
    def factor_gradients(
        cls, h: Tensor, Wh: Tensor, g: Tensor, Wg: Tensor, *factors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients by the factors of Re⟨g, W h⟩, summed over all rows; ``Wh`` and ``Wg`` are W h and Wᴴ g.

        By automatic differentiation of :meth:`product`, unless a subclass knows better.
        """
        own = [f.detach() for f in factors]
        wanted = [f.requires_grad_() for f in own if f.is_floating_point() or f.is_complex()]
        with torch.enable_grad():
            product = cls.product(h, *own)
        found = iter(torch.autograd.grad(product, wanted, g, materialize_grads=True))
        return tuple(next(found) if f.requires_grad else None for f in own)

    def forward(self, h: Tensor) -> Tensor:
        """W h: (..., *P, B, N) to the same."""
        factors = self.factors()
        self._check("h", h, factors[0].dtype)
        return self.product(h, *factors)

    def adjoint(self, g: Tensor) -> Tensor:
        """Wᴴ g, which is W⁻¹ g: (..., *P, B, N) to the same."""
        factors = self.factors()
        self._check("g", g, factors[0].dtype)
        return self.adjoint_product(g, *factors)

    def matrix(self) -> Tensor:
        """W itself, (*P, N, N), differentiable."""
        factors = self.factors()
        rows = torch.eye(self.size, dtype=factors[0].dtype, device=factors[0].device)
        return self.product(rows.expand(*self.batch_shape, -1, -1), *factors).mT

    def _check(self, name: str, vectors: Tensor, dtype: torch.dtype) -> None:
        P, N = self.batch_shape, self.size
        ends = (*P, vectors.shape[-2], N) if P and vectors.dim() > 1 else (*P, N)
        if tuple(vectors.shape[-len(ends) :]) != ends:
            wanted = ", ".join(["...", *map(str, P), *(["B"] if P else []), str(N)])
            raise ValueError(f"{name} must have shape ({wanted}), got {tuple(vectors.shape)}")
        if vectors.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, as the parameters are, got {vectors.dtype}: convert either")

    def extra_repr(self) -> str:
        return f"{self.size}, batch_shape={self.batch_shape}" if self.batch_shape else f"{self.size}"


class RestrictedUnitary(UnitaryMap):
    """W = D3 R2 F⁻¹ D2 P R1 F D1 (Arjovsky, Shah and Bengio, 2016, eq. 6), applied in O(N log N).

    ::

        D_k = diag(e^{iθ_k}),   R_k = I − 2 v_k v_kᴴ / v_kᴴv_k,   F the unitary Fourier transform,   (P h)_i = h_perm(i)

    7N real parameters. The matrices they reach have dimension min(N², 7N − 7): all of U(N) up to N = 5, a set of
    measure zero in it from N = 6 on (the rank of the Jacobian; Wisdom et al., 2016, theorem 3.2, shows it from N = 8
    on). A reflection with v = 0 is the identity, and its v has no gradient.

    Parameters: ``theta`` (*P, 3, N) real; ``reflection`` (*P, 2, N) complex. Buffer: ``permutation`` (*P, N), drawn at
    random, then fixed.

    Initial values: θ uniform on (−π, π); v Glorot uniform, ±√(6 / (2 + 2N)) (Wisdom et al., 2016, released code).

    Args:
        size: N.
        batch_shape: P, see :class:`UnitaryMap`.
        dtype: a complex dtype.
        device: of parameters and buffer.

    Raises:
        ValueError: for a size below 1, a dtype that is not complex, or vectors of a wrong shape.
        TypeError: for vectors of another dtype.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(size, batch_shape, dtype)
        if not dtype.is_complex:
            raise ValueError(
                f"RestrictedUnitary is complex, as the Fourier transform is, got {dtype}: write torch.complex64 or "
                "complex128, or take HouseholderUnitary or GivensUnitary"
            )
        P = self.batch_shape
        self.theta = nn.Parameter(torch.empty(*P, 3, size, dtype=dtype.to_real(), device=device))
        self.reflection = nn.Parameter(torch.empty(*P, 2, size, dtype=dtype, device=device))
        self.register_buffer("permutation", torch.empty(*P, size, dtype=torch.int64, device=device))
        self.permutation: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters, and the permutation, anew."""
        uniform_(self.theta, math.pi)
        glorot_uniform_(self.reflection, 2, 2 * self.size)
        self.permutation.copy_(random_permutation(*self.permutation.shape, device=self.permutation.device))

    def factors(self) -> tuple[Tensor, ...]:
        d, u = phases(self.theta), unit(self.reflection)
        return d, u, self.permutation, self.permutation.argsort(-1)

    @staticmethod
    def product(h: Tensor, *f: Tensor) -> Tensor:
        d, u, permutation, _ = f
        return restricted(h, d, u, permutation)

    @staticmethod
    def adjoint_product(g: Tensor, *f: Tensor) -> Tensor:
        d, u, _, inverse = f
        return restricted_adjoint(g, d, u, inverse)

    @classmethod
    def bind(cls, *f: Tensor) -> tuple[Product, Product]:
        return restricted_bound(*f)

    @classmethod
    def factor_gradients(cls, h: Tensor, Wh: Tensor, g: Tensor, Wg: Tensor, *f: Tensor) -> tuple[Tensor | None, ...]:
        return *restricted_gradients(h, Wh, g, Wg, *f[:2]), None, None


class HouseholderUnitary(UnitaryMap):
    """W = D H_1 H_2 ⋯ H_K: reflections H_k = I − 2 v_k v_kᴴ / v_kᴴv_k, and a diagonal D of phases.

    The reflections are applied together, as I − V T Vᴴ with T⁻¹ = I/2 + the strict upper triangle of VᴴV for unit
    columns V (Joffrain et al., 2006), in O(NK). A v_k = 0 leaves H_k out, and has no gradient.

    Complex: 2NK + N real parameters. The matrices reached have dimension N² − max((N − K)² − N + 1, 0) for K ≥ 1 (the
    rank of the Jacobian): a part of positive measure of U(N) from K = N − √(N − 1) on, all of it at K = N − 1 by the QR
    decomposition. Real: NK parameters and D = I; the dimension is K(N − K) + K(K − 1)/2 for K < N, at K = N − 1 that of
    O(N), in the component det W = (−1)^K.

    Parameters: ``reflection`` (*P, K, N), ``theta`` (*P, N) the angles of D, absent in the real case.

    Initial values: θ uniform on (−π, π); v Glorot uniform, of fans K and N (2N if complex).

    Args:
        size: N.
        num_factors: K.
        batch_shape: P, see :class:`UnitaryMap`.
        dtype: complex, or real for an orthogonal W.
        device: of all parameters.

    Raises:
        ValueError: for a size below 1, a negative number of factors, a dtype that is not floating point, or vectors of
            a wrong shape.
        TypeError: for vectors of another dtype.
    """

    def __init__(
        self,
        size: int,
        num_factors: int,
        *,
        batch_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(size, batch_shape, dtype)
        if num_factors < 0:
            raise ValueError(f"num_factors must be at least 0, got {num_factors}")
        P = self.batch_shape
        self.num_factors = num_factors
        self.reflection = nn.Parameter(torch.empty(*P, num_factors, size, dtype=dtype, device=device))
        self.theta = _angles(dtype, device, *P, size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        glorot_uniform_(self.reflection, self.num_factors, self.size * (2 if self.reflection.is_complex() else 1))
        if self.theta is not None:
            uniform_(self.theta, math.pi)

    def factors(self) -> tuple[Tensor, ...]:
        u = unit(self.reflection)  # rows, Vᵀ
        gram = u @ u.mH
        s = gram.tril(-1) + torch.eye(self.num_factors, dtype=u.dtype, device=u.device) / 2  # T⁻ᵀ
        right = torch.linalg.solve_triangular(s, u, upper=False)
        adjoint = torch.linalg.solve_triangular(s.mH, u, upper=True)
        d = (
            torch.ones(*self.batch_shape, self.size, dtype=u.dtype, device=u.device)
            if self.theta is None
            else phases(self.theta)
        )
        return d, u.mH, right, adjoint

    @staticmethod
    def product(h: Tensor, *f: Tensor) -> Tensor:
        d, left, right, _ = f
        return scale(h - (h @ left) @ right, d)

    @staticmethod
    def adjoint_product(g: Tensor, *f: Tensor) -> Tensor:
        d, left, _, right = f
        g = scale(g, d.conj_physical())
        return g - (g @ left) @ right

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_factors={self.num_factors}"


class GivensUnitary(UnitaryMap):
    """W = D G_L ⋯ G_2 G_1: layers of Givens rotations of neighbours, and a diagonal D of phases, in O(NL).

    ::

        G_l rotates the pairs (0, 1), (2, 3), … for odd l, and (1, 2), (3, 4), … for even l, each pair by
        [[e^{iφ} cos θ, −sin θ], [e^{iφ} sin θ, cos θ]]

    the tunable layers of Jing et al. (2017), "Tunable efficient unitary neural networks (EUNN)", with the phases where
    Clements et al. (2016), "Optimal design for universal multiport interferometers", have them. With R rotations,
    R = ⌈L/2⌉⌊N/2⌋ + ⌊L/2⌋⌊(N − 1)/2⌋: complex, 2R + N real parameters; none of them is redundant up to L = N, where
    R = N(N − 1)/2, their number is N², the dimension of U(N), and every unitary matrix is reached (Clements et al.).
    Real: φ = 0 and D = I, R parameters, and the rotations SO(N) at L = N.

    Parameters: ``theta`` (*P, R); ``phi`` (*P, R) and ``phase`` (*P, N), the angles of D, absent in the real case.

    Initial values: all angles uniform on (−π, π).

    Args:
        size: N.
        num_layers: L.
        batch_shape: P, see :class:`UnitaryMap`.
        dtype: complex, or real for an orthogonal W.
        device: of all parameters.

    Raises:
        ValueError: for a size below 1, a negative number of layers, a dtype that is not floating point, or vectors of a
            wrong shape.
        TypeError: for vectors of another dtype.
    """

    def __init__(
        self,
        size: int,
        num_layers: int,
        *,
        batch_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.complex64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(size, batch_shape, dtype)
        if num_layers < 0:
            raise ValueError(f"num_layers must be at least 0, got {num_layers}")
        P = self.batch_shape
        self.num_layers = num_layers
        R = (num_layers + 1) // 2 * (size // 2) + num_layers // 2 * ((size - 1) // 2)
        self.theta = nn.Parameter(torch.empty(*P, R, dtype=dtype.to_real(), device=device))
        self.phi = _angles(dtype, device, *P, R)
        self.phase = _angles(dtype, device, *P, size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for angles in self.parameters():
            uniform_(angles, math.pi)

    def factors(self) -> tuple[Tensor, ...]:
        N, L, P = self.size, self.num_layers, self.batch_shape
        index = torch.arange(L * N, device=self.theta.device).reshape(L, N)
        top = torch.cat([layer[k % 2 : N - 1 : 2] for k, layer in enumerate(index)]) if L else index.flatten()
        cos, sin = self.theta.cos(), self.theta.sin()
        turned_cos, turned_sin, minus_sin = cos, sin, -sin
        d = torch.ones(*P, N, dtype=cos.dtype, device=cos.device)
        if self.phi is not None and self.phase is not None:
            turn, d = phases(self.phi), phases(self.phase)
            turned_cos, turned_sin = turn * cos, turn * sin
            cos, minus_sin = cos.to(turn.dtype), minus_sin.to(turn.dtype)
        ones = torch.ones(*P, L * N, dtype=d.dtype, device=d.device)
        stay = ones.index_copy(-1, top, turned_cos).index_copy(-1, top + 1, cos)
        cross = torch.zeros_like(ones).index_copy(-1, top, minus_sin).index_copy(-1, top + 1, turned_sin)
        swap = torch.arange(N, device=d.device).repeat(2, 1)
        for offset, row in enumerate(swap):
            end = N - (N - offset) % 2
            row[offset:end] = row[offset:end].reshape(-1, 2).flip(-1).flatten()
        return d, stay.unflatten(-1, (L, N)), cross.unflatten(-1, (L, N)), swap

    @staticmethod
    def product(h: Tensor, *f: Tensor) -> Tensor:
        d, stay, cross, swap = f
        for k in range(stay.shape[-2]):
            h = scale(h, stay[..., k, :]) + scale(_exchange(h, swap[k % 2]), cross[..., k, :])
        return scale(h, d)

    @staticmethod
    def adjoint_product(g: Tensor, *f: Tensor) -> Tensor:
        d, stay, cross, swap = f
        g = scale(g, d.conj_physical())
        stay, cross = stay.conj_physical(), cross.conj_physical()
        for k in reversed(range(stay.shape[-2])):
            g = scale(g, stay[..., k, :]) + _exchange(scale(g, cross[..., k, :]), swap[k % 2])
        return g

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_layers={self.num_layers}"


def _angles(dtype: torch.dtype, device: Any, *shape: int) -> nn.Parameter | None:
    """Room for angles of phases, which only a complex matrix has."""
    return nn.Parameter(torch.empty(shape, dtype=dtype.to_real(), device=device)) if dtype.is_complex else None


def _exchange(h: Tensor, swap: Tensor) -> Tensor:
    """Entries of every pair exchanged, in every row."""
    return h.gather(-1, swap.expand(h.shape))
