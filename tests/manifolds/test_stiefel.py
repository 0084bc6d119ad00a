"""Stiefel: reference values, geodesics against SciPy, moments, and cases that users of comparable libraries met."""

import copy
import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import scipy.linalg
import torch
from torch.func import grad, jvp, vmap

from manopt_torch import ManifoldParameter
from manopt_torch.manifolds import Sphere, Stiefel, Unitary, View, view_for
from manopt_torch.optim import RiemannianAdam

REFERENCE = Path(__file__).parents[1] / "reference"
METRICS = ("euclidean", "canonical")
RETRACTIONS = ("cayley", "qr", "polar", "exp", "newton_schulz")
DOUBLE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
EVERY_METRIC = pytest.mark.parametrize("metric", METRICS)
EVERY_OPTION = pytest.mark.parametrize("M", [Stiefel(*o) for o in itertools.product(METRICS, RETRACTIONS)], ids=repr)
E, C = Stiefel("euclidean"), Stiefel("canonical")


def tensor(value):
    if isinstance(value, dict):
        return torch.complex(tensor(value["re"]), tensor(value["im"]))
    return torch.tensor(value, dtype=torch.float64)


def cases(name):
    for i, case in enumerate(json.loads((REFERENCE / name).read_text("utf-8"))["cases"]):
        yield pytest.param(case, id=f"{i}-{case['field']}-{case['n']}x{case['p']}")


def tangent(M, x, length=None):
    u = M.project(x, torch.randn_like(x))
    return u if length is None else u * (length / M.norm(x, u))[..., None, None]


def close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ------------------------------------------------------------ reference values
@pytest.mark.parametrize("case", [*cases("stiefel.json")])
def test_reference_values(case):
    x, u, v, z, g = (tensor(case[k]) for k in "XUVZG")
    close(E.project(x, z), tensor(case["proj_Z"]))
    close(C.project(x, z), tensor(case["proj_Z"]))
    close(E.rgrad(x, g), tensor(case["egrad2rgrad_euclidean"]))
    close(C.rgrad(x, g), tensor(case["egrad2rgrad_canonical"]))
    close(E.inner(x, u, v), tensor(case["inner_euclidean_UV"]))
    close(C.inner(x, u, v), tensor(case["inner_canonical_UV"]))
    close(E.norm(x, u), tensor(case["norm_euclidean_U"]))
    close(C.norm(x, u), tensor(case["norm_canonical_U"]))
    for name, M in (("euclidean", E), ("canonical", C)):
        y = tensor(case[f"exp_{name}"])
        close(M.exp(x, u), y)
        close(Stiefel(name, "exp").retract(x, u), y)
        for retraction in ("qr", "polar", "cayley"):
            close(Stiefel(name, retraction).retract(x, u), tensor(case[f"retr_{retraction}"]))
        if case["U_norm"] <= 1.5 and torch.linalg.matrix_norm(x.mH @ u, 2) < math.pi:
            close(M.log(x, y), u)
    close(E.nearest(z), tensor(case["polar_factor_Z"]))
    close(Stiefel(retraction="polar").move(x, u, v)[1], tensor(case["transport_proj_to_polar"]))
    assert E.dim(*x.shape, dtype=x.dtype) == case["dim"]
    assert C.dim(6, *x.shape, dtype=x.dtype) == 6 * case["dim"]


@pytest.mark.parametrize("case", [*cases("cayley.json")])
def test_the_step_of_an_sgd_is_the_multiplicative_cayley_step(case):
    """Y(λ) = (I + λ/2 A)⁻¹(I − λ/2 A)X: lr = λ for the canonical metric; lr = 2λ for the Euclidean one and square X."""
    x, g, y, lam = tensor(case["X"]), tensor(case["G"]), tensor(case["Y"]), case["lam"]
    close(C.rgrad(x, g), tensor(case["canonical_grad"]))
    close(C.retract(x, -lam * C.rgrad(x, g)), y)
    if case["n"] == case["p"]:
        close(E.retract(x, -2 * lam * E.rgrad(x, g)), y)
    # along the curve f decreases at rate ‖A‖²/2 = ‖gradient‖² in the canonical metric, whatever the shape
    close(-(C.norm(x, C.rgrad(x, g)) ** 2), tensor(case["slope_at_0"]))


