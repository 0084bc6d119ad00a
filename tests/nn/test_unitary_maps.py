"""Structured unitary maps: published matrices, the factors as dense matrices, laws of a unitary map, derivatives."""

import copy
import io
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from manopt_torch.nn.unitary_maps import GivensUnitary, HouseholderUnitary, RestrictedUnitary, UnitaryMap

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "urnn.json").read_text())

MAPS = {
    "restricted": RestrictedUnitary,
    "householder": partial(HouseholderUnitary, num_factors=3),
    "givens": partial(GivensUnitary, num_layers=4),
}
CASES = [(name, torch.complex128) for name in MAPS] + [(name, torch.float64) for name in ("householder", "givens")]
every_map = pytest.mark.parametrize(("name", "dtype"), CASES)


def dense(values: dict) -> Tensor:
    return torch.complex(*(torch.tensor(values[part], dtype=torch.float64) for part in ("re", "im")))


def exact(found: Tensor, expected: Tensor | np.ndarray, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found.detach(), torch.as_tensor(expected), rtol=0, atol=atol)


# ------------------------------------------------------------ matrices written out with NumPy
def reflection(v: np.ndarray) -> np.ndarray:
    return np.eye(len(v)) - 2 * np.outer(v, v.conj()) / np.vdot(v, v)


def restricted_matrix(theta: np.ndarray, v: np.ndarray, permutation: np.ndarray) -> np.ndarray:
    N = len(permutation)
    j = np.arange(N)
    F = np.exp(-2j * np.pi * np.outer(j, j) / N) / np.sqrt(N)
    P = np.zeros((N, N))
    P[j, permutation] = 1
    D1, D2, D3 = (np.diag(np.exp(1j * t)) for t in theta)
    return D3 @ reflection(v[1]) @ F.conj().T @ D2 @ P @ reflection(v[0]) @ F @ D1


def numpy_matrix(unitary: UnitaryMap) -> np.ndarray:
    values = {name: t.detach().numpy() for name, t in unitary.state_dict().items()}
    N = unitary.size
    if isinstance(unitary, RestrictedUnitary):
        return restricted_matrix(values["theta"], values["reflection"], values["permutation"])
    if isinstance(unitary, HouseholderUnitary):
        D = np.diag(np.exp(1j * values["theta"])) if "theta" in values else np.eye(N)
        return np.linalg.multi_dot([D, *(reflection(v) for v in values["reflection"])])
    D = np.diag(np.exp(1j * values["phase"])) if "phase" in values else np.eye(N)
    W, r = np.eye(N), 0
    for layer in range(unitary.num_layers):
        for top in range(layer % 2, N - 1, 2):
            t = values["theta"][r]
            turn = np.exp(1j * values["phi"][r]) if "phi" in values else 1
            G = np.eye(N, dtype=D.dtype)
            G[top : top + 2, top : top + 2] = [[turn * np.cos(t), -np.sin(t)], [turn * np.sin(t), np.cos(t)]]
            W, r = G @ W, r + 1
    assert r == len(values["theta"])
    return D @ W


@every_map
@pytest.mark.parametrize("N", [2, 5, 8])
def test_matrix_is_the_product_of_its_factors(name, dtype, N):
    unitary = MAPS[name](N, dtype=dtype)
    exact(unitary.matrix(), numpy_matrix(unitary))


@pytest.mark.parametrize("case", [*REFERENCE["restricted"], REFERENCE["network"]], ids=lambda case: f"N={case['N']}")
def test_restricted_has_the_reference_values(case):
    N = case["N"]
    unitary = RestrictedUnitary(N, dtype=torch.complex128)
    v = torch.tensor(case["reflection"], dtype=torch.float64)
    unitary.load_state_dict(
        {
            "theta": torch.tensor(case["theta"], dtype=torch.float64),
            "reflection": torch.complex(v[:, :N], v[:, N:]),
            "permutation": torch.tensor(case["perm"]),
        }
    )
    exact(unitary.matrix(), dense(case["W"]))
    h = torch.randn(4, N, dtype=torch.complex128)
    exact(unitary(h), h @ dense(case["W"]).mT)
    exact(unitary.adjoint(h), h @ dense(case["W"]).conj())


