"""SPD: reference values, cases that users of comparable libraries met, invariances, float32 near the edge."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from manopt_torch import definite
from manopt_torch.manifolds import SPD

RETRACTIONS = ("exp", "second_order", "cayley")
EVERY_RETRACTION = pytest.mark.parametrize("retraction", RETRACTIONS)
DOUBLE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128])
CASES = json.loads((Path(__file__).parents[1] / "reference" / "spd.json").read_text("utf-8"))["cases"]
M = SPD()


def tensor(value: Any) -> Tensor:
    if isinstance(value, dict):
        return torch.complex(tensor(value["re"]), tensor(value["im"]))
    return torch.tensor(value, dtype=torch.float64)


def herm(a: Tensor) -> Tensor:
    return (a + a.mH) / 2


def tangent(x: Tensor, length: float | None = None) -> Tensor:
    """A random tangent vector at x, of given length in the metric if asked."""
    u = herm(torch.randn_like(x))
    return u if length is None else u * (length / M.norm(x, u))[..., None, None]


def conditioned(condition: float, n: int, dtype: torch.dtype, batch: int = 20) -> Tensor:
    """Dense matrices with eigenvalues from 1 to 1/condition, rounded once from double precision."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    q = torch.linalg.qr(torch.randn(batch, n, n, dtype=wide))[0]
    return herm((q * torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)) @ q.mH).to(dtype)


def wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def relative_error(y: Tensor, expected: Tensor) -> float:
    """Largest ‖y − expected‖ in the metric at ``expected``, which is in double precision."""
    return M.norm(expected, wide(y) - expected).max().item()


def close(x: Tensor, y: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(x, y.expand_as(x), rtol=tolerance, atol=tolerance * max(1.0, y.abs().max().item()))


# ------------------------------------------------------------------ values
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['field']}-{c['n']}")
def test_reference_values(case: dict[str, Any]) -> None:
    x, y, u, v, g = (tensor(case[k]) for k in "XYUVG")
    e = {k: tensor(value) for k, value in case["affine_invariant"].items()}
    assert x.is_complex() == (case["field"] == "complex")
    close(M.exp(x, u), e["exp"])
    close(M.retract(x, u), e["exp"])
    close(M.log(x, y), e["log"])
    close(M.dist(x, y), e["dist"])
    close(M.inner(x, u, v), e["inner"])
    close(M.norm(x, u), e["norm_U"])
    close(M.rgrad(x, g), e["rgrad"])
    close(M.exp(x, M.log(x, y) / 2), e["midpoint"])
    arrived, carried = M.move(x, M.log(x, y), u)
    close(arrived, y)
    close(carried, e["transport_X_to_Y"])


def test_case_14_inner_product() -> None:
    x = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    g = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    h = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    close(M.inner(x, g, h), torch.tensor(-4 / 9, dtype=torch.float64), 1e-15)
    close(M.inner(x, h, g), torch.tensor(-4 / 9, dtype=torch.float64), 1e-15)


@pytest.mark.parametrize("w", [[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, -1.0]]])
@EVERY_RETRACTION
def test_case_73_transport_keeps_the_norm(w: list[list[float]], retraction: str) -> None:
    x, y, v = tensor([[1.0, 0.0], [0.0, 1.0]]), tensor([[100.0, 0.0], [0.0, 0.01]]), tensor(w)
    arrived, carried = SPD(retraction=retraction).move(x, M.log(x, y), v)
    close(M.norm(arrived, carried), M.norm(x, v), 1e-12)
    if retraction == "exp":
        e = tensor([[10.0, 0.0], [0.0, 0.1]])
        close(arrived, y, 1e-12)
        close(carried, e @ v @ e.mH, 1e-12)