@DOUBLE
def test_the_two_gradients_differ_by_two_within_the_span_and_agree_outside(dtype):
    """Where n > p no single factor turns one gradient into the other."""
    x = E.random(7, 3, dtype=dtype)
    g = torch.randn_like(x)
    e, c = E.rgrad(x, g), C.rgrad(x, g)
    torch.testing.assert_close(x.mH @ c, 2 * (x.mH @ e))
    torch.testing.assert_close(c - x @ (x.mH @ c), e - x @ (x.mH @ e))


# ------------------------------------------------------------ cases
@EVERY_METRIC
def test_case_05_gradient_of_nearest_where_singular_values_repeat(metric):
    M = Stiefel(metric)
    x = torch.eye(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64)
    (g,) = torch.autograd.grad((w * M.nearest(x)).sum(), x)
    x = x.detach()
    close(g, w - x @ (x.mH @ w + w.mH @ x) / 2, 1e-14)


def test_case_32_projection_keeps_what_is_tangent():
    x = torch.eye(3, 2, dtype=torch.float64)
    u = x @ torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    for M in (E, C):
        assert torch.equal(M.project(x, u), u)


def test_case_34_geodesic_of_a_single_column_is_a_great_circle():
    x, u = torch.eye(3, dtype=torch.float64)[:2, :, None]
    for M in (E, C):
        close(M.exp(x, u), math.cos(1) * x + math.sin(1) * u, 1e-15)


def test_case_35_square_haar():
    x = E.random(2000, 2, 2, dtype=torch.float64)
    assert abs(x[:, 0, 0].mean()) < 5 * math.sqrt(1 / 2 / 2000)  # E X₀₀² = 1/2
    assert abs((torch.linalg.det(x) > 0).double().mean() - 0.5) < 5 * math.sqrt(0.25 / 2000)


@EVERY_METRIC
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_case_64_wide_weight_through_its_view(metric, dtype):
    M = Stiefel(metric)
    for call in (lambda: M.check_shape((3, 5)), lambda: M.random(3, 5), lambda: M.nearest(torch.randn(3, 5))):
        with pytest.raises(ValueError, match=r"n >= p, got shape \(3, 5\); write view_for") as caught:
            call()
        suggestion = str(caught.value).split("write ")[1].split(" for a wide")[0]
        assert eval(suggestion) == View(M, "transpose")
    seen = view_for(M, (3, 5))
    w = seen.nearest(torch.randn(3, 5, dtype=dtype))
    for _ in range(5):
        w = seen.retract(w, -0.1 * seen.rgrad(w, torch.randn_like(w)))
        torch.testing.assert_close(w @ w.mH, torch.eye(3, dtype=dtype), rtol=0, atol=1e-6)


@EVERY_OPTION
def test_case_65_broadcasting(M):
    x = M.random(4, 2, dtype=torch.float64)
    u, v = (M.project(x, torch.randn(7, 4, 2, dtype=torch.float64) / 10) for _ in range(2))
    y, carried = M.move(x, u, v)
    assert y.shape == carried.shape == M.log(x, y).shape == (7, 4, 2)
    assert M.dist(x, y).shape == M.inner(x, u[0], v).shape == M.norm(x, u).shape == (7,)
    for i in range(7):
        for whole, one in zip((y, carried, M.exp(x, u)), (*M.move(x, u[i], v[i]), M.exp(x, u[i])), strict=True):
            close(whole[i], one, 1e-14)
    close(M.move(x, u[0], v)[1][3], M.move(x, u[0], v[3])[1], 1e-14)


