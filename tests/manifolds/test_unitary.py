"""Unitary: the Cayley step of the unitary RNN, logarithms against SciPy, Haar moments, components of O(n), drift."""

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
import scipy.linalg
import torch
from torch.func import grad

from manopt_torch.manifolds import Unitary

CASES = json.loads((Path(__file__).parents[1] / "reference" / "cayley.json").read_text("utf-8"))["cases"]
M = Unitary()
DOUBLE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
BOTH = pytest.mark.parametrize("group", [Unitary("cayley"), Unitary("exp")], ids=repr)


def tensor(value):
    if isinstance(value, dict):
        return torch.complex(tensor(value["re"]), tensor(value["im"]))
    return torch.tensor(value, dtype=torch.float64)


def tangent(x, length=None):
    u = M.project(x, torch.randn_like(x))
    return u if length is None else u * (length / M.norm(x, u))[..., None, None]


def close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ------------------------------------------------------------ the multiplicative Cayley step
@pytest.mark.parametrize(
    "case", [c for c in CASES if c["n"] == c["p"]], ids=lambda c: f"{c['field']}{c['n']}-{c['lam']}"
)
def test_an_sgd_step_is_the_cayley_step_of_half_its_length(case):
    """lr = 2λ; the printed formula of the paper, taken literally, is another step."""
    x, g, lam = tensor(case["X"]), tensor(case["G"]), case["lam"]
    close(2 * M.rgrad(x, g), tensor(case["canonical_grad"]))
    y = M.retract(x, -2 * lam * M.rgrad(x, g))
    close(y, tensor(case["Y"]))
    if lam > 0:
        assert (y - tensor(case["Y_printed_left"])).abs().max() > 1e-5


@DOUBLE
def test_moves_are_products_with_a_unitary_matrix(dtype):
    x = M.random(5, 4, 4, dtype=dtype)
    u, v = tangent(x), tangent(x)
    w, eye = u @ x.mH, torch.eye(4, dtype=dtype)
    q = torch.linalg.solve(eye - w / 2, eye + w / 2)
    for actual, expected in zip(M.move(x, u, v), (q @ x, q @ v), strict=True):
        close(actual, expected, 1e-13)
    turn = torch.linalg.matrix_exp(x.mH @ u)
    for actual, expected in zip(Unitary("exp").move(x, u, v), (x @ turn, v @ turn), strict=True):
        close(actual, expected, 1e-13)


# ------------------------------------------------------------ geodesics
@DOUBLE
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_exp_and_log_against_scipy(n, dtype):
    x = M.random(8, n, n, dtype=dtype)
    for scale in (1e-8, 0.1, 0.5):
        u = scale * tangent(x)
        y = M.exp(x, u)
        expected = torch.stack(
            [a @ torch.as_tensor(scipy.linalg.expm((a.mH @ b).numpy())) for a, b in zip(x, u, strict=True)]
        )
        close(y, expected, 1e-14)
        if torch.linalg.matrix_norm(u, 2).max() < math.pi:
            close(M.log(x, y), u, 1e-13)
    y = M.exp(x, 20 * tangent(x))
    logs = [torch.as_tensor(scipy.linalg.logm((a.mH @ b).numpy())) for a, b in zip(x, y, strict=True)]
    close(M.log(x, y), x @ torch.stack(logs).to(dtype), 1e-10)


@DOUBLE
def test_dist_is_the_norm_of_the_angles(dtype):
    x = M.random(20, 5, 5, dtype=dtype)
    y = M.exp(x, tangent(x, 30.0))
    angles = torch.linalg.eigvals(x.mH @ y).angle()
    close(M.dist(x, y), torch.linalg.vector_norm(angles, dim=-1), 1e-12)
    close(M.dist(x, x), torch.zeros(20, dtype=torch.float64), 1e-14)