@DOUBLE
@EVERY_RETRACTION
def test_retraction_by_its_formula(retraction: str, dtype: torch.dtype) -> None:
    x = M.random(4, 4, dtype=dtype)
    for length in (1e-3, 0.9):
        u = tangent(x, length)
        root = scipy.linalg.sqrtm(x.numpy())
        inverse = np.linalg.inv(root)
        s, eye = inverse @ u.numpy() @ inverse, np.eye(4)
        expected = {
            "exp": root @ scipy.linalg.expm(s) @ root,
            "second_order": x.numpy() + u.numpy() + u.numpy() @ np.linalg.inv(x.numpy()) @ u.numpy() / 2,
            "cayley": root @ np.linalg.inv(eye - s / 2) @ (eye + s / 2) @ root,
        }[retraction]
        y = SPD(retraction=retraction).retract(x, u)
        close(y, torch.from_numpy(expected), 1e-13)


@DOUBLE
@EVERY_RETRACTION
def test_retraction_is_of_second_order(retraction: str, dtype: torch.dtype) -> None:
    manifold, x = SPD(retraction=retraction), M.random(3, 3, dtype=dtype)
    u = tangent(x, 1.0)
    errors = [torch.linalg.matrix_norm(manifold.retract(x, t * u) - M.exp(x, t * u)).item() for t in (0.02, 0.01)]
    assert manifold.second_order
    assert errors == [0, 0] if retraction == "exp" else math.log2(errors[0] / errors[1]) > 2.8


@DOUBLE
@EVERY_RETRACTION
def test_move_is_parallel_transport_to_the_new_point(retraction: str, dtype: torch.dtype) -> None:
    manifold, x = SPD(retraction=retraction), M.random(5, 3, 3, dtype=dtype)
    u, v, w = tangent(x, 0.8), tangent(x), tangent(x)
    y, v1, w1, mixed = manifold.move(x, u, v, w, 2 * v - 3 * w)
    close(y, manifold.retract(x, u), 1e-14)
    close(mixed, 2 * v1 - 3 * w1, 1e-13)
    assert torch.equal(v1, v1.mH)
    assert manifold.isometric
    close(M.inner(y, v1, w1), M.inner(x, v, w), 1e-12)
    for k in range(5):  # E = (Y X⁻¹)^½, by another library
        e = torch.from_numpy(scipy.linalg.sqrtm((y[k] @ torch.linalg.inv(x[k])).numpy()))
        close(v1[k], e @ v[k] @ e.mH, 1e-12)
    close(manifold.transport(x, u, v), v1, 0)


def test_exp_and_log_are_inverse_and_dist_is_the_length() -> None:
    for dtype in (torch.float64, torch.complex128):
        x = M.random(6, 4, 4, dtype=dtype)
        for length in (1e-8, 0.3, 3.0, 12.0):
            u = tangent(x, length)
            y = M.exp(x, u)
            assert M.norm(x, M.log(x, y) - u).max() <= 1e-6 * length if length < 1e-6 else 1e-9
            close(M.dist(x, y), M.norm(x, u), 1e-7 if length < 1e-6 else 1e-10)
            close(M.dist(y, x), M.dist(x, y), 1e-10)


# ------------------------------------------------------------------ invariances
@DOUBLE
def test_congruence_is_an_isometry(dtype: torch.dtype) -> None:
    x, y = M.random(2, 5, 4, 4, dtype=dtype)
    u, v = tangent(x, 0.7), tangent(x)
    a = torch.randn(5, 4, 4, dtype=dtype) + torch.eye(4)

    def by(z: Tensor) -> Tensor:
        return a @ z @ a.mH

    close(M.inner(by(x), by(u), by(v)), M.inner(x, u, v), 1e-9)
    close(M.dist(by(x), by(y)), M.dist(x, y), 1e-9)
    close(M.log(by(x), by(y)), by(M.log(x, y)), 1e-9)
    for retraction in RETRACTIONS:
        manifold = SPD(retraction=retraction)
        for moved, expected in zip(manifold.move(by(x), by(u), by(v)), manifold.move(x, u, v), strict=True):
            close(moved, by(expected), 1e-9)
    for g in (torch.randn_like(x),):  # the gradient of f(A⁻¹ · A⁻ᴴ) is A⁻ᴴ G A⁻¹
        inverse = torch.linalg.inv(a)
        close(M.rgrad(by(x), inverse.mH @ g @ inverse), by(M.rgrad(x, g)), 1e-9)