@EVERY_OPTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_76_half_precision(M, dtype):
    x = M.random(10, 5, 3, dtype=dtype)
    g = torch.randn_like(x)
    y, v = M.move(x, -0.1 * M.rgrad(x, g), M.project(x, g))
    assert x.dtype == y.dtype == v.dtype == M.residual(y).dtype == dtype
    for t in (y, v, M.exp(x, v), M.nearest(g), M.norm(x, v), M.dist(x, y)):
        assert t.dtype == dtype
        assert t.isfinite().all()
    # entries of size ≤ 1 are rounded to a relative eps/2: XᴴX − I is at most eps·√p·(‖X‖_F = √p) in norm
    assert M.residual(y.double()).max() < 3 * torch.finfo(dtype).eps


# ------------------------------------------------------------ geodesics
def geodesic(metric, x, u):
    """By n×n exponentials: expm(W)x for the canonical metric; expm(W + x xᴴu xᴴ) x expm(−xᴴu) for the Euclidean one."""
    a, p = x.mH @ u, torch.eye(x.shape[0], dtype=x.dtype) - x @ x.mH / 2
    w = p @ u @ x.mH - x @ u.mH @ p
    if metric == "euclidean":
        w = w + x @ a @ x.mH
    y = torch.as_tensor(scipy.linalg.expm(w.numpy())) @ x
    return y if metric == "canonical" else y @ torch.as_tensor(scipy.linalg.expm(-a.numpy()))