@DOUBLE
@pytest.mark.parametrize("length", [1e-6, 0.5, 2.0])
def test_gradient_of_half_the_squared_distance_is_minus_log(length, dtype):
    x = M.random(3, 4, 4, dtype=dtype)
    y = M.exp(x, tangent(x, length))
    g = grad(lambda x: (M.dist(x, y) ** 2).sum() / 2)(x)
    close(M.rgrad(x, g), -M.log(x, y), 1e-12)
    g = grad(lambda x: M.dist(x, x.detach()).sum())(x)
    assert g.isfinite().all()


def test_components_of_the_orthogonal_group_are_infinitely_far_apart():
    x = M.random(200, 3, 3, dtype=torch.float64)
    y = M.random(200, 3, 3, dtype=torch.float64)
    same = torch.linalg.det(x) * torch.linalg.det(y) > 0
    assert 50 < same.sum() < 150
    assert torch.equal(M.dist(x, y).isfinite(), same)
    assert torch.equal(M.log(x, y).isnan().flatten(1).all(1), ~same)
    assert M.dist(x.to(torch.complex128), y.to(torch.complex128)).isfinite().all()  # U(n) is connected


@BOTH
def test_no_step_changes_the_sign_of_the_determinant(group):
    x = group.random(50, 4, 4, dtype=torch.float64)
    for length in (1.0, 1e3):
        y = group.retract(x, tangent(x, length))
        close(torch.linalg.det(y), torch.linalg.det(x), 1e-12)