@DOUBLE
def test_inversion_is_an_isometry(dtype: torch.dtype) -> None:
    x, y = M.random(2, 5, 4, 4, dtype=dtype)
    close(M.dist(torch.linalg.inv(x), torch.linalg.inv(y)), M.dist(x, y), 1e-12)


@DOUBLE
def test_riemannian_gradient_represents_the_derivative(dtype: torch.dtype) -> None:
    x = M.random(4, 4, dtype=dtype)
    u, c = tangent(x), torch.randn(4, 4, dtype=dtype)

    def f(x: Tensor) -> Tensor:
        return (c.conj() * (x @ x @ c)).real.sum()

    r = M.rgrad(x, grad(f)(x))
    assert torch.equal(r, r.mH)
    close(M.inner(x, r, u), jvp(f, (x,), (u,))[1], 1e-12)


# ------------------------------------------------------------------ cases of derivatives
def test_case_07_gradient_of_dist_at_the_identity() -> None:
    x, y = torch.eye(3, requires_grad=True), torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    d = M.dist(x, y)
    (gradient,) = torch.autograd.grad(d, x)
    close(d, torch.tensor([0.0, math.log(2), math.log(3)]).norm(), 1e-6)
    close(gradient, -torch.diag(y.diagonal().log()) / d.detach(), 1e-6)


@EVERY_DTYPE
def test_distance_to_itself_is_zero_with_zero_gradient(dtype: torch.dtype) -> None:
    for x in (M.random(3, 3, dtype=dtype), torch.eye(3, dtype=dtype), conditioned(1e5, 3, dtype)):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        d = M.dist(a, b)
        assert (d == 0).all()
        for gradient in torch.autograd.grad(d.sum(), (a, b)):
            assert (gradient == 0).all()


@EVERY_DTYPE
def test_log_of_coincident_points(dtype: torch.dtype) -> None:
    """log_x(x) = 0 exactly; its derivative is −I by x and I by y."""
    x = M.random(3, 3, dtype=dtype)
    e = tangent(x)
    assert (M.log(x, x) == 0).all()
    tolerance = 1000 * torch.finfo(dtype).eps
    close(jvp(lambda z: M.log(x, z), (x,), (e,))[1], e, tolerance)
    close(jvp(lambda z: M.log(z, x), (x,), (e,))[1], -e, tolerance)


@EVERY_DTYPE
def test_case_08_norm_of_zero_has_gradient_zero(dtype: torch.dtype) -> None:
    x = torch.eye(3, dtype=dtype, requires_grad=True)
    u = torch.zeros(3, 3, dtype=dtype, requires_grad=True)
    norm = M.norm(x, u)
    assert norm == 0
    for gradient in torch.autograd.grad(norm, (x, u)):
        assert (gradient == 0).all()