@DOUBLE
@EVERY_METRIC
@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (3, 2), (4, 4), (6, 4), (9, 2), (40, 5)])
def test_exp_against_scipy(shape, metric, dtype):
    M = Stiefel(metric)
    x = M.random(*shape, dtype=dtype)
    for scale in (1e-6, 0.1, 1.0, 10.0):
        u = scale * tangent(M, x)
        close(M.exp(x, u), geodesic(metric, x, u), 1e-13 * max(1, scale))
    rotation = x @ (x.mH @ u)
    rank_one = (u - rotation)[:, :1] @ torch.ones(1, shape[1], dtype=dtype)
    for u in (rotation / 10, rank_one / 10):  # the part of U normal to X has rank zero or one
        close(M.exp(x, u), geodesic(metric, x, u), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@EVERY_METRIC
@pytest.mark.parametrize("length", [1e-3, 1.0, 10.0, 1e3, 1e4, 1e6, 1e10, 1e20, 1e30])
def test_exp_stays_on_the_manifold_at_any_length(length, metric, dtype):
    M = Stiefel(metric)
    x = M.random(20, 8, 3, dtype=dtype)
    assert M.residual(M.exp(x, tangent(M, x, length))).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_canonical_norm_subtracts_nothing(dtype):
    """‖U‖² = ‖N‖² + ‖A‖²/2 of U = XA + N: no NaN from ∞ − ∞, and all digits where it is small."""
    M = Stiefel("canonical")
    x = M.random(20, 5, 3, dtype=dtype)
    u = torch.randn_like(x)
    wide = x.to(torch.promote_types(dtype, torch.float64)), u.to(torch.promote_types(dtype, torch.float64))
    a = wide[0].mH @ wide[1]
    n = wide[1] - wide[0] @ a
    expected = (n.abs().square().sum((-2, -1)) + a.abs().square().sum((-2, -1)) / 2).to(torch.float32)
    torch.testing.assert_close(M.inner(x, u, u), expected)
    torch.testing.assert_close(M.inner(x, u, u.clone()), expected)
    assert M.inner(x, u * 1e20, u * 1e20).tolist() == [torch.inf] * 20
    p = ManifoldParameter(M, (5, 3), dtype=dtype)
    p.grad = torch.randn_like(p) * 1e20
    RiemannianAdam([p], lr=0.1).step()
    assert M.residual(p.detach()) < 1e-5


@DOUBLE
@pytest.mark.parametrize("shape", [(5, 3), (4, 1), (3, 3)])
@pytest.mark.parametrize("M", [Stiefel(m, "exp") for m in METRICS], ids=repr)
def test_derivatives_of_exp_where_the_normal_part_vanishes(M, shape, dtype):
    """γ'' = −γ γ'ᴴγ' (Euclidean), −γ'γ'ᴴγ − γ((γᴴγ')² + γ'ᴴγ') (canonical) at t = 0, along any u and at zero."""
    x = M.random(*shape, dtype=dtype)
    v = tangent(M, x)
    a, q = x.mH @ v, v.mH @ v
    expected = -x @ q if M.metric == "euclidean" else -v @ v.mH @ x - x @ (a @ a + q)

    def velocity(u):
        return jvp(lambda u: M.retract(x, u), (u,), (v,))[1]

    first, second = jvp(velocity, (torch.zeros_like(x),), (v,))
    close(first, v, 1e-13)
    close(second, expected, 1e-12)
    w = torch.randn_like(x)
    inner = grad(lambda u: (w.conj() * M.retract(x, u)).real.sum())
    close(M.project(x, inner(torch.zeros_like(x))), M.project(x, w), 1e-13)
    close((v.conj() * jvp(inner, (torch.zeros_like(x),), (v,))[1]).real.sum(), (w.conj() * expected).real.sum(), 1e-12)


# ------------------------------------------------------------ logarithm and distance
@DOUBLE
@EVERY_METRIC
@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (4, 3), (5, 3), (9, 2), (30, 10)])
def test_log_inverts_exp_within_the_documented_radius(shape, metric, dtype):
    M = Stiefel(metric)
    radius = 1.5 if metric == "canonical" and dtype.is_complex else 2.0
    x = M.random(10, *shape, dtype=dtype)
    for length in (1e-8, 1e-2, 1.0, radius):
        u = tangent(M, x, length)
        y = M.exp(x, u)
        close(M.log(x, y), u, 1e-12)
        close(M.dist(x, y), torch.full((10,), length, dtype=torch.float64), 1e-12)
        close(M.dist(y, x), M.dist(x, y), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@EVERY_METRIC
def test_log_in_single_precision(metric, dtype):
    M = Stiefel(metric)
    x = M.random(10, 6, 3, dtype=dtype)
    for length in (0.0, 1e-3, 1.0):
        u = tangent(M, x, length)
        close(M.log(x, M.exp(x, u)), u, 3e-6)


def test_log_that_is_not_found_is_nan():
    x = E.random(5, 3, dtype=torch.float64)
    for M in (E, C):
        assert M.log(x, -x).isnan().all()
        assert M.dist(x, -x).isnan()
        far, near = M.log(x, torch.stack([-x, M.exp(x, tangent(M, x, 0.5))]))
        assert far.isnan().all() or (M.exp(x, far) + x).abs().max() < 1e-10
        assert near.isfinite().all()


@DOUBLE
def test_geodesics_agree_with_the_sphere_and_the_unitary_group(dtype):
    x = Sphere().random(6, 4, dtype=dtype)
    y = Sphere().exp(x, torch.nn.functional.normalize(Sphere().project(x, torch.randn_like(x)), dim=-1))
    close(E.log(x[..., None], y[..., None])[..., 0], Sphere().log(x, y), 1e-13)
    close(E.dist(x[..., None], y[..., None]), torch.ones(6, dtype=torch.float64), 1e-13)
    x = Unitary().random(6, 4, 4, dtype=dtype)
    u = tangent(Unitary(), x, 1.0)
    for M in (E, C):
        close(M.exp(x, u), Unitary().exp(x, u), 1e-13)
        close(M.log(x, Unitary().exp(x, u)), u, 1e-12)


@DOUBLE
@EVERY_METRIC
@pytest.mark.parametrize("shape", [(4, 2), (3, 1)])
def test_derivatives_of_log(shape, metric, dtype):
    M = Stiefel(metric)
    x = M.random(*shape, dtype=dtype)
    points = [x, M.exp(x, tangent(M, x, 0.6))]

    def log(x, y):
        return M.log(M.nearest(x), M.nearest(y))

    for pair in (points, [x, x]):
        pair = [t.clone().requires_grad_() for t in pair]
        assert torch.autograd.gradcheck(log, pair, rtol=1e-5, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(log, pair, rtol=1e-4, atol=1e-4, fast_mode=True)
    x, y = points
    g = grad(lambda x: M.dist(x, y) ** 2 / 2)(x)
    close(M.rgrad(x, g), -M.log(x, y), 1e-11)


@EVERY_METRIC
def test_log_under_vmap(metric):
    M = Stiefel(metric)
    x = M.random(3, 5, 2, dtype=torch.float64)
    y = M.exp(x, tangent(M, x, 1.0))
    close(vmap(M.log)(x, y), M.log(x, y), 1e-13)
    close(vmap(M.dist)(x, y), torch.ones(3, dtype=torch.float64), 1e-13)


# ------------------------------------------------------------ retractions
@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@EVERY_METRIC
def test_newton_schulz_is_feasible_up_to_its_step_limit(metric, dtype, accuracy):
    """The worst step of a given length is of rank one; twice the limit leaves the manifold visibly."""
    M = Stiefel(metric, "newton_schulz")
    x = M.random(20, 6, 2, dtype=dtype)
    normal = M.project(x, torch.randn_like(x))
    normal = (normal - x @ (x.mH @ normal))[..., :1] @ torch.tensor([[1.0, 0.0]], dtype=dtype)
    rotation = x @ torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=dtype)
    for u in (normal, rotation):
        u = u * (M.step_limit / M.norm(x, u))[:, None, None]
        assert M.residual(M.retract(x, u)).max() < accuracy
    if dtype == torch.float64:
        close(M.retract(x, u), Stiefel(metric, "polar").retract(x, u), 1e-13)
        long = 2 * normal * (M.step_limit / M.norm(x, normal))[:, None, None]
        assert M.residual(M.retract(x, long)).min() > 1e-8 or M.metric == "canonical"
    assert Stiefel(metric, "newton_schulz", polish=2).step_limit > M.step_limit > 0.4
    assert Stiefel(metric, "polar").step_limit == math.inf


def test_orders_and_isometries_as_documented():
    second = {(m, r) for m, r in itertools.product(METRICS, RETRACTIONS) if Stiefel(m, r).second_order}
    assert second == {
        ("euclidean", "polar"),
        ("euclidean", "newton_schulz"),
        ("euclidean", "exp"),
        ("canonical", "cayley"),
        ("canonical", "exp"),
    }
    assert [r for r in RETRACTIONS if Stiefel(retraction=r).isometric] == ["cayley"]


@DOUBLE
def test_cayley_carries_vectors_isometrically_for_both_metrics(dtype):
    for shape in ((8, 2), (5, 3), (4, 4)):
        x = E.random(10, *shape, dtype=dtype)
        u, v, w = (tangent(E, x) for _ in range(3))
        for M in (E, C):
            y, v1, w1 = M.move(x, u, v, w)
            close(M.inner(y, v1, w1), M.inner(x, v, w), 1e-12)
            close(M.project(y, v1), v1, 1e-13)


# ------------------------------------------------------------ uniform distribution
@pytest.mark.parametrize(("dtype", "fourth"), [(torch.float64, 3 / (4 * 6)), (torch.complex128, 2 / (4 * 5))])
def test_haar_moments(dtype, fourth):
    x = E.random(40_000, 4, 2, dtype=dtype)
    assert E.residual(x).max() < 1e-14
    for sample, mean in ((x, 0), (x.abs() ** 2, 1 / 4), (x.abs() ** 4, fourth)):
        error = (sample.mean(0) - mean).abs()
        assert (error < 5 * sample.std(0).abs() / 200).all()  # five standard errors
    phase = x[:, 0, 0] ** 2  # no preferred sign or phase: E X² = 0 for complex X
    assert phase.mean().abs() < 5 / 200 if dtype.is_complex else phase.mean() > 0.2


@DOUBLE
def test_random_is_reproducible_and_contiguous(dtype):
    first, second = (E.random(2, 5, 3, dtype=dtype, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.is_contiguous()
    assert first.dtype == dtype
    assert E.random(5, 3).dtype == torch.get_default_dtype()


# ------------------------------------------------------------ numbers at the edge


@pytest.mark.parametrize(
    "M",
    [pytest.param(M, id=repr(M)) for M in (Stiefel(*o) for o in itertools.product(METRICS, RETRACTIONS))],
)
def test_nan_stays_in_its_batch_element(M):
    x = M.random(3, 5, 2)
    u = tangent(M, x, 0.3)
    v = u.clone()
    v[1, 0, 0] = math.nan
    for f in (
        lambda t: M.move(x, t, u)[0],
        lambda t: M.move(x, t, u)[1],
        lambda t: M.exp(x, t),
        lambda t: M.log(x, x + t),
        lambda t: M.norm(x, t),
        lambda t: M.rgrad(x, t),
        M.residual,
    ):
        good, bad = f(u), f(v)
        torch.testing.assert_close(good[[0, 2]], bad[[0, 2]], rtol=0, atol=2e-6)
        assert bad[1].isnan().any()


def test_nan_stays_in_its_batch_element_of_nearest():
    z = torch.randn(3, 5, 2)
    good = E.nearest(z)
    z[1, 0, 0] = math.nan
    bad = E.nearest(z)
    torch.testing.assert_close(good[[0, 2]], bad[[0, 2]])
    assert bad[1].isnan().any()


@EVERY_OPTION
def test_empty_batches(M):
    for shape in ((5, 3), (3, 3), (1, 1)):
        x = M.random(0, *shape)
        y, v = M.move(x, x, x)
        assert y.shape == v.shape == M.exp(x, x).shape == M.log(x, x).shape == M.nearest(x).shape == (0, *shape)
        assert M.dist(x, x).shape == M.residual(x).shape == M.norm(x, x).shape == (0,)


@EVERY_OPTION
@DOUBLE
def test_a_single_number(M, dtype):
    """St(1, 1) is {−1, 1} or the unit circle."""
    x = M.random(20, 1, 1, dtype=dtype)
    u = tangent(M, x)
    if not dtype.is_complex:
        assert torch.equal(u.abs(), torch.zeros_like(u).abs())
        assert torch.equal(M.retract(x, u), x)
        assert set(x.flatten().tolist()) == {-1.0, 1.0}
    y = M.retract(x, 0.1 * u / u.abs().clamp(min=1e-9))
    close(y.abs(), torch.ones_like(y.real), 1e-14)


def test_value_semantics():
    assert repr(E) == "Stiefel()"
    assert repr(Stiefel("canonical", polish=0)) == "Stiefel(metric='canonical', polish=0)"
    assert Stiefel("euclidean", "cayley", 1) == E != C
    assert len({E, C, Stiefel(), Stiefel("canonical")}) == 2
    M = Stiefel("canonical", "qr", 2)
    assert pickle.loads(pickle.dumps(M)) == copy.deepcopy(M) == eval(repr(M)) == M
    with pytest.raises(ValueError, match="retraction of Stiefel must be one of"):
        Stiefel(retraction="cayly")
    with pytest.raises(ValueError, match="at least 2 dimension"):
        E.check_shape((3,))


@pytest.mark.parametrize("polish", [-1, 1.5, True, None])
def test_polish_is_a_count(polish):
    with pytest.raises(ValueError, match="polish of Stiefel must be an integer >= 0"):
        Stiefel(polish=polish)