# ------------------------------------------------------------ laws
@every_map
@pytest.mark.parametrize("N", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3)])
def test_forward_adjoint_and_matrix_agree(name, dtype, N, batch_shape):
    unitary = MAPS[name](N, batch_shape=batch_shape, dtype=dtype)
    W = unitary.matrix()
    assert W.shape == (*batch_shape, N, N)
    assert W.dtype == dtype
    exact(W @ W.mH, torch.eye(N, dtype=dtype).expand_as(W))
    h = torch.randn(6, *batch_shape, 4, N, dtype=dtype)
    exact(unitary(h), h @ W.mT)
    exact(unitary.adjoint(h), h @ W.conj())
    exact(unitary.adjoint(unitary(h)), h)
    exact(unitary(h).norm(dim=-1), h.norm(dim=-1))
    if not batch_shape:
        exact(unitary(h[0, 0]), W @ h[0, 0])
    if batch_shape and N > 2:
        each = W.flatten(0, -3)
        assert (each[0] - each[1]).norm() > 0.1  # independent


@every_map
def test_gradcheck(name, dtype):
    unitary = MAPS[name](3, batch_shape=(2,), dtype=dtype)
    names, weights = zip(*((n, p.detach().requires_grad_()) for n, p in unitary.named_parameters()), strict=True)
    h = torch.randn(2, 1, 3, dtype=dtype, requires_grad=True)

    def call(h: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(unitary, dict(zip(names, weights, strict=True)), (h,))

    assert torch.autograd.gradcheck(call, (h, *weights), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (h, *weights))


@every_map
@pytest.mark.parametrize("batch_shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("N", [6, 34])
def test_bound_products(name, dtype, N, batch_shape):
    unitary = MAPS[name](N, batch_shape=batch_shape, dtype=dtype)
    with torch.no_grad():
        product, adjoint = unitary.bind(*unitary.factors())
        h = torch.randn(2, *batch_shape, 3, N, dtype=dtype)
        before = h.clone()
        exact(product(h), unitary(h))
        exact(adjoint(h), unitary.adjoint(h))
        assert torch.equal(h, before)


@every_map
@pytest.mark.parametrize("batch_shape", [(), (2,), (2, 3)])
def test_gradients_of_the_factors(name, dtype, batch_shape):
    """Of Re⟨g, W h⟩ by the parameters, whatever way the map takes, against automatic differentiation."""
    unitary = MAPS[name](6, batch_shape=batch_shape, dtype=dtype)
    h, g = torch.randn(2, 4, *batch_shape, 3, 6, dtype=dtype).unbind(0)
    parameters = list(unitary.parameters())
    expected = torch.autograd.grad(unitary(h), parameters, g)
    f = unitary.factors()
    with torch.no_grad():
        found = unitary.factor_gradients(h, unitary(h), g, unitary.adjoint(g), *f)
    asked = [(t, d_t) for t, d_t in zip(f, found, strict=True) if t.requires_grad]
    assert all(d_t is None for t, d_t in zip(f, found, strict=True) if not (t.is_floating_point() or t.is_complex()))
    outputs, cotangents = zip(*asked, strict=True)
    for a, b in zip(torch.autograd.grad(outputs, parameters, cotangents), expected, strict=True):
        torch.testing.assert_close(a, b)


@every_map
def test_matrix_is_differentiable(name, dtype):
    """Descent on Re tr(CᴴW) in the parameters lowers it by |gradient|²."""
    unitary = MAPS[name](5, dtype=dtype)
    C = torch.randn(5, 5, dtype=dtype)

    def value() -> Tensor:
        return (C.conj() * unitary.matrix()).real.sum()

    before = value()
    before.backward()
    square = sum(p.grad.abs().square().sum() for p in unitary.parameters())
    assert square > 1e-3
    step = 1e-6
    with torch.no_grad():
        for p in unitary.parameters():
            p -= step * p.grad
    torch.testing.assert_close(before - value(), step * square, rtol=1e-3, atol=0)


def test_capacity_is_reached_where_the_docstring_says():
    """Any unitary matrix is a product of N − 1 reflections and a diagonal: the QR decomposition, by hand."""
    N = 5
    target = np.linalg.qr(np.random.default_rng(0).normal(size=(N, N, 2)) @ np.array([1, 1j]))[0]
    rest, vectors = target.copy(), []
    for k in range(N - 1):  # H_{N-1} ⋯ H_1 target = D
        x = rest[:, k].copy()
        x[:k] = 0
        v = x.copy()
        v[k] += x[k] / abs(x[k]) * np.linalg.norm(x)
        rest = reflection(v) @ rest
        vectors.append(v)
    D = np.diagonal(rest)
    np.testing.assert_allclose(rest, np.diag(D), atol=1e-12)
    # target = H_1 ⋯ H_{N-1} D = D (D⁻¹ H_1 D) ⋯, and D⁻¹ H D is the reflection of D⁻¹ v
    unitary = HouseholderUnitary(N, N - 1, dtype=torch.complex128)
    unitary.load_state_dict(
        {"theta": torch.from_numpy(np.angle(D)), "reflection": torch.from_numpy(np.stack(vectors) / D)}
    )
    exact(unitary.matrix(), target)


# ------------------------------------------------------------ corners
@pytest.mark.parametrize("make", [RestrictedUnitary, partial(HouseholderUnitary, num_factors=2)])
def test_zero_reflection_is_the_identity_without_gradient(make):
    unitary = make(4, dtype=torch.complex128)
    with torch.no_grad():
        unitary.reflection[0].zero_()
    W = unitary.matrix()
    exact(W @ W.mH, torch.eye(4, dtype=torch.complex128))
    (W * torch.randn(4, 4, dtype=torch.complex128)).real.sum().backward()
    assert not unitary.reflection.grad[0].any()
    assert unitary.reflection.grad[1].abs().min() > 0
    assert all(p.grad.isfinite().all() for p in unitary.parameters())


@pytest.mark.parametrize("length", [1e-10, 1e10])
def test_reflection_does_not_depend_on_the_length_of_its_vector(length):
    unitary = RestrictedUnitary(6, dtype=torch.complex64)
    before = unitary.matrix()
    with torch.no_grad():
        unitary.reflection.mul_(length)
    torch.testing.assert_close(unitary.matrix(), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
def test_many_reflections_stay_unitary_in_single_precision(parallel):
    unitary = HouseholderUnitary(32, 64, dtype=torch.complex64)
    if parallel:
        with torch.no_grad():
            unitary.reflection.copy_(unitary.reflection[:1] + 1e-3 * unitary.reflection)
    W = unitary.matrix()
    torch.testing.assert_close(W @ W.mH, torch.eye(32, dtype=torch.complex64), rtol=0, atol=2e-5)
    exact(W.to(torch.complex128), numpy_matrix(unitary.double()), atol=2e-5)


def test_no_factors_leave_the_diagonal():
    for unitary in (HouseholderUnitary(3, 0, dtype=torch.complex128), GivensUnitary(3, 0, dtype=torch.complex128)):
        W = unitary.matrix()
        exact(W.abs(), torch.eye(3, dtype=torch.float64))
        assert W.diagonal().imag.abs().max() > 0.01
    exact(HouseholderUnitary(3, 0, dtype=torch.float64).matrix(), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("num_factors", [1, 2, 3])
def test_real_householder_products_have_determinant_of_their_parity(num_factors):
    W = HouseholderUnitary(4, num_factors, dtype=torch.float64).matrix()
    assert torch.linalg.det(W).item() == pytest.approx((-1) ** num_factors)
    assert torch.linalg.det(GivensUnitary(4, num_factors, dtype=torch.float64).matrix()).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "dtype", "count"),
    [
        (RestrictedUnitary, torch.complex64, lambda N: 7 * N),
        (partial(HouseholderUnitary, num_factors=3), torch.complex64, lambda N: 7 * N),
        (partial(HouseholderUnitary, num_factors=3), torch.float32, lambda N: 3 * N),
        (lambda N, dtype: GivensUnitary(N, N, dtype=dtype), torch.complex64, lambda N: N * N),
        (lambda N, dtype: GivensUnitary(N, N, dtype=dtype), torch.float32, lambda N: N * (N - 1) // 2),
    ],
)
@pytest.mark.parametrize("N", [1, 2, 5, 8])
def test_number_of_real_parameters(make, dtype, count, N):
    parameters = make(N, dtype=dtype).parameters()
    assert sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters) == count(N)


def test_initial_values():
    N = 2000
    unitary = RestrictedUnitary(N)
    for values, bound in ((unitary.theta, math.pi), (unitary.reflection, math.sqrt(6 / (2 + 2 * N)))):
        parts = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
        assert 0.99 * bound < parts.max() <= bound * (1 + 1e-6)
        assert -bound * (1 + 1e-6) <= parts.min() < -0.99 * bound
        assert parts.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.1)
    assert torch.equal(unitary.permutation.sort().values, torch.arange(N))
    assert (unitary.permutation != torch.arange(N)).float().mean() > 0.9


@every_map
def test_reset_parameters(name, dtype):
    unitary = MAPS[name](8, dtype=dtype)
    before = copy.deepcopy(unitary.state_dict())
    unitary.reset_parameters()
    assert not any(torch.equal(t, before[key]) for key, t in unitary.state_dict().items())


def test_permutation_is_saved_and_is_no_parameter():
    first, second = RestrictedUnitary(16), RestrictedUnitary(16)
    assert "permutation" not in dict(first.named_parameters())
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(second.matrix(), first.matrix())
    meta = RestrictedUnitary(16, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    W = meta.matrix()
    torch.testing.assert_close(W @ W.mH, torch.eye(16, dtype=torch.complex64), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@every_map
def test_conversion(name, dtype):
    unitary = MAPS[name](6, dtype=dtype)
    W = unitary.matrix().detach()
    single = copy.deepcopy(unitary).float()
    assert single.matrix().dtype == (torch.complex64 if dtype.is_complex else torch.float32)
    torch.testing.assert_close(single.matrix().to(dtype), W, rtol=0, atol=1e-5)
    assert single.double().matrix().dtype == dtype
    if dtype.is_complex:
        for target in (torch.float32, torch.complex64):
            found = copy.deepcopy(unitary).to(target).matrix()
            assert found.dtype == torch.complex64
            torch.testing.assert_close(found.to(dtype), W, rtol=0, atol=1e-5)


def test_errors_name_what_came():
    with pytest.raises(ValueError, match=r"complex.* got torch\.float32: .*HouseholderUnitary"):
        RestrictedUnitary(4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"size of RestrictedUnitary must be at least 1, got 0"):
        RestrictedUnitary(0)
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        HouseholderUnitary(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"num_factors must be at least 0, got -1"):
        HouseholderUnitary(4, -1)
    with pytest.raises(ValueError, match=r"num_layers must be at least 0, got -1"):
        GivensUnitary(4, -1)
    unitary = GivensUnitary(4, 2)
    with pytest.raises(ValueError, match=r"h must have shape \(\.\.\., 4\), got \(4, 3\)"):
        unitary(torch.zeros(4, 3, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"g must be torch\.complex64, .* got torch\.float32"):
        unitary.adjoint(torch.zeros(4))
    batched = GivensUnitary(4, 2, batch_shape=(3,))
    with pytest.raises(ValueError, match=r"h must have shape \(\.\.\., 3, B, 4\), got \(2, 5, 4\)"):
        batched(torch.zeros(2, 5, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"h must have shape \(\.\.\., 3, B, 4\), got \(4,\)"):
        batched(torch.zeros(4, dtype=torch.complex64))


def test_repr():
    assert repr(RestrictedUnitary(4)) == "RestrictedUnitary(4)"
    assert repr(HouseholderUnitary(4, 2)) == "HouseholderUnitary(4, num_factors=2)"
    assert repr(GivensUnitary(4, 2, batch_shape=(3,))) == "GivensUnitary(4, batch_shape=(3,), num_layers=2)"


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e22, 1e30])
def test_reflections_of_any_length_are_the_same(size):
    for unitary in (RestrictedUnitary(8), HouseholderUnitary(8, 3), HouseholderUnitary(8, 3, dtype=torch.float32)):
        W = unitary.matrix()
        with torch.no_grad():
            unitary.reflection.mul_(size)
        torch.testing.assert_close(unitary.matrix(), W, rtol=0, atol=2e-6)
