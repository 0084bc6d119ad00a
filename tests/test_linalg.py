"""Matrix kernels against SciPy, the reference file, and the identities that define them."""

import itertools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from manopt_torch import linalg
from manopt_torch.linalg import (
    cayley,
    expm_skew,
    herm,
    keep_zero_steps,
    log_unitary,
    lyapunov,
    newton_schulz,
    polar,
    polar_newton_schulz,
    qr_positive,
    skew,
)

DOUBLE = (torch.float64, torch.complex128)
SINGLE = (torch.float32, torch.complex64)
SHAPES = ((1, 1), (4, 1), (3, 3), (6, 2), (6, 3), (6, 4), (7, 6))  # both forms, p = 1, n = 1, 2p = n
FORMS = (linalg._cayley_full, linalg._cayley_low_rank)
REFERENCE = json.loads((pathlib.Path(__file__).parent / "reference" / "cayley.json").read_text())["cases"]

double = pytest.mark.parametrize("dtype", DOUBLE)
single = pytest.mark.parametrize("dtype", SINGLE)
shapes = pytest.mark.parametrize("shape", SHAPES)
forms = pytest.mark.parametrize("form", FORMS)


def real(entries: Any) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def gaussian(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def orthonormal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """From NumPy, not from the code under test."""
    return torch.from_numpy(
        np.ascontiguousarray(np.linalg.qr(gaussian(*shape, dtype=dtype, seed=1000 + seed).numpy())[0])
    )


def tangent(x: Tensor, seed: int = 1, length: float | None = None) -> Tensor:
    z = gaussian(*x.shape, dtype=x.dtype, seed=seed)
    s = x.mH @ z
    u = z - x @ (s + s.mH) / 2
    if length is None or not u.any():  # O(1) has no tangents
        return u
    return u * (length / torch.linalg.matrix_norm(u, 2)[..., None, None])


def skew_hermitian(*shape: int, dtype: torch.dtype, largest: float, seed: int = 0) -> Tensor:
    """With largest angle ``largest``."""
    a = gaussian(*shape, dtype=dtype, seed=seed)
    a = a - a.mH
    return a * (largest / torch.linalg.matrix_norm(a, 2)[..., None, None])


def eye(n: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(n, dtype=dtype)


def residual(x: Tensor) -> float:
    return torch.linalg.matrix_norm(x.mH @ x - eye(x.shape[-1], x.dtype)).max().item()


def generator_of(x: Tensor, u: Tensor) -> Tensor:
    """W of the Cayley step, from its definition."""
    half = eye(x.shape[-2], x.dtype) - x @ x.mH / 2
    return half @ u @ x.mH - x @ u.mH @ half


def rotation_of(x: Tensor, u: Tensor) -> Tensor:
    """Q of the Cayley step by SciPy, for one point."""
    w = generator_of(x, u).numpy()
    one = np.eye(len(w))
    return torch.from_numpy(scipy.linalg.solve(one - w / 2, one + w / 2)).to(x.dtype)


def by_scipy(f: Callable[..., Any], *matrices: Tensor) -> Tensor:
    """``f`` of SciPy on every matrix of a batch of shape (B, n, p)."""
    return torch.stack(
        [torch.from_numpy(np.asarray(f(*(m.numpy() for m in ms)))) for ms in zip(*matrices, strict=True)]
    )


def matrix(entry: Any) -> Tensor:
    if isinstance(entry, dict):
        return torch.complex(real(entry["re"]), real(entry["im"]))
    return real(entry)


# ------------------------------------------------------------------ Cayley: values
@pytest.mark.parametrize("case", REFERENCE, ids=lambda c: f"{c['kind']}-{c['field']}-{c['n']}-{c['p']}-{c['lam']}")
def test_cayley_reproduces_the_reference(case: dict[str, Any]) -> None:
    x, gradient, expected = (matrix(case[k]) for k in ("X", "canonical_grad", "Y"))
    u = -case["lam"] * gradient
    for y in (cayley(x, u)[0], cayley(x, u, polish=0)[0], *(form(x, u, ())[0] for form in FORMS)):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)


def test_reference_covers_both_forms_and_fields() -> None:
    assert len(REFERENCE) == 46
    assert {(2 * c["p"] > c["n"], c["field"]) for c in REFERENCE} == {
        (a, b) for a in (True, False) for b in ("real", "complex")
    }


@double
@shapes
@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_cayley_is_the_rotation_of_its_definition(shape: tuple[int, int], dtype: torch.dtype, length: float) -> None:
    x = orthonormal(*shape, dtype=dtype)
    u = tangent(x, length=length)
    v, z = tangent(x, seed=2), gaussian(*shape, dtype=dtype, seed=3)  # Q acts on any matrix, not only on tangents
    q = rotation_of(x, u)
    torch.testing.assert_close(generator_of(x, u) @ x, u, rtol=0, atol=1e-14 * max(1, length))
    results = [cayley(x, u, v, z)]
    results += [(lambda y, vs, _: (y, *vs))(*form(x, u, (v, z))) for form in FORMS]
    for y, v_moved, z_moved in results:
        torch.testing.assert_close(y, q @ x, rtol=0, atol=1e-11)
        torch.testing.assert_close(v_moved, q @ v, rtol=0, atol=1e-9)
        torch.testing.assert_close(z_moved, q @ z, rtol=0, atol=1e-9)


@double
@shapes
def test_carried_vectors_are_tangent_isometric_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(5, *shape, dtype=dtype)
    u, v, w = (tangent(x, seed=s) for s in (1, 2, 3))
    y, v_moved, w_moved, combined = cayley(x, u, v, w, 2 * v - 3 * w)
    s = y.mH @ v_moved
    torch.testing.assert_close(s + s.mH, torch.zeros_like(s), rtol=0, atol=1e-13)
    torch.testing.assert_close(v_moved.mH @ w_moved, v.mH @ w, rtol=0, atol=1e-12)
    torch.testing.assert_close(combined, 2 * v_moved - 3 * w_moved, rtol=0, atol=1e-12)


@double
def test_square_orthogonal_steps_keep_the_determinant(dtype: torch.dtype) -> None:
    x = orthonormal(6, 4, 4, dtype=dtype)
    x[::2, :, 0] *= -1
    y = cayley(x, tangent(x, length=50.0))[0]
    if dtype.is_complex:
        torch.testing.assert_close(torch.linalg.det(y).abs(), torch.ones(6).double())
    else:
        torch.testing.assert_close(torch.linalg.det(y), torch.linalg.det(x))


@shapes
def test_cayley_of_real_points_embeds_in_complex(shape: tuple[int, int]) -> None:
    x = orthonormal(*shape, dtype=torch.float64)
    u, v = tangent(x), tangent(x, seed=2)
    for real, embedded in zip(cayley(x, u, v), cayley(*(t + 0j for t in (x, u, v))), strict=True):
        torch.testing.assert_close(real + 0j, embedded)


@pytest.mark.parametrize("dtype", [*SINGLE, *DOUBLE])
@shapes
def test_zero_steps_keep_every_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(40, *shape, dtype=dtype)
    x[:10] *= 1 + 1e-3  # even off the manifold
    u, v = tangent(x), tangent(x, seed=2)
    u[::2] = 0
    y, v_moved = cayley(x, u, v)
    assert torch.equal(y[::2], x[::2])
    assert torch.equal(v_moved[::2], v[::2])
    if shape != (1, 1) or dtype.is_complex:
        assert not (y[1::2] == x[1::2]).flatten(1).all(1).any()
    assert torch.equal(cayley(x, torch.zeros_like(x), polish=3)[0], x)


# ------------------------------------------------------------------ Cayley: rounding
@single
@pytest.mark.parametrize("shape", [(16, 16), (16, 12), (64, 8), (96, 32), (256, 64)])
@pytest.mark.parametrize("spectrum", ["flat", "one", "graded"])
@pytest.mark.parametrize("length", [1e-4, 1.0, 30.0, 1e3])
def test_single_precision_stays_feasible_at_any_length(
    shape: tuple[int, int], dtype: torch.dtype, spectrum: str, length: float
) -> None:
    n, p = shape
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = orthonormal(2, n, p, dtype=wide)
    z = gaussian(2, n, p, dtype=wide)
    if spectrum == "one":  # one direction a thousand times longer than the others
        z = gaussian(2, n, 1, dtype=wide) @ gaussian(2, 1, p, dtype=wide, seed=5) + 1e-3 * z
    if spectrum == "graded":
        z = (
            orthonormal(2, n, p, dtype=wide, seed=7)
            * torch.logspace(-3, 0, p).double()
            @ orthonormal(2, p, p, dtype=wide)
        )
    s = x.mH @ z
    u = z - x @ (s + s.mH) / 2
    u = u * (length / torch.linalg.matrix_norm(u, 2)[..., None, None])
    v = tangent(x, seed=9)
    y, v_moved = cayley(x.to(dtype), u.to(dtype), v.to(dtype))
    assert residual(y) < 4e-6
    eps = torch.finfo(dtype).eps
    accuracy = eps * max(1, length) ** (1 if 2 * p > n else 2)
    exact, v_exact = cayley(x, u, v)
    assert (y - exact).abs().max() < 4 * eps + accuracy / 4
    assert (torch.linalg.matrix_norm(v_moved - v_exact) < (4 * eps + accuracy / 2) * torch.linalg.matrix_norm(v)).all()


@single
@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (64, 16)])
@pytest.mark.parametrize("length", [1e-4, 1e-2, 1.0])
def test_single_precision_does_not_drift(shape: tuple[int, int], dtype: torch.dtype, length: float) -> None:
    """The path of 300 steps follows the one in double precision: no bias in the point, none in the carried vector."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = orthonormal(1, *shape, dtype=wide)
    x, v_exact = exact.to(dtype), tangent(exact, seed=3)
    v = v_exact.to(dtype)
    fields = [gaussian(1, *shape, dtype=dtype, seed=s) for s in range(8)]
    fields = [z * (length / torch.linalg.matrix_norm(z, 2)) for z in fields]
    for i in range(300):
        z = fields[i % 8]
        x, v = cayley(x, z - x @ herm(x.mH @ z), v)
        z = z.to(wide)
        exact, v_exact = cayley(exact, z - exact @ herm(exact.mH @ z), v_exact)
    assert residual(x) < 2e-6
    assert (x - exact).abs().max() < 2e-6
    assert (v - v_exact).norm() < 2e-5 * v_exact.norm()


@single
def test_polish_repairs_a_drifted_point(dtype: torch.dtype) -> None:
    x = orthonormal(32, 32, dtype=dtype)
    x = x + 1e-3 * gaussian(32, 32, dtype=dtype) / math.sqrt(32)
    u = tangent(x, length=1e-2)
    errors = [residual(cayley(x, u, polish=k)[0]) for k in range(3)]
    assert errors[0] > 1e-3
    assert errors[1] < errors[0] ** 2
    assert errors[2] < 2e-6


@double
def test_polish_of_tall_points_is_of_seventh_order(dtype: torch.dtype) -> None:
    """The next term of (1 − e)^-½ is 0.1964 e⁸; the remainder at e = 0.2 is 6e-7, twice that in XᴴX."""
    e = torch.linspace(-0.2, 0.2, 5).double()
    basis = orthonormal(5, 5, dtype=dtype)
    x = orthonormal(20, 5, dtype=dtype) @ (basis * (1 - e).sqrt() @ basis.mH)
    assert 1e-7 < residual(linalg._polish(x, series=True)) < 2e-6


# ------------------------------------------------------------------ Cayley: derivatives
@double
@shapes
def test_cayley_gradcheck(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(2, *shape, dtype=dtype)
    u, v = tangent(x), tangent(x, seed=2)
    inputs = [t.clone().requires_grad_() for t in (x, u, v)]
    assert gradcheck(cayley, inputs, check_forward_ad=True, fast_mode=math.prod(shape) > 9)
    if math.prod(shape) <= 18:
        inputs = [t[:1].clone().requires_grad_() for t in (x, u, v)]
        assert gradgradcheck(cayley, inputs, check_fwd_over_rev=True, fast_mode=True)


@double
@shapes
@forms
def test_cayley_forms_gradcheck(form: Callable[..., Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(*shape, dtype=dtype).requires_grad_()
    u, v = tangent(x.detach(), length=2.5).requires_grad_(), gaussian(*shape, dtype=dtype).requires_grad_()
    if shape == (1, 1) and not dtype.is_complex:
        u = gaussian(1, 1, dtype=dtype).requires_grad_()
    step = lambda x, u, v: (lambda y, vs, _: (y, *vs))(*form(x, u, (v,)))  # noqa: E731
    assert gradcheck(step, (x, u, v), check_forward_ad=True, fast_mode=math.prod(shape) > 9)


@double
@pytest.mark.parametrize("polish", [0, 1, 2])
@shapes
def test_derivatives_at_a_zero_step(shape: tuple[int, int], dtype: torch.dtype, polish: int) -> None:
    """(I − tW/2)⁻¹(I + tW/2)x = x + tWx + t²W²x/2 + …, also where the value is x bit for bit."""
    x = orthonormal(3, *shape, dtype=dtype)
    u, v = tangent(x), tangent(x, seed=2)
    w = generator_of(x, u)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def curve(t: Tensor) -> tuple[Tensor, ...]:
        return cayley(x, t * u, v, polish=polish)

    def velocity(t: Tensor) -> tuple[Tensor, ...]:
        return jvp(curve, (t,), (one,))[1]

    (y, _), (first, v_first) = jvp(curve, (zero,), (one,))
    second, v_second = jvp(velocity, (zero,), (one,))[1]
    assert torch.equal(y, x)
    torch.testing.assert_close(first, u, rtol=0, atol=1e-13)
    torch.testing.assert_close(v_first, w @ v, rtol=0, atol=1e-13)
    torch.testing.assert_close(second, w @ u, rtol=0, atol=1e-12)
    torch.testing.assert_close(v_second, w @ w @ v, rtol=0, atol=1e-12)
    reverse = jacrev(lambda t: torch.view_as_real(curve(t)[0] + 0j))(zero)
    torch.testing.assert_close(torch.view_as_complex(reverse), first + 0j, rtol=0, atol=1e-13)


@double
@shapes
def test_polish_has_no_derivative_along_the_manifold(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(*shape, dtype=dtype)
    u, d = tangent(x), tangent(x, seed=2)
    plain, polished = (jvp(lambda u, k=k: cayley(x, u, polish=k)[0], (u,), (d,)) for k in (0, 1))
    torch.testing.assert_close(plain, polished, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ Cayley: shapes and memory
@double
@shapes
def test_cayley_broadcasts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(*shape, dtype=dtype)
    u = torch.stack([tangent(x, seed=s) for s in range(7)])
    y, v_moved = cayley(x, u, u[0])
    assert y.shape == v_moved.shape == (7, *shape)
    assert y.is_contiguous()
    assert v_moved.is_contiguous()
    for i in range(7):
        for batched, single_point in zip((y[i], v_moved[i]), cayley(x, u[i], u[0]), strict=True):
            torch.testing.assert_close(batched, single_point, rtol=0, atol=1e-13)
    deep = cayley(x.expand(2, 7, *shape), u.expand(2, 7, *shape))[0]
    torch.testing.assert_close(deep, y.expand(2, 7, *shape), rtol=0, atol=1e-13)
    torch.testing.assert_close(vmap(lambda u: cayley(x, u)[0])(u), y, rtol=0, atol=1e-13)
    torch.testing.assert_close(vmap(lambda v: cayley(x, u[0], v)[1])(u), cayley(x, u[0], u)[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [*SINGLE, *DOUBLE])
@shapes
def test_cayley_takes_any_strides(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = orthonormal(3, *shape, dtype=dtype)
    u, v = tangent(x, length=0.5), tangent(x, seed=2)
    plain = cayley(x, u, v)

    def transposed(t: Tensor) -> Tensor:
        return t.mH.clone(memory_format=torch.contiguous_format).mH  # column-major, and a lazy conjugate

    def strided(t: Tensor) -> Tensor:
        room = t.new_zeros(t.shape[0], 2 * t.shape[1], 3 * t.shape[2])
        room[:, ::2, 1::3] = t
        return room[:, ::2, 1::3]

    for change in (transposed, strided):
        for a, b in zip(cayley(*(change(t) for t in (x, u, v))), plain, strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b, rtol=0, atol=20 * torch.finfo(dtype).eps)
    same = cayley(x[:1].expand_as(x), u, v[:1].expand_as(v))
    assert all(t.is_contiguous() for t in same)


@pytest.mark.parametrize("dtype", [*SINGLE, *DOUBLE])
@pytest.mark.parametrize("batch", [(0,), (2, 0)])
@shapes
def test_empty_batches(shape: tuple[int, int], batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.empty(*batch, *shape, dtype=dtype)
    square = torch.empty(*batch, shape[0], shape[0], dtype=dtype)
    assert [t.shape for t in cayley(x, x, x)] == [x.shape, x.shape]
    for f in (newton_schulz, polar, lambda x: qr_positive(x)[0], lambda x: polar_newton_schulz(x, 2)):
        assert f(x).shape == x.shape
    for f in (herm, skew, expm_skew, log_unitary, lambda a: lyapunov(a, a)):
        assert f(square).shape == square.shape
    assert keep_zero_steps(x, x, x, 2).shape == x.shape


class _Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [t.shape for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
        return out


@pytest.mark.parametrize("dtype", [*SINGLE, *DOUBLE])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("shape", [(90, 30), (90, 4), (64, 32), (90, 1)])
def test_tall_points_need_no_square_array(shape: tuple[int, int], batch: tuple[int, ...], dtype: torch.dtype) -> None:
    n, p = shape
    x = orthonormal(*batch, n, p, dtype=dtype)
    u = tangent(x, length=1.0)
    with _Shapes() as record:
        cayley(x, u, u, u)
    assert record.seen
    largest = math.prod(batch) * n * p
    assert max(s.numel() for s in record.seen) <= 2 * largest  # 2: a complex number seen as two real ones
    with _Shapes() as square:
        cayley(orthonormal(n, n, dtype=dtype), torch.zeros(n, n, dtype=dtype))
    assert any(s[-2:] == (n, n) for s in square.seen)  # the recorder does see them


# ------------------------------------------------------------------ orthonormalization
@double
def test_newton_schulz_is_its_formula_and_converges_quadratically(dtype: torch.dtype) -> None:
    x = orthonormal(3, 6, 4, dtype=dtype) + 0.05 * gaussian(3, 6, 4, dtype=dtype)
    one = x @ (3 * eye(4, dtype) - x.mH @ x) / 2
    torch.testing.assert_close(newton_schulz(x), one, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(newton_schulz(x, 2), newton_schulz(one), rtol=1e-13, atol=1e-14)
    errors = [residual(newton_schulz(x, k)) for k in range(6)]
    assert errors[5] < 1e-14
    assert all(b < a**2 for a, b in itertools.pairwise(errors[:4]))
    assert torch.equal(newton_schulz(x, 0), x)


@double
@shapes
def test_polar_is_scipys(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = gaussian(4, *shape, dtype=dtype)
    expected = by_scipy(lambda a: scipy.linalg.polar(a)[0], x)
    for y in (polar(x), polar_newton_schulz(x, 60)):
        assert y.is_contiguous()
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    ill = orthonormal(8, 3, dtype=dtype) * real([1.0, 1e-4, 1e-8]) @ orthonormal(3, 3, dtype=dtype)
    assert residual(polar(ill)) < 1e-14
    h = polar(ill).mH @ ill
    torch.testing.assert_close(h, herm(h), rtol=0, atol=1e-14)


@double
@pytest.mark.parametrize("shape", [(3, 2), (3, 3), (5, 1), (6, 4)])
def test_polar_gradient_at_repeated_singular_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """At orthonormal X, D polar(X)[Z] = Z − X herm(XᴴZ), so the gradient of ⟨w, polar(X)⟩ is w − X herm(Xᴴw)."""
    w = gaussian(*shape, dtype=dtype)
    for x in (torch.eye(*shape, dtype=dtype), orthonormal(*shape, dtype=dtype)):
        expected = w - x @ herm(x.mH @ w)
        leaf = x.clone().requires_grad_()
        (w.conj() * polar(leaf)).sum().real.backward()
        torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(jvp(polar, (x,), (w,))[1], expected, rtol=0, atol=1e-13)
    leaf = (3 * x).requires_grad_()
    assert gradcheck(polar, leaf, check_forward_ad=True, fast_mode=math.prod(shape) > 9)
    assert gradgradcheck(polar, leaf, check_fwd_over_rev=True, fast_mode=math.prod(shape) > 5)


def test_polar_derivative_in_single_precision() -> None:
    """Case 05: eye(3, 2), float32."""
    x, w = torch.eye(3, 2, requires_grad=True), gaussian(3, 2, dtype=torch.float32)
    (w * polar(x)).sum().backward()
    torch.testing.assert_close(x.grad, w - x.detach() @ herm(x.detach().mH @ w), rtol=0, atol=1e-6)


@double
def test_polar_gradcheck(dtype: torch.dtype) -> None:
    for shape in ((2, 4, 3), (3, 3), (4, 1)):
        x = gaussian(*shape, dtype=dtype).requires_grad_()
        assert gradcheck(polar, x, check_forward_ad=True, fast_mode=math.prod(shape) > 9)
        assert gradgradcheck(polar, x, check_fwd_over_rev=True, fast_mode=True)
        assert gradcheck(lambda x: polar_newton_schulz(x, 4), x, check_forward_ad=True, fast_mode=True)
    left, right = orthonormal(4, 3, dtype=dtype), orthonormal(3, 3, dtype=dtype)
    close = (left * real([2.0, 2.0 + 1e-9, 0.1]) @ right).requires_grad_()
    assert gradcheck(polar, close, check_forward_ad=True, eps=1e-7)


@double
def test_polar_without_full_rank_is_finite(dtype: torch.dtype) -> None:
    rank_one = gaussian(5, 1, dtype=dtype) @ gaussian(1, 3, dtype=dtype, seed=1)
    for x in (rank_one, torch.zeros(5, 3, dtype=dtype)):
        leaf = x.clone().requires_grad_()
        y = polar(leaf)
        assert residual(y.detach()) < 1e-14
        (gradient,) = torch.autograd.grad((y * gaussian(5, 3, dtype=dtype, seed=2)).sum().real, leaf)
        assert gradient.isfinite().all()


@double
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (4, 4), (6, 3)])
def test_qr_positive(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = gaussian(5, *shape, dtype=dtype)
    q, r = qr_positive(x)
    assert q.is_contiguous()
    assert r.is_contiguous()
    torch.testing.assert_close(q @ r, x, rtol=0, atol=1e-13)
    assert residual(q) < 1e-13
    assert torch.equal(r, r.triu())
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    assert (diagonal.real > 0).all()
    assert not (diagonal.is_complex() and diagonal.imag.abs().max() > 0)
    # unique: R is the Cholesky factor of XᴴX
    torch.testing.assert_close(r, by_scipy(scipy.linalg.cholesky, x.mH.resolve_conj() @ x), rtol=0, atol=1e-12)
    leaf = x[:2].clone().requires_grad_()
    assert gradcheck(qr_positive, leaf, check_forward_ad=True)
    assert gradgradcheck(qr_positive, leaf[:1].detach().requires_grad_())


# ------------------------------------------------------------------ exponential and logarithm
@double
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_expm_skew_is_scipys(n: int, dtype: torch.dtype) -> None:
    a = skew(gaussian(3, n, n, dtype=dtype))
    torch.testing.assert_close(expm_skew(a), by_scipy(scipy.linalg.expm, a), rtol=0, atol=1e-13)
    zero = torch.zeros_like(a)
    assert torch.equal(expm_skew(zero), eye(n, dtype).expand_as(a))
    torch.testing.assert_close(jvp(expm_skew, (zero,), (a,))[1], a, rtol=0, atol=1e-14)
    assert gradcheck(lambda z: expm_skew(skew(z)), gaussian(n, n, dtype=dtype).requires_grad_(), check_forward_ad=True)


@single
def test_expm_skew_stays_orthogonal_at_any_length(dtype: torch.dtype) -> None:
    """Case 31: A = 100 (B − Bᵀ), where torch.matrix_exp is off by 8e-4."""
    b = gaussian(64, 64, dtype=dtype)
    for scale in (0.1, 10.0, 100.0, 1000.0):
        assert residual(expm_skew(scale * (b - b.mH))) < 1e-5


@double
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("largest", [0.0, 1e-9, 0.3, 2.0, 3.1])
def test_log_unitary_inverts_the_exponential(n: int, largest: float, dtype: torch.dtype) -> None:
    if n == 1 and not dtype.is_complex:
        a = torch.zeros(3, 1, 1, dtype=dtype)
    else:
        a = skew_hermitian(3, n, n, dtype=dtype, largest=largest)
    q = by_scipy(scipy.linalg.expm, a)
    log = log_unitary(q)
    assert log.is_contiguous()
    torch.testing.assert_close(log, a, rtol=0, atol=1e-10)
    assert torch.equal(log, -log.mH)
    if 0.1 < largest < 3:
        torch.testing.assert_close(log, by_scipy(scipy.linalg.logm, q).to(dtype), rtol=0, atol=1e-10)


@single
def test_log_unitary_in_single_precision(dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for largest, tolerance in ((1e-3, 1e-6), (1.0, 5e-6), (3.0, 5e-5)):
        a = skew_hermitian(4, 8, 8, dtype=wide, largest=largest)
        log = log_unitary(by_scipy(scipy.linalg.expm, a).to(dtype))
        torch.testing.assert_close(log, a.to(dtype), rtol=0, atol=tolerance)


@double
@pytest.mark.parametrize("angles", [(0, 0, 0, 0, 0), (1, 1, -1, -1, 0), (0.5, 0.5, 0.5, 0.5, 0.5), (3, 3, 3, 0, 0)])
def test_log_unitary_at_repeated_eigenvalues(angles: tuple[float, ...], dtype: torch.dtype) -> None:
    """Value and derivative; the identity is the usual starting point. D log at I is the identity."""
    basis = orthonormal(6, 6, dtype=dtype)
    if dtype.is_complex:
        a = basis * (1j * real([*angles, 0.0])) @ basis.mH
    else:
        blocks = [real([[0.0, -t], [t, 0.0]]) for t in angles[:3]]
        a = basis @ torch.block_diag(*blocks) @ basis.mH
    q = torch.from_numpy(scipy.linalg.expm(a.numpy()))
    torch.testing.assert_close(log_unitary(q), a, rtol=0, atol=1e-12)
    leaf = q.clone().requires_grad_()
    assert gradcheck(log_unitary, leaf, check_forward_ad=True, fast_mode=True)
    direction = skew(gaussian(6, 6, dtype=dtype))
    # log(exp(a) exp(t d)) and its derivative in t, by SciPy and central differences
    h = 1e-5
    ends = [scipy.linalg.logm(q.numpy() @ scipy.linalg.expm(s * h * direction.numpy())) for s in (1, -1)]
    expected = torch.from_numpy((ends[0] - ends[1]) / (2 * h)).to(dtype)
    torch.testing.assert_close(jvp(log_unitary, (q,), (q @ direction,))[1], expected, rtol=0, atol=1e-6)
    if angles[0] == 0:
        torch.testing.assert_close(jvp(log_unitary, (q,), (direction,))[1], direction, rtol=0, atol=1e-13)


@double
def test_log_unitary_second_derivatives(dtype: torch.dtype) -> None:
    for q in (
        torch.eye(3, dtype=dtype),
        by_scipy(scipy.linalg.expm, skew_hermitian(1, 3, 3, dtype=dtype, largest=2.5))[0],
    ):
        leaf = q.clone().requires_grad_()
        assert gradcheck(log_unitary, leaf, check_forward_ad=True, fast_mode=dtype.is_complex)
        assert gradgradcheck(log_unitary, leaf, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("dtype", [*SINGLE, *DOUBLE])
@pytest.mark.parametrize(
    "signs", [(-1, -1), (-1, -1, 1), (1, -1, -1), (-1, -1, -1, -1, 1), (-1,), (-1, 1), (-1, -1, -1)]
)
def test_log_unitary_at_the_cut(signs: tuple[int, ...], dtype: torch.dtype) -> None:
    """Angle π: some skew-Hermitian logarithm of the right length; none exists for real Q of determinant −1."""
    n, minus = len(signs), sum(s < 0 for s in signs)
    basis = orthonormal(n, n, dtype=dtype)
    q = basis * torch.tensor(signs) @ basis.mH
    leaf = q.clone().requires_grad_()
    log = log_unitary(leaf)
    if not dtype.is_complex and minus % 2:
        assert log.isnan().all()
        return
    log.sum().abs().backward()
    tolerance = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.linalg.matrix_exp(log.detach()), q, rtol=0, atol=tolerance)
    assert torch.equal(log, -log.mH)
    assert log.norm().item() == pytest.approx(math.pi * math.sqrt(minus), rel=1e-5)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@double
@pytest.mark.parametrize("gap", [1e-4, 1e-6, 1e-7, 2e-8, 1e-9, 1e-12])
def test_log_unitary_near_the_cut_is_a_logarithm(gap: float, dtype: torch.dtype) -> None:
    basis = orthonormal(4, 4, dtype=dtype)
    angles = real([math.pi - gap, 1.0])
    if dtype.is_complex:
        a = basis * (1j * torch.cat([angles, -angles])) @ basis.mH
    else:
        a = basis @ torch.block_diag(*(real([[0.0, -t], [t, 0.0]]) for t in angles)) @ basis.mH
    q = torch.from_numpy(scipy.linalg.expm(a.numpy()))
    log = log_unitary(q)
    torch.testing.assert_close(torch.linalg.matrix_exp(log), q, rtol=0, atol=1e-7)
    assert log.norm().item() == pytest.approx(a.norm().item(), rel=1e-7)


# ------------------------------------------------------------------ equations
@double
def test_lyapunov_is_scipys(dtype: torch.dtype) -> None:
    c = gaussian(4, 5, 5, dtype=dtype)
    a = herm(gaussian(4, 5, 5, dtype=dtype, seed=1)) + 4 * eye(5, dtype)
    expected = by_scipy(lambda a, c: scipy.linalg.solve_sylvester(a, a, c), a, c)
    torch.testing.assert_close(lyapunov(a, c), expected, rtol=0, atol=1e-12)
    assert lyapunov(a, c).is_contiguous()
    torch.testing.assert_close(lyapunov(a[0], c)[2], lyapunov(a[0], c[2]), rtol=0, atol=1e-13)
    for base in (a[0], 2 * eye(5, dtype)):  # also at equal eigenvalues
        leaves = (base.clone().requires_grad_(), c[0].clone().requires_grad_())
        assert gradcheck(lambda a, c: lyapunov(herm(a), c), leaves, check_forward_ad=True, fast_mode=True)
    small = (
        (herm(gaussian(2, 2, dtype=dtype)) + 3 * eye(2, dtype)).requires_grad_(),
        gaussian(2, 2, dtype=dtype).requires_grad_(),
    )
    assert gradgradcheck(lambda a, c: lyapunov(herm(a), c), small, check_fwd_over_rev=True)


@double
def test_lyapunov_reads_the_hermitian_part(dtype: torch.dtype) -> None:
    a, c = gaussian(4, 4, dtype=dtype) + 6 * eye(4, dtype), gaussian(4, 4, dtype=dtype, seed=1)
    torch.testing.assert_close(lyapunov(a, c), lyapunov(herm(a), c), rtol=0, atol=1e-13)
    leaf = a.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((lyapunov(leaf, c) * c).sum().real, leaf)
    torch.testing.assert_close(gradient, gradient.mH, rtol=0, atol=1e-13)


@double
def test_lyapunov_leaves_out_components_without_solution(dtype: torch.dtype) -> None:
    basis = orthonormal(3, 3, dtype=dtype)
    a = basis * torch.tensor([0.0, 2.0, -2.0]) @ basis.mH
    c = gaussian(3, 3, dtype=dtype)
    x = basis.mH @ lyapunov(a, c) @ basis
    c = basis.mH @ c @ basis
    sums = real([[0.0, 2, -2], [2, 4, 0], [-2, 0, -4]])
    torch.testing.assert_close(x, torch.where(sums == 0, 0, c / torch.where(sums == 0, 1, sums)), rtol=0, atol=1e-13)


# ------------------------------------------------------------------ zero steps
@pytest.mark.parametrize("dtype", [*SINGLE, *DOUBLE])
@pytest.mark.parametrize("event_dim", [0, 1, 2])
def test_keep_zero_steps(event_dim: int, dtype: torch.dtype) -> None:
    x = gaussian(4, 3, 2, dtype=dtype)
    x[0, 0, 0] = -0.0
    u, y = gaussian(4, 3, 2, dtype=dtype, seed=1), gaussian(4, 3, 2, dtype=dtype, seed=2)
    u[0] = 0
    u[1] = 0
    u[1, 1, 1] = torch.finfo(dtype).tiny  # its square underflows
    u[2] *= torch.finfo(dtype).max / 100
    zero = (u == 0).flatten(3 - event_dim).all(-1) if event_dim else u == 0
    kept = keep_zero_steps(x, u, y, event_dim)
    expected = torch.where(zero.reshape(zero.shape + (1,) * event_dim), x, y)
    assert torch.equal(torch.view_as_real(kept + 0j), torch.view_as_real(expected + 0j))
    as_bits = lambda t: torch.view_as_real(t) if t.is_complex() else t  # noqa: E731
    assert torch.equal(as_bits(kept[0]).signbit(), as_bits(x[0]).signbit())
    assert zero.any()
    assert not zero.all()
    assert torch.equal(keep_zero_steps(x, u.conj(), y, event_dim), kept)  # a lazy conjugate


@double
def test_keep_zero_steps_keeps_derivatives(dtype: torch.dtype) -> None:
    x = gaussian(3, 2, dtype=dtype)
    d, w = gaussian(3, 2, dtype=dtype, seed=1), gaussian(3, 2, dtype=dtype, seed=2)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def curve(t: Tensor) -> Tensor:  # not equal to x at 0, by rounding or worse
        return keep_zero_steps(x, t * d, x + 1e-9 + t * d + t**2 * w, 2)

    value, velocity = jvp(curve, (zero,), (one,))
    assert torch.equal(value, x)
    torch.testing.assert_close(velocity, d)
    acceleration = jvp(lambda t: jvp(curve, (t,), (one,))[1], (zero,), (one,))[1]
    torch.testing.assert_close(acceleration, 2 * w)
    u = torch.zeros_like(x, requires_grad=True)
    y = keep_zero_steps(x, u, x + 1e-9 + u + u * u, 2)
    (first,) = torch.autograd.grad((y * w.conj()).sum().real, u, create_graph=True)
    torch.testing.assert_close(first.detach(), w)
    assert torch.autograd.grad(first.sum().abs(), u)[0].abs().max() > 0


@double
def test_hermitian_and_skew_parts(dtype: torch.dtype) -> None:
    a = gaussian(2, 4, 4, dtype=dtype)
    for b in (a, a.mT, a.mH, a[:, ::2, ::2]):
        h, s = herm(b), skew(b)
        assert h.is_contiguous()
        assert s.is_contiguous()
        torch.testing.assert_close(h + s, b.resolve_conj())
        assert torch.equal(h, h.mH)
        assert torch.equal(s, -s.mH)


# ------------------------------------------------------------------ every function in every mode of differentiation
def _functions() -> dict[str, tuple[Callable[..., Any], tuple[int, ...]]]:
    square = {dtype: orthonormal(4, 4, dtype=dtype) for dtype in DOUBLE}
    tall = {dtype: orthonormal(5, 2, dtype=dtype) for dtype in DOUBLE}
    return {
        "cayley full": (lambda z: cayley(square[z.dtype], z), (4, 4)),
        "cayley low rank": (lambda z: cayley(tall[z.dtype], z, z * z), (5, 2)),
        "newton_schulz": (lambda z: (newton_schulz(z / 4, 2),), (4, 3)),
        "polar": (lambda z: (polar(z),), (4, 3)),
        "polar at orthonormal": (lambda z: (polar(torch.eye(4, 3, dtype=z.dtype) + (z - z.detach())),), (4, 3)),
        "polar_newton_schulz": (lambda z: (polar_newton_schulz(z, 6),), (4, 3)),
        "qr_positive": (qr_positive, (4, 3)),
        "expm_skew": (lambda z: (expm_skew(skew(z)),), (3, 3)),
        "log_unitary": (lambda z: (log_unitary(eye(3, z.dtype) + z / 8),), (3, 3)),
        "log_unitary at identity": (lambda z: (log_unitary(eye(3, z.dtype) + (z - z.detach())),), (3, 3)),
        "lyapunov": (lambda z: (lyapunov(herm(z) + 4 * eye(3, z.dtype), z @ z),), (3, 3)),
        "lyapunov at identity": (lambda z: (lyapunov(eye(3, z.dtype) + (z - z.detach()), z @ z),), (3, 3)),
    }


@double
@pytest.mark.parametrize("name", list(_functions()))
def test_all_modes_of_differentiation_agree(name: str, dtype: torch.dtype) -> None:
    """jvp of jvp against reverse over reverse, forward over reverse, and one at a time under vmap.

    Nested forward mode is the one that autograd.Function gets wrong without a word; gradgradcheck, in the tests above,
    ties reverse over reverse to finite differences.
    """
    f, shape = _functions()[name]
    z, d, e = (gaussian(*shape, dtype=dtype, seed=s) for s in (3, 4, 5))
    weights = [gaussian(*y.shape, dtype=dtype, seed=6 + i) for i, y in enumerate(f(z))]
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def number(z: Tensor) -> Tensor:
        return sum(((w.conj() * y).sum().real for w, y in zip(weights, f(z), strict=True)), zero)

    def along(st: Tensor) -> Tensor:
        return number(z + st[0] * d + st[1] * e)

    origin = torch.zeros(2, dtype=torch.float64)
    forward = jvp(lambda t: jvp(lambda s: number(z + s * d + t * e), (zero,), (one,))[1], (zero,), (one,))[1]
    assert forward.abs() > 1e-6
    for second in (
        jacrev(jacrev(along)),
        jacfwd(jacrev(along)),
        jacrev(jacfwd(along)),
        jacfwd(jacfwd(along)),
        hessian(along),
    ):
        torch.testing.assert_close(second(origin)[0, 1], forward, rtol=1e-9, atol=1e-10)
    batch = torch.stack([z, z + 0.1 * d, z - 0.1 * e])
    for a, b in zip(vmap(f)(batch), zip(*(f(z) for z in batch), strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-11, atol=1e-12)
    pulled = vmap(lambda z: vjp(number, z)[1](one)[0])(batch)
    torch.testing.assert_close(pulled[1], vjp(number, batch[1])[1](one)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["polar at orthonormal", "log_unitary at identity", "lyapunov at identity"])
@double
def test_corrections_at_a_base_point_are_the_derivatives_there(name: str, dtype: torch.dtype) -> None:
    """The functions "at …" above hold their base fixed by detach; here the base moves, by finite differences."""
    shape = _functions()[name][1]
    base = torch.eye(*shape, dtype=dtype)
    c = gaussian(*shape, dtype=dtype, seed=9)
    f = {"polar": polar, "log_unitary": log_unitary, "lyapunov": lambda a: lyapunov(a, c)}[name.split()[0]]
    d = gaussian(*shape, dtype=dtype, seed=4)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    d = herm(d) if name.startswith("lyapunov") else d
    second = jvp(lambda t: jvp(lambda s: f(base + (s + t) * d), (zero,), (one,))[1], (zero,), (one,))[1]
    h = 1e-3
    expected = (f(base + h * d) - 2 * f(base) + f(base - h * d)) / h**2
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 3), (6, 2)])
def test_cayley_compiles_without_graph_breaks(shape: tuple[int, int]) -> None:
    x = orthonormal(4, *shape, dtype=torch.float32)
    u = tangent(x, length=0.5)
    compiled = torch.compile(lambda x, u: cayley(x, u, u), backend="eager", fullgraph=True)
    for a, b in zip(compiled(x, u), cayley(x, u, u), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(5, 3), (9, 2), (4, 4)])
@pytest.mark.parametrize("length", [1e4, 1e10, 1e30])
def test_cayley_step_beyond_all_digits_stays_feasible(shape, length):
    x, _ = torch.linalg.qr(torch.randn(3, *shape))
    v = torch.randn(3, *shape) * length
    u = v - x @ ((x.mH @ v + v.mH @ x) / 2)
    (y,) = linalg.cayley(x, u)
    assert (torch.linalg.matrix_norm(y.mH @ y - torch.eye(shape[1])) < 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_shorten_cuts_what_is_longer_than_the_digits_and_nothing_else(dtype):
    u = torch.randn(4, 5, 3, dtype=dtype)
    u = u / torch.linalg.matrix_norm(u)[:, None, None] * torch.tensor([0.0, 2800.0, 3e4, 3e15])[:, None, None]
    v = linalg.shorten(u)
    assert torch.equal(v[:2], u[:2])
    longest = torch.full((2,), torch.finfo(dtype).eps ** -0.5)
    torch.testing.assert_close(torch.linalg.matrix_norm(v[2:]), longest)
    torch.testing.assert_close(v[2:] / longest[0], u[2:] / torch.linalg.matrix_norm(u[2:])[:, None, None])