@EVERY_RETRACTION
def test_second_derivative_along_retractions(retraction: str) -> None:
    """f = log det, linear along geodesics; and ½ dist², in all modes and where eigenvalues repeat."""
    manifold = SPD(retraction=retraction)
    zero, one = torch.tensor(0.0).double(), torch.tensor(1.0).double()
    for dtype in (torch.float64, torch.complex128):
        y = M.random(3, 3, dtype=dtype)
        for x in (torch.eye(3, dtype=dtype), M.random(3, 3, dtype=dtype)):
            u, w, origin = tangent(x, 0.5), tangent(x, 0.5), torch.zeros_like(x)

            def log_det(t: Tensor, x: Tensor = x, u: Tensor = u) -> Tensor:
                factor = torch.linalg.cholesky(manifold.retract(x, t * u))  # (the second jvp of torch.logdet is wrong)
                return 2 * factor.diagonal().real.log().sum()

            rate = torch.linalg.solve(x, u).diagonal().sum().real
            close(jvp(log_det, (zero,), (one,))[1], rate, 1e-13)
            assert abs(jvp(lambda t: jvp(log_det, (t,), (one,))[1], (zero,), (one,))[1]) < 1e-12

            def f(v: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
                return M.dist(manifold.retract(x, v), y) ** 2 / 2

            def inner(a: Tensor, b: Tensor) -> Tensor:
                return (a.conj() * b).real.sum()

            forward = jvp(lambda v: jvp(f, (v,), (u,))[1], (origin,), (w,))[1]  # noqa: B023
            h = 1e-4
            finite = (f(h * (u + w)) - f(h * (u - w)) - f(h * (w - u)) + f(-h * (u + w))) / (4 * h * h)
            torch.testing.assert_close(forward, finite, rtol=1e-5, atol=1e-6)
            reverse = inner(jvp(grad(f), (origin,), (w,))[1], u)
            close(reverse, forward, 1e-11)
            mixed = inner(vjp(lambda v: jvp(f, (v,), (u,))[1], origin)[1](one)[0], w)  # noqa: B023
            close(mixed, forward, 1e-11)


@EVERY_RETRACTION
def test_retract_is_differentiable_where_eigenvalues_repeat(retraction: str) -> None:
    manifold = SPD(retraction=retraction)
    x = torch.stack([torch.eye(2), 3 * torch.eye(2)]).to(torch.complex128)
    for u in (torch.zeros_like(x), 0.2 * x):

        def f(x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return manifold.move(herm(x), herm(u), herm(v))

        inputs = tuple(t.clone().requires_grad_() for t in (x, u, torch.randn_like(x)))
        assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(f, inputs, check_fwd_over_rev=True, fast_mode=True)


# ------------------------------------------------------------------ steps
@EVERY_DTYPE
@EVERY_RETRACTION
def test_results_are_exactly_hermitian_and_zero_steps_keep_the_bits(retraction: str, dtype: torch.dtype) -> None:
    manifold, x = SPD(retraction=retraction), conditioned(1e3, 5, dtype, batch=4)
    u = tangent(x, 0.5)
    u[::2] = 0
    y, v = manifold.move(x, u, tangent(x))
    for t in (y, v, manifold.retract(x, u), manifold.exp(x, u), manifold.log(x, x.roll(1, 0)), manifold.nearest(x)):
        assert t.dtype == dtype
        assert torch.equal(t, t.mH)
        assert t.is_contiguous()
    assert torch.equal(y[::2], x[::2])
    assert not torch.equal(y[1::2], x[1::2])
    assert torch.equal(manifold.exp(x, u)[::2], x[::2])
    assert (manifold.residual(y) == 0).all()


def test_second_order_step_is_positive_definite_however_long() -> None:
    manifold, x = SPD(retraction="second_order"), M.random(50, 4, 4, dtype=torch.float64)
    for length in (1.0, 1e2, 1e4):
        y = manifold.retract(x, tangent(x, length))
        assert (torch.linalg.eigvals(torch.linalg.solve(x, y)).real >= 0.5 - 1e-7).all()  # y ≥ x/2


def test_cayley_step_limit() -> None:
    manifold, x = SPD(retraction="cayley"), M.random(50, 4, 4, dtype=torch.complex128)
    assert manifold.step_limit == definite.CAYLEY_LIMIT == 1
    assert SPD().step_limit == SPD(retraction="second_order").step_limit == math.inf
    u = tangent(x, 1.0)
    for length in (1.0, 2.0, 100.0, 1e6):
        close(manifold.retract(x, length * u), manifold.retract(x, (1 - 1e-15) * u), 1e-12)
        change = torch.linalg.eigvals(torch.linalg.solve(x, manifold.retract(x, length * u))).real
        assert (change > 1 / 3 - 1e-9).all()
        assert (change < 3 + 1e-9).all()
    e = torch.eye(4, dtype=torch.complex128)
    close(manifold.retract(e, 0.499 * e), (1.2495 / 0.7505) * e, 1e-14)  # ‖u‖ = 0.998: untouched
    both = torch.cat([0.5 * u[:25], 7 * u[25:]])  # each point by itself
    close(manifold.retract(x, both)[:25], manifold.retract(x[:25], 0.5 * u[:25]), 1e-14)


def test_a_long_exponential_step_stays_positive_definite() -> None:
    x = M.random(20, 3, 3)
    assert (M.residual(M.exp(x, -20 * x)) == 0).all()
    close(M.exp(x, -20 * x), math.exp(-20) * x, 1e-2)
    close(M.exp(x, 20 * x) / math.exp(20), x, 1e-4)


class CountEigh(TorchDispatchMode):
    """Counts eigendecompositions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "eig" in func.__name__ or "svd" in func.__name__
        return func(*args, **(kwargs or {}))


@EVERY_RETRACTION
def test_eigendecompositions_per_step(retraction: str) -> None:
    manifold, x = SPD(retraction=retraction), M.random(4, 3, 3)
    u = tangent(x, 0.1)
    with CountEigh() as counter:
        manifold.rgrad(x, u)
        manifold.inner(x, u, u)
        manifold.residual(x)
        assert counter.count == 0
        manifold.retract(x, u)
        assert counter.count == (retraction == "exp")
        counter.count = 0
        manifold.move(x, u, u, u, u)
        assert counter.count == 1


@EVERY_RETRACTION
def test_step_compiles_without_graph_break(retraction: str) -> None:
    manifold, x = SPD(retraction=retraction), M.random(4, 3, 3)
    u = tangent(x, 0.1)

    def step(x: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        r = manifold.rgrad(x, g)
        return manifold.inner(x, r, r), *manifold.move(x, r, m)

    with torch.no_grad():
        for a, b in zip(torch.compile(step, backend="eager", fullgraph=True)(x, u, u), step(x, u, u), strict=True):
            close(a, b, 1e-6)


@EVERY_RETRACTION
def test_batched_is_a_loop_and_vmap(retraction: str) -> None:
    manifold = SPD(retraction=retraction)
    x = M.random(2, 3, 4, 4, dtype=torch.complex128)
    u, v = tangent(x, 0.5), tangent(x)
    batched = manifold.move(x, u, v)
    mapped = vmap(vmap(manifold.move))(x, u, v)
    for b, m in zip(batched, mapped, strict=True):
        close(m, b, 1e-13)
    for i, j in np.ndindex(2, 3):
        for b, single in zip(batched, manifold.move(x[i, j], u[i, j], v[i, j]), strict=True):
            close(single, b[i, j], 1e-13)
    y = x.roll(1, 0)
    close(vmap(vmap(M.dist))(x, y), M.dist(x, y), 1e-13)
    # broadcasting: one point, many vectors
    close(M.inner(x[0, 0], u, v)[1, 2], M.inner(x[0, 0], u[1, 2], v[1, 2]), 1e-13)
    close(manifold.retract(x[0, 0], u)[1, 2], manifold.retract(x[0, 0], u[1, 2]), 1e-13)
    assert M.project(x, v[0, 0]).shape == x.shape


# ------------------------------------------------------------------ precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_short_and_long_distances_keep_their_digits(dtype: torch.dtype) -> None:
    x = M.random(20, 5, 5, dtype=dtype)
    for size in (1e-1, 1e-3, 1e-5, 1e-6):
        y = x + size * tangent(x)
        close(M.dist(x, y) / M.dist(wide(x), wide(y)), torch.ones(()).double(), 2e-5)
    eye = torch.eye(2, dtype=dtype)
    for scale in (1e-9, 1e9):
        close(M.dist(eye, scale * eye), torch.tensor(math.sqrt(2) * math.log(1e9)), 1e-6)
    y = torch.diag(torch.tensor([1e3, 1e-3])).to(dtype)
    close(M.dist(eye, y), torch.tensor(math.sqrt(2) * math.log(1e3)), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@EVERY_RETRACTION
def test_a_short_step_is_rounded_once(retraction: str, dtype: torch.dtype) -> None:
    manifold, x = SPD(retraction=retraction), M.random(50, 8, 8, dtype=dtype)
    u = tangent(x, 1e-3)
    y, exact = wide(manifold.retract(x, u)), manifold.retract(wide(x), wide(u))
    for part in ((lambda t: t.real), (lambda t: t.imag)) if dtype.is_complex else (lambda t: t,):
        rounding = torch.finfo(dtype).eps / 2 * part(exact).abs()
        assert (part(y - exact).abs() <= rounding + 0.02 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_float32_error_is_epsilon_times_the_condition_number(condition: float, dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps * condition
    for n in (3, 12):
        x = conditioned(condition, n, dtype)
        factor = torch.linalg.cholesky(wide(x))
        whitened = [herm(torch.randn_like(factor)) for _ in range(2)]
        whitened = [w / torch.linalg.matrix_norm(w, keepdim=True) for w in whitened]
        u, v = (herm(factor @ w @ factor.mH).to(dtype) for w in whitened)
        assert (M.residual(x) == 0).all()
        for retraction in RETRACTIONS:
            manifold = SPD(retraction=retraction)
            for size in (1e-4, 0.3):
                step = (size * u).to(dtype)
                y, carried = manifold.move(x, step, v)
                y_wide, carried_wide = manifold.move(wide(x), wide(step), wide(v))
                assert relative_error(y, y_wide) < 2 * n * unit
                assert M.norm(y_wide, wide(carried) - carried_wide).max() < 8 * n * unit
                assert (M.residual(y) == 0).all()
        assert ((M.norm(x, u) - M.norm(wide(x), wide(u))).abs() < 4 * n * unit).all()
        y = x.roll(
            1, 0
        )  # as far from x as can be: the eigenvalues of X⁻¹Y range over the square of the condition number
        assert ((M.dist(x, y) - M.dist(wide(x), wide(y))).abs() < n * unit + 1e-5).all()


def test_case_10_near_singular_float32() -> None:
    negative = 0
    eye = torch.eye(4)
    for dtype in (torch.float32, torch.complex64):
        wide_dtype = torch.complex128 if dtype.is_complex else torch.float64
        q = torch.linalg.qr(torch.randn(50, 4, 4, dtype=wide_dtype))[0]
        x = herm((q * torch.tensor([1e-8, 1.0, 1.0, 100.0])) @ q.mH).to(dtype).requires_grad_()
        negative += int((torch.linalg.eigvalsh(x.detach()) < 0).sum())
        u = tangent(x.detach())
        results = [M.dist(eye.to(dtype), x), M.dist(x, eye.to(dtype)), M.norm(x, u), M.log(x, eye.to(dtype))]
        results += [M.nearest(x), M.rgrad(x, u), M.log(eye.to(dtype), x)]
        results += [SPD(retraction=r).retract(x, M.rgrad(x, u) / 1000) for r in RETRACTIONS]
        for result in results:
            (gradient,) = torch.autograd.grad(result.abs().sum(), x)
            assert result.isfinite().all()
            assert gradient.isfinite().all()
    assert negative > 10


def test_a_nan_point_is_seen_and_hurts_no_other() -> None:
    x = M.random(3, 4, 4)
    x[1] = torch.nan
    u = tangent(M.random(3, 4, 4))
    for retraction in RETRACTIONS:
        y = SPD(retraction=retraction).retract(x, u / 10)
        assert y.isnan().flatten(1).any(1).tolist() == [False, True, False]
    assert M.dist(x, torch.eye(4)).isnan().tolist() == [False, True, False]
    assert M.residual(x).tolist() == [0, math.inf, 0]


def test_an_indefinite_point_gives_nan_and_not_a_number() -> None:
    for diagonal in ([1.0, -1.0], [-1.0, 1.0]):
        x = torch.diag(torch.tensor(diagonal))
        for result in (M.norm(x, x), M.inner(x, x, x), M.dist(x, torch.eye(2)), M.dist(torch.eye(2), x)):
            assert result.isnan()
        for retraction in RETRACTIONS:
            assert SPD(retraction=retraction).retract(x, torch.eye(2)).isnan().any()


# ------------------------------------------------------------------ feasibility
@EVERY_DTYPE
def test_residual(dtype: torch.dtype) -> None:
    x = M.random(7, 3, 3, dtype=dtype)
    assert (M.residual(x) == 0).all()
    k = torch.randn(7, 3, 3, dtype=dtype)
    k = (k - k.mH) / 100
    expected = torch.linalg.matrix_norm(k) / torch.linalg.matrix_norm(x + k)
    torch.testing.assert_close(M.residual(x + k), expected)
    bad = [torch.diag(torch.tensor(d, dtype=dtype)) for d in ([-1.0, 1.0], [0.0, 1.0], [math.inf, 1.0], [0.0, 0.0])]
    nan_above = torch.eye(2, dtype=dtype)
    nan_above[0, 1] = torch.nan
    assert (
        M.residual(torch.stack([*bad, nan_above, nan_above.mH, -torch.eye(2, dtype=dtype)])).tolist() == [math.inf] * 7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_case_11_nearest_at_the_boundary(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for diagonal in ([-1.0, 2.0], [0.0, 2.0]):
        x = M.nearest(torch.diag(torch.tensor(diagonal, dtype=dtype)))
        assert 0 < x[0, 0] < 100 * eps
        close(x, torch.diag(torch.tensor([0.0, 2.0], dtype=dtype)), 100 * eps)
        assert M.residual(x) == 0
        assert M.inner(x, x, x).isfinite()
    for z in (torch.zeros(2, 2, dtype=dtype), -torch.eye(2, dtype=dtype)):
        assert M.residual(M.nearest(z)) == 0


@EVERY_DTYPE
def test_nearest(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for n in (1, 2, 5, 40):
        z = torch.randn(8, n, n, dtype=dtype) * torch.logspace(-3, 3, 8).to(dtype.to_real())[:, None, None]
        x = M.nearest(z)
        assert (M.residual(x) == 0).all()
        size = torch.linalg.matrix_norm(z)
        values, vectors = np.linalg.eigh(wide(herm(z)).numpy())
        clamped = torch.from_numpy((vectors * values.clip(0)[:, None]) @ vectors.conj().swapaxes(-1, -2))
        assert (torch.linalg.matrix_norm(wide(x) - clamped) <= 40 * n**1.5 * eps * size).all()
        assert (torch.linalg.matrix_norm(M.nearest(x) - x) <= 40 * math.sqrt(n) * eps * size).all()
    inside = M.random(8, 4, 4, dtype=dtype)
    assert (torch.linalg.matrix_norm(M.nearest(inside) - inside) <= 40 * eps * torch.linalg.matrix_norm(inside)).all()
    with pytest.raises(ValueError, match="square"):
        M.nearest(torch.randn(3, 2))


def test_nearest_is_differentiable_where_eigenvalues_repeat() -> None:
    e = torch.randn(3, 3).double()
    close(jvp(M.nearest, (torch.eye(3).double(),), (e,))[1], herm(e), 1e-14)
    close(jvp(M.nearest, (-torch.eye(3).double(),), (e,))[1], torch.zeros(3, 3).double(), 1e-14)
    q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.complex128))[0]
    z = ((q * torch.tensor([-1.0, -1.0, 0.5, 0.5, 2.0])) @ q.mH).requires_grad_()
    assert torch.autograd.gradcheck(M.nearest, (z,), check_forward_ad=True)


# ------------------------------------------------------------------ random, dim, shapes
def test_random_is_invariant_under_inversion_and_rotation() -> None:
    for dtype in (torch.float64, torch.complex128):
        x = M.random(4000, 3, 3, dtype=dtype)
        assert (M.residual(x) == 0).all()
        logs = torch.linalg.eigvalsh(x).log()
        assert logs.abs().max() < 2.5
        assert logs.mean().abs() < 0.03  # X and X⁻¹ have the same distribution
        # ‖herm A‖²/2n with E‖herm A‖² = n(n + 1)/2 real, n²/2 complex
        assert abs(logs.square().sum(-1).mean() - (0.75 if dtype.is_complex else 1.0)) < 0.05
        diagonal = x.diagonal(dim1=-2, dim2=-1).real.mean(0)
        assert (diagonal - diagonal.mean()).abs().max() < 0.05
        assert (x[:, 0, 1].mean()).abs() < 0.03
    assert torch.linalg.cond(M.random(200, 30, 30)).max() < 20


def test_random_is_reproducible_and_independent() -> None:
    """CASES 20: the points of a batch do not commute."""
    for dtype in (torch.float32, torch.complex64, torch.float64, torch.complex128):
        a, b = (M.random(2, 3, 3, dtype=dtype, generator=torch.Generator().manual_seed(5)) for _ in range(2))
        assert torch.equal(a, b)
        assert a.dtype == dtype
        assert torch.linalg.matrix_norm(a[0] @ a[1] - a[1] @ a[0]) > 1e-2
        if dtype.is_complex:
            assert a.imag.abs().max() > 1e-2
    assert M.random(2, 2).dtype == torch.get_default_dtype()
    half = M.random(20, 3, 3, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert (M.residual(half) == 0).all()


def test_dim() -> None:
    """CASES 19."""
    assert M.dim(3, 3, dtype=torch.complex64) == 9
    assert M.dim(3, 3) == 6
    assert M.dim(5, 2, 4, 4, dtype=torch.complex128) == 160
    for dtype in (torch.float64, torch.complex128):
        assert M.dim(2, 3, 3, dtype=dtype) == super(SPD, M).dim(2, 3, 3, dtype=dtype)  # trace of the projection


def test_shapes_are_checked() -> None:
    M.check_shape((2, 3, 3))
    for shape in ((3,), (3, 2), (5, 2, 3)):
        with pytest.raises(ValueError, match=r"SPD\(\) needs"):
            M.check_shape(shape)
    with pytest.raises(ValueError, match=r"F @ F\.mH"):
        M.random(3, 2)
    with pytest.raises(ValueError, match="retraction"):
        SPD(retraction="cayly")  # type: ignore[arg-type]
    assert repr(SPD(retraction="cayley")) == "SPD(retraction='cayley')"


# ------------------------------------------------------------------ what it is for
@DOUBLE
def test_mean_of_commuting_matrices_is_the_exponential_of_the_mean_log(dtype: torch.dtype) -> None:
    q = torch.linalg.qr(torch.randn(4, 4, dtype=dtype))[0]
    logs = torch.randn(6, 4).double()
    data = herm((q * logs.exp()[:, None, :]) @ q.mH)
    expected = (q * logs.mean(0).exp()) @ q.mH
    for retraction in RETRACTIONS:
        manifold, x = SPD(retraction=retraction), M.random(4, 4, dtype=dtype)
        for _ in range(60):
            x.requires_grad_()
            (g,) = torch.autograd.grad((M.dist(x, data) ** 2).mean() / 2, x)
            x = x.detach()
            x = manifold.retract(x, -0.7 * manifold.rgrad(x, g))
        assert M.dist(x, expected) < 1e-9


def test_many_float32_steps_stay_inside() -> None:
    for dtype in (torch.float32, torch.complex64):
        for retraction in RETRACTIONS:
            manifold, x = SPD(retraction=retraction), M.random(4, 3, 3, dtype=dtype)
            target = conditioned(1e3, 3, dtype, batch=4)
            for _ in range(300):
                x = manifold.retract(x, 0.1 * manifold.log(x, target))
            assert torch.equal(x, x.mH)
            assert (manifold.residual(x) == 0).all()
            assert relative_error(x, wide(target)) < 5e-3


@EVERY_DTYPE
@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e20, 1e30])
def test_membership_and_nearest_at_any_scale(scale: float, dtype: torch.dtype) -> None:
    """Squares of the entries would underflow or overflow in float32."""
    x, z = M.random(7, 3, 3, dtype=dtype), torch.randn(7, 3, 3, dtype=dtype)
    assert (M.residual(x * scale) == 0).all()
    k = (z - z.mH) / 100
    torch.testing.assert_close(M.residual((x + k) * scale), M.residual(x + k))
    y = M.nearest(z * scale)
    assert (M.residual(y) == 0).all()
    torch.testing.assert_close(y / scale, M.nearest(z))