# ------------------------------------------------------------ cases
@BOTH
@DOUBLE
def test_case_16_procrustes(group, dtype):
    """min ‖X − A‖² is at the polar factor of A; gradient descent with step 1/(4σ_max) finds it."""
    a = torch.randn(3, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    left, s, right = torch.linalg.svd(a)
    x = group.exp(left @ right, tangent(left @ right, 1.5))
    for _ in range(3000):
        x = group.retract(x, -group.rgrad(x, 2 * (x - a)) / (4 * s[0]))
    close(x, left @ right, 1e-6)
    close((x - a).abs().square().sum(), (s - 1).square().sum(), 1e-12)
    close(group.nearest(a), left @ right, 1e-13)


@DOUBLE
def test_case_17_inner_is_real_and_symmetric(dtype):
    x = M.random(6, 3, 3, dtype=dtype)
    u, v = tangent(x), tangent(x)
    s = M.inner(x, u, v)
    assert s.dtype == torch.float64
    close(s, (u.mH @ v).diagonal(dim1=-2, dim2=-1).sum(-1).real, 1e-14)
    assert torch.equal(s, M.inner(x, v, u))
    assert M.project(x, torch.zeros_like(x)).dtype == dtype


# ------------------------------------------------------------ uniform distribution
def test_haar_moments_of_the_unitary_group():
    x = M.random(20_000, 3, 3, dtype=torch.complex128)
    trace = x.diagonal(dim1=-2, dim2=-1).sum(-1)
    for sample, mean in (
        (trace, 0),
        (trace.abs() ** 2, 1),
        (trace.abs() ** 4, 2),
        (torch.linalg.det(x), 0),
        (x[:, 0, 0].abs() ** 4, 2 / (3 * 4)),
    ):
        assert abs(sample.mean() - mean) < 5 * sample.std() / math.sqrt(20_000)  # five standard errors


def test_haar_moments_of_the_orthogonal_group():
    x = M.random(20_000, 4, 4, dtype=torch.float64)
    trace = x.diagonal(dim1=-2, dim2=-1).sum(-1)
    for sample, mean in (
        (trace, 0),
        (trace**2, 1),
        (trace**4, 3),
        (torch.linalg.det(x), 0),
        (x[:, 1, 2] ** 4, 3 / (4 * 6)),
    ):
        assert abs(sample.mean() - mean) < 5 * sample.std() / math.sqrt(20_000)


def test_dim():
    assert M.dim(4, 4) == 6
    assert M.dim(7, 4, 4, dtype=torch.complex64) == 7 * 16
    assert M.dim(1, 1) == 0


# ------------------------------------------------------------ numbers at the edge
@pytest.mark.parametrize(
    ("group", "dtype"), [(Unitary("cayley"), torch.float32), (Unitary("exp"), torch.complex64)], ids=str
)
def test_no_drift_in_ten_thousand_steps(group, dtype):
    x = group.random(4, 8, 8, dtype=dtype)
    direction = torch.randn_like(x)
    for _ in range(10_000):
        x = group.retract(x, 0.05 * group.project(x, direction))
    assert group.residual(x).max() < 1e-5


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(group, dtype):
    x = group.random(10, 4, 4, dtype=dtype)
    y, v = group.move(x, 0.3 * group.rgrad(x, torch.randn_like(x)), group.project(x, torch.randn_like(x)))
    assert x.dtype == y.dtype == v.dtype == dtype
    for t in (y, v, group.exp(x, v), group.nearest(v), group.log(x, y), group.dist(x, y)):
        assert t.dtype == dtype
        assert t.isfinite().all()
    assert group.residual(y.double()).max() < 4 * torch.finfo(dtype).eps


@BOTH
def test_nan_stays_in_its_batch_element(group):
    x = group.random(3, 4, 4)
    u = tangent(x, 0.3)
    v = u.clone()
    v[1, 0, 0] = math.nan
    for f in (
        lambda t: group.move(x, t, u)[0],
        lambda t: group.move(x, t, u)[1],
        lambda t: group.exp(x, t),
        group.residual,
    ):
        good, bad = f(u), f(v)
        torch.testing.assert_close(good[[0, 2]], bad[[0, 2]], rtol=0, atol=2e-6)
        assert bad[1].isnan().any()


@pytest.mark.parametrize("function", [M.nearest, lambda y: M.log(torch.eye(4), y)], ids=["nearest", "log"])
def test_nan_stays_in_its_batch_element_of_the_svd(function):
    y = Unitary("exp").retract(torch.eye(4), tangent(torch.eye(4).expand(3, 4, 4), 0.3))
    good = function(y)
    y[1, 0, 0] = math.nan
    bad = function(y)
    torch.testing.assert_close(good[[0, 2]], bad[[0, 2]])
    assert bad[1].isnan().any()


@BOTH
def test_shapes(group):
    x = group.random(0, 3, 3)
    assert group.move(x, x, x)[1].shape == group.log(x, x).shape == group.nearest(x).shape == (0, 3, 3)
    assert group.dist(x, x).shape == group.residual(x).shape == (0,)
    x = group.random(3, 3, dtype=torch.float64)
    u = group.project(x, torch.randn(7, 3, 3, dtype=torch.float64))
    y, v = group.move(x, u, u[0])
    assert y.shape == v.shape == group.exp(x, u).shape == (7, 3, 3)
    close(y[4], group.retract(x, u[4]), 1e-14)
    close(v[4], group.move(x, u[4], u[0])[1], 1e-14)
    for call in (lambda: group.check_shape((4, 3)), lambda: group.random(3, 4)):
        with pytest.raises(ValueError, match=r"needs square matrices, got shape .*Stiefel"):
            call()


def test_value_semantics():
    assert repr(Unitary()) == "Unitary()"
    assert repr(Unitary("exp", 0)) == "Unitary(retraction='exp', polish=0)"
    assert Unitary("cayley", 1) == M != Unitary("exp")
    assert pickle.loads(pickle.dumps(Unitary("exp"))) == copy.deepcopy(Unitary("exp")) == eval(repr(Unitary("exp")))
    assert len({M, Unitary(), Unitary("exp")}) == 2


@pytest.mark.parametrize("retraction", ["cayley", "exp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("length", [1e4, 1e6, 1e10, 1e20, 1e30])
def test_a_step_too_long_for_any_digit_stays_on_the_group(retraction, dtype, length):
    group = Unitary(retraction)
    x = group.random(8, 4, 4, dtype=dtype)
    y = group.retract(x, group.project(x, torch.randn_like(x) * length))
    assert group.residual(y).max() < 1e-5
