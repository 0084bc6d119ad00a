"""Capacity: parametrizations of known dimension, the formulas that the maps' docstrings give, refusals."""

import pytest
import torch
from torch import Tensor

from manopt_torch.nn.capacity import Capacity, capacity, parametrization
from manopt_torch.nn.unitary_maps import GivensUnitary, HouseholderUnitary, RestrictedUnitary, UnitaryMap

both = pytest.mark.parametrize("dtype", [torch.complex128, torch.float64])


def skew(theta: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    """All skew-Hermitian (N² parameters), or skew-symmetric (N(N − 1)/2), matrices."""
    i, j = torch.tril_indices(N, N, -1)
    lower = torch.zeros(N, N, dtype=dtype)
    if not dtype.is_complex:
        lower[i, j] = theta
        return lower - lower.mH
    re, im, diagonal = theta.split([len(i), len(i), N])
    lower[i, j] = torch.complex(re, im)
    return lower - lower.mH + torch.diag(1j * diagonal)


@both
@pytest.mark.parametrize("N", [2, 3, 6])
@pytest.mark.parametrize("form", ["cayley", "exponential"])
def test_full_parametrizations_fill_the_group(form, N, dtype):
    def f(theta: Tensor) -> Tensor:
        A, eye = skew(theta, N, dtype), torch.eye(N, dtype=dtype)
        return torch.linalg.solve(eye + A, eye - A) if form == "cayley" else torch.linalg.matrix_exp(A)

    dim = N * N if dtype.is_complex else N * (N - 1) // 2
    assert capacity(f, dim, N) == Capacity(num_params=dim, dim=dim, restricted=False, rank=dim)


def test_one_parameter_fewer_is_restricted():
    def f(theta: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(skew(torch.cat([theta, theta.new_zeros(1)]), 3, torch.complex128))

    assert capacity(f, 8, 3) == Capacity(num_params=8, dim=9, restricted=True, rank=8)


def test_redundant_parameters_are_seen_in_the_rank_alone():
    def f(theta: Tensor) -> Tensor:
        return torch.diag(torch.exp(1j * theta[:2] + 1j * theta[2:]))

    assert capacity(f, 4, 2) == Capacity(num_params=4, dim=4, restricted=False, rank=2)


def test_largest_rank_counts():
    """θ² for θ > 0 and 0 elsewhere, smooth enough: the rank is 1 on one half of the line, 0 on the other."""

    def f(theta: Tensor) -> Tensor:
        return torch.exp(1j * torch.relu(theta) ** 2).reshape(1, 1)

    found = {capacity(f, 1, 1, points=1, generator=torch.Generator().manual_seed(seed)).rank for seed in range(10)}
    assert found == {0, 1}
    assert capacity(f, 1, 1, points=20).rank == 1


@pytest.mark.parametrize("N", range(2, 13))
def test_restricted_form(N):
    """min(N², 7N − 7): two global phases, scale and phase of two vectors, one common rotation of them are redundant."""
    unitary = RestrictedUnitary(N, dtype=torch.complex128)
    expected = Capacity(7 * N, N * N, restricted=N > 7, rank=min(N * N, 7 * N - 7))
    assert capacity(*parametrization(unitary, UnitaryMap.matrix), N, points=2) == expected


@pytest.mark.parametrize("N", [2, 3, 5, 8])
def test_householder_products(N):
    """K reflections reach the unitary W with rank(W − I) ≤ K and det W = (−1)^K; N phases come on top."""
    for K in range(1, N + 1):
        unitary = HouseholderUnitary(N, K, dtype=torch.complex128)
        rank = min(N * N, 2 * K * N - K * K - 1 + N)
        expected = Capacity(2 * K * N + N, N * N, restricted=2 * K * N + N < N * N, rank=rank)
        assert capacity(*parametrization(unitary, UnitaryMap.matrix), N, points=2) == expected
        real = HouseholderUnitary(N, K, dtype=torch.float64)
        dim = N * (N - 1) // 2
        rank = K * (N - K) + K * (K - 1) // 2 if K < N else dim
        expected = Capacity(K * N, dim, restricted=dim > K * N, rank=rank)
        assert capacity(*parametrization(real, UnitaryMap.matrix), N, points=2) == expected


@both
@pytest.mark.parametrize("N", [2, 3, 6, 7])
def test_givens_layers(N, dtype):
    """No parameter is redundant up to N layers, which fill the group."""
    dim = N * N if dtype.is_complex else N * (N - 1) // 2
    for L in range(1, N + 2):
        f, num_params = parametrization(GivensUnitary(N, L, dtype=dtype), UnitaryMap.matrix)
        found = capacity(f, num_params, N, points=2)
        assert found == Capacity(num_params, dim, restricted=num_params < dim, rank=min(num_params, dim))
        assert (found.rank < dim) == (N > 2 and L < N)


def test_flat_takes_all_parameters_of_any_module():
    layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(3, 3, bias=False, dtype=torch.float64))
    f, num_params = parametrization(layer, lambda layer: layer.weight)
    assert num_params == 9
    assert capacity(f, num_params, 3).rank == 3
    unitary = HouseholderUnitary(3, 2, dtype=torch.complex128)
    f, num_params = parametrization(unitary, UnitaryMap.matrix)
    v, theta = unitary.reflection.detach(), unitary.theta.detach()
    values = {"reflection": torch.cat([v.real.flatten(), v.imag.flatten()]), "theta": theta}
    W = f(torch.cat([values[name] for name, _ in unitary.named_parameters()]))
    torch.testing.assert_close(W, unitary.matrix().detach(), rtol=0, atol=1e-14)
    assert all(p.grad is None for p in unitary.parameters())


def test_works_where_gradients_are_off():
    with torch.no_grad():
        assert capacity(*parametrization(GivensUnitary(3, 3, dtype=torch.complex128), UnitaryMap.matrix), 3).rank == 9


def rotation(theta: Tensor) -> Tensor:
    c, s = theta.cos(), theta.sin()
    return torch.cat([c, -s, s, c]).reshape(2, 2)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda theta: rotation(theta)[0], r"3 x 3 matrix, got \(2,\)"),
        (lambda theta: rotation(theta), r"3 x 3 matrix, got \(2, 2\)"),
        (lambda theta: 1.0, "3 x 3 matrix, got float"),
        (lambda theta: torch.eye(3), r"float64 or complex128, got torch\.float32"),
        (lambda theta: torch.eye(3, dtype=torch.float64), "does not depend on its argument"),
        (lambda theta: theta * torch.eye(3, dtype=torch.float64), r"unitary matrices, got one with ‖WᴴW − I‖ = \d"),
        (lambda theta: theta / 0 * torch.eye(3, dtype=torch.float64), "unitary matrices, got one with .* = nan"),
    ],
)
def test_refusals_of_values(f, message):
    with pytest.raises(ValueError, match=message):
        capacity(f, 1, 3)


@pytest.mark.parametrize("argument", ["num_params", "N", "points"])
def test_refusals_of_numbers(argument):
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, got 0"):
        capacity(**{"f": rotation, "num_params": 1, "N": 2, argument: 0})
