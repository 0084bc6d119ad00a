"""Functions of Hermitian matrices: values, divided differences, two derivatives in every mode, floor, NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from manopt_torch import spectral

DOUBLE = [torch.float64, torch.complex128]
EVERY = [torch.float32, torch.complex64, *DOUBLE]

#: name -> (function of a matrix, rule, the scalar function in mpmath)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], spectral.Rule, Callable]] = {
    "expm": (spectral.expm, spectral._EXP, mp.exp),
    "expm1m": (spectral.expm1m, spectral._EXPM1, mp.expm1),
    "logm": (spectral.logm, spectral._LOG, mp.log),
    "log1pm": (spectral.log1pm, spectral._LOG1P, mp.log1p),
    "sqrtm": (spectral.sqrtm, spectral._SQRT, mp.sqrt),
    "inv_sqrtm": (spectral.inv_sqrtm, spectral._INV_SQRT, lambda x: 1 / mp.sqrt(x)),
    **{
        f"powm {t}": (lambda a, t=t: spectral.powm(a, t), spectral._power(t), lambda x, t=t: mp.mpf(x) ** mp.mpf(t))
        for t in (-1.7, -1.0, 0.3, 1.0, 2.0, 3.5)
    },
}
SMOOTH = pytest.mark.parametrize("name", FUNCTIONS)
MODES = pytest.mark.parametrize("dtype", DOUBLE)


def gaussian(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def herm(a: Tensor) -> Tensor:
    return (a + a.mH) / 2


def with_eigenvalues(values: list[float] | Tensor, dtype: torch.dtype) -> Tensor:
    """A dense Hermitian matrix with these eigenvalues, rounded once from double precision."""
    values = torch.as_tensor(values, dtype=torch.float64)
    n = values.shape[-1]
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.complex128 if dtype.is_complex else torch.float64))[0]
    return herm((q * values) @ q.mH).to(dtype)


def points(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "distinct": with_eigenvalues([0.4, 0.9, 1.3, 2.2], dtype),
        "repeated": with_eigenvalues([0.7, 0.7, 0.7, 2.0], dtype),
        "nearly repeated": with_eigenvalues([0.7, 0.7 + 1e-9, 2.0], dtype),
        "identity": torch.eye(3, dtype=dtype),
        "batch": torch.stack([with_eigenvalues([0.4, 2.2], dtype), torch.eye(2, dtype=dtype)]),
    }


# ------------------------------------------------------------------ values
@MODES
@SMOOTH
def test_value_is_that_of_the_scalar_function_on_the_eigenvalues(name: str, dtype: torch.dtype) -> None:
    function, _, scalar = FUNCTIONS[name]
    values = torch.tensor([0.05, 0.7, 0.7, 1.9, 30.0], dtype=torch.float64)
    q = torch.linalg.qr(gaussian(5, 5, dtype=dtype))[0]
    expected = (q * torch.tensor([float(scalar(v)) for v in values.tolist()], dtype=torch.float64)) @ q.mH
    result = function((q * values) @ q.mH)
    assert torch.linalg.matrix_norm(result - expected) <= 1e-12 * torch.linalg.matrix_norm(expected)


@MODES
@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (spectral.expm, scipy.linalg.expm),
        (spectral.logm, scipy.linalg.logm),
        (spectral.sqrtm, scipy.linalg.sqrtm),
        (lambda a: spectral.powm(a, 0.3), lambda a: scipy.linalg.fractional_matrix_power(a, 0.3)),
        (lambda a: spectral.powm(a, -1), np.linalg.inv),
    ],
)
def test_value_against_scipy(function: Callable, reference: Callable, dtype: torch.dtype) -> None:
    a = herm(gaussian(6, 6, dtype=dtype))
    a = a @ a + 0.1 * torch.eye(6)
    expected = torch.from_numpy(reference(a.numpy()))
    assert torch.linalg.matrix_norm(function(a) - expected) <= 1e-11 * torch.linalg.matrix_norm(expected)


@pytest.mark.parametrize("dtype", EVERY)
def test_identities_between_the_functions(dtype: torch.dtype) -> None:
    a = torch.stack([with_eigenvalues(torch.logspace(-1.5, 1.5, 6), dtype) for _ in range(4)]).reshape(2, 2, 6, 6)
    eye, eps = torch.eye(6, dtype=dtype), torch.finfo(dtype).eps

    def close(x: Tensor, y: Tensor) -> None:
        assert x.dtype == dtype
        torch.testing.assert_close(x, y.expand_as(x), rtol=0, atol=3000 * eps)

    root, inverse_root = spectral.sqrtm(a), spectral.inv_sqrtm(a)
    close(root @ root, a)
    close(root @ inverse_root, eye)
    close(spectral.expm(spectral.logm(a)), a)
    close(spectral.logm(spectral.expm(eye - a / 10)), eye - a / 10)
    close(spectral.expm(spectral.logm(a) / 2), root)
    close(spectral.powm(a, -0.5), inverse_root)
    close(spectral.powm(a, 0.25) @ spectral.powm(a, 0.75), a)
    close(spectral.log1pm(spectral.expm1m(-a / 30)), -a / 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_small_arguments_keep_their_digits(dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for size in (1e-2, 1e-5, 1e-9):
        a = size * herm(gaussian(5, 5, dtype=dtype))
        for function in (spectral.log1pm, spectral.expm1m):
            error = function(a).to(wide) - function(a.to(wide))
            assert torch.linalg.matrix_norm(error) <= 2e-6 * torch.linalg.matrix_norm(a)


@pytest.mark.parametrize("dtype", EVERY)
@SMOOTH
def test_hermitian_part_in_exactly_hermitian_out(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name][0]
    a = torch.stack([with_eigenvalues([0.5, 1.0, 1.0, 2.0], dtype) for _ in range(3)])
    b = gaussian(3, 4, 4, dtype=dtype)
    skewed = (a + (b - b.mH)).requires_grad_()
    result = function(skewed)
    assert torch.equal(result, result.mH)
    torch.testing.assert_close(result, function(a), rtol=1e-4, atol=1e-4 if dtype.to_real() == torch.float32 else 1e-10)
    (gradient,) = torch.autograd.grad(result, skewed, gaussian(3, 4, 4, dtype=dtype))
    assert torch.equal(gradient, gradient.mH)


def test_strides_and_broadcast_storage() -> None:
    a = with_eigenvalues([0.5, 1.0, 2.0], torch.complex128)
    strided = torch.stack([a, 2 * a], -1).movedim(-1, 0)
    result = spectral.logm(strided)
    assert result.is_contiguous()
    torch.testing.assert_close(result, torch.stack([spectral.logm(a), spectral.logm(2 * a)]))
    torch.testing.assert_close(spectral.logm(a.expand(3, 2, 3, 3)), spectral.logm(a).expand(3, 2, 3, 3))


# ------------------------------------------------------------------ divided differences
def divided_difference(f: Callable, *x: mp.mpf) -> mp.mpf:
    x = sorted(x)
    low, high = x[0], x[-1]
    if low == high:
        return mp.diff(f, low, len(x) - 1) / mp.factorial(len(x) - 1)
    return (divided_difference(f, *x[1:]) - divided_difference(f, *x[:-1])) / (high - low)


def grid(name: str, dtype: torch.dtype) -> Tensor:
    """Arguments at gaps from 0 over single units in the last place to as far as the floor lets them come."""
    if name.startswith("exp"):
        bases, steps = (-20.0, -1.0, 0.0, 0.5, 10.0), (1e-30, 1e-6, 1e-4, 0.01, 0.4, 0.9, 0.99, 1.01, 1.1, 3.0, 40.0)
    else:
        shift = 1.0 if name == "log1pm" else 0.0
        bases = (-0.9, -1e-6, 0.0, 1e-8, 0.5, 3.0) if shift else (1e-6, 0.3, 1.0, 7.0, 1e6)
        steps = (1e-30, 1e-6, 1e-4, 0.01, 0.2, 0.45, 0.49, 0.51, 0.6, 1.0, 3.0, 40.0, 1e3, 1e6)
    lines = []
    for base in bases:
        line = [torch.tensor(base, dtype=dtype)]
        for _ in range(3 if base else 0):  # (next to zero are the subnormal numbers)
            line.append(torch.nextafter(line[-1], torch.tensor(torch.inf, dtype=dtype)))
        scale = 1.0 if name.startswith("exp") else base + shift
        lines.append(torch.stack([*line, *(torch.tensor(base + s * scale, dtype=dtype) for s in steps)]))
    return torch.stack([torch.nn.functional.pad(line, (0, 18 - len(line)), value=line[-1].item()) for line in lines])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 2e-12)])
@SMOOTH
def test_divided_differences_at_any_gap(name: str, dtype: torch.dtype, tolerance: float) -> None:
    _, rule, scalar = FUNCTIONS[name]
    picks = torch.tensor(
        [(0, j, j) for j in range(18)] + [(j, j, j) for j in range(0, 18, 4)] + torch.randint(18, (20, 3)).tolist()
    )
    checked = 0
    with mp.workdps(140):
        for line in grid(name, dtype):
            a, b, c = line[picks].unbind(-1)
            firsts, seconds = rule.first(a, b), rule.second(a, b, c)
            torch.testing.assert_close(rule.first(b, a), firsts, rtol=0, atol=0, equal_nan=True)
            for x, y, z, first, second in zip(a, b, c, firsts, seconds, strict=True):
                x, y, z = (mp.mpf(v.item()) for v in (x, y, z))
                for found, exact in (
                    (first, divided_difference(scalar, x, y)),
                    (second, divided_difference(scalar, x, y, z)),
                ):
                    largest = max(abs(exact), *(abs(scalar(v)) for v in (x, y, z)))
                    if largest > torch.finfo(dtype).max or 0 < abs(exact) < torch.finfo(dtype).tiny:
                        continue  # out of the range of this dtype
                    if name == "powm 1.0" and found is second:
                        assert abs(found.item() * y) <= tolerance
                    else:
                        assert abs(mp.mpf(found.item()) / exact - 1) <= tolerance, (x, y, z)
                    checked += 1
    assert checked > 150


def test_divided_differences_of_relu() -> None:
    a, b, c = (torch.randn(200, dtype=torch.float64) for _ in range(3))
    rule = spectral._RELU
    torch.testing.assert_close(rule.first(a, b), (a.relu() - b.relu()) / (a - b))
    torch.testing.assert_close(rule.second(a, b, c), (rule.first(a, b) - rule.first(b, c)) / (a - c))
    same = torch.tensor([-2.0, 3.0])
    assert rule.first(same, same).tolist() == [0, 1]
    assert rule.second(same, same, same).tolist() == [0, 0]


# ------------------------------------------------------------------ derivatives
def test_derivatives_at_the_identity_in_closed_form() -> None:
    """f(I + tE) = f(1) I + t f′(1) E + t² f″(1)/2 E² + …"""
    e = herm(gaussian(4, 4, dtype=torch.complex128))
    eye, zero, one = torch.eye(4, dtype=torch.complex128), torch.tensor(0.0).double(), torch.tensor(1.0).double()
    for name, (function, _, scalar) in FUNCTIONS.items():
        first = jvp(function, (eye,), (e,))[1]
        torch.testing.assert_close(first, float(mp.diff(scalar, 1)) * e)
        along = lambda t: function(eye + t * e)  # noqa: E731, B023
        second = jvp(lambda t: jvp(along, (t,), (one,))[1], (zero,), (one,))[1]  # noqa: B023
        torch.testing.assert_close(second, float(mp.diff(scalar, 1, 2)) * e @ e, msg=name)


@MODES
@SMOOTH
def test_gradcheck_and_gradgradcheck(name: str, dtype: torch.dtype) -> None:
    for x in points(dtype).values():
        x = x.requires_grad_()
        # batches of forward derivatives: torch's own view of complex tensors fails there, see below for torch.func
        batched = {"check_batched_grad": True, "check_batched_forward_grad": not dtype.is_complex}
        assert gradcheck(FUNCTIONS[name][0], (x,), check_forward_ad=True, fast_mode=True, **batched)
        assert gradgradcheck(FUNCTIONS[name][0], (x,), check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@MODES
def test_gradcheck_of_relu(dtype: torch.dtype) -> None:
    x = with_eigenvalues([-1.0, -1.0, 0.5, 0.5, 2.0], dtype).requires_grad_()
    assert gradcheck(spectral.relum, (x,), check_forward_ad=True)
    assert gradgradcheck(spectral.relum, (x,), check_fwd_over_rev=True)


@MODES
def test_every_mode_of_second_derivative_against_inv(dtype: torch.dtype) -> None:
    """D²(A⁻¹)[E, G] = A⁻¹EA⁻¹GA⁻¹ + A⁻¹GA⁻¹EA⁻¹, at distinct and at repeated eigenvalues."""
    e, g = herm(gaussian(4, 4, dtype=dtype)), herm(gaussian(4, 4, dtype=dtype))
    w = gaussian(4, 4, dtype=dtype)
    zero, one = torch.tensor(0.0).double(), torch.tensor(1.0).double()

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return (x.conj() * y).real.sum()

    def f(x: Tensor) -> Tensor:
        return inner(w, spectral.powm(x, -1.0))

    for values in ([0.4, 0.9, 1.3, 2.2], [0.7, 0.7, 0.7, 2.0], [2.0] * 4):
        a = with_eigenvalues(values, dtype)
        b = torch.linalg.inv(a)
        expected = inner(w, b @ e @ b @ g @ b + b @ g @ b @ e @ b)
        found = {
            "forward over forward": jvp(lambda x: jvp(f, (x,), (e,))[1], (a,), (g,))[1],
            "the same by two numbers": jvp(
                lambda t: jvp(lambda s: f(a + s * e + t * g), (zero,), (one,))[1],  # noqa: B023
                (zero,),
                (one,),
            )[1],
            "forward over reverse": inner(jvp(grad(f), (a,), (g,))[1], e),
            "reverse over forward": inner(vjp(lambda x: jvp(f, (x,), (e,))[1], a)[1](one)[0], g),
            "reverse over reverse": inner(grad(lambda x: inner(grad(f)(x), e))(a), g),
        }
        for mode, value in found.items():
            torch.testing.assert_close(value, expected, msg=mode)


def test_a_moving_direction_is_differentiated_too() -> None:
    """∂s∂t of Df(A + sE)[U + (s + t)W] is D²f(A)[E, W]: the tangent of the outer mode is kept."""
    a, e, u, w = (herm(gaussian(3, 3, dtype=torch.float64)) for _ in range(4))
    zero, one = torch.tensor(0.0).double(), torch.tensor(1.0).double()

    def derivative(s: Tensor, t: Tensor) -> Tensor:
        return jvp(spectral.expm, (a + s * e,), (u + (s + t) * w,))[1]

    found = jvp(lambda t: jvp(lambda s: derivative(s, t), (zero,), (one,))[1], (zero,), (one,))[1]
    torch.testing.assert_close(found, jvp(lambda x: jvp(spectral.expm, (x,), (e,))[1], (a,), (w,))[1])


def test_hessians_of_torch_func() -> None:
    a = with_eigenvalues([0.7, 0.7, 2.0], torch.float64)

    def f(x: Tensor) -> Tensor:
        return spectral.logm(x)[0, 1] + (spectral.expm(x) ** 2).sum()

    forward_over_reverse = hessian(f)(a)
    for other in (jacrev(jacrev(f)), jacrev(jacfwd(f)), jacfwd(jacfwd(f))):
        torch.testing.assert_close(other(a), forward_over_reverse)


@MODES
@pytest.mark.parametrize("name", ["expm", "logm", "sqrtm", "powm 0.3"])
def test_vmap_is_a_loop(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name][0]
    x = torch.stack([with_eigenvalues([0.4, 0.9, 2.2], dtype), torch.eye(3, dtype=dtype)])
    t = gaussian(2, 3, 3, dtype=dtype)

    def second(x: Tensor, t: Tensor) -> Tensor:
        return jvp(lambda y: jvp(function, (y,), (t,))[1], (x,), (t,))[1]

    def gradient(x: Tensor, t: Tensor) -> Tensor:
        return vjp(function, x)[1](t)[0]

    for f in (lambda x, t: function(x), lambda x, t: jvp(function, (x,), (t,))[1], gradient, second):
        torch.testing.assert_close(vmap(f)(x, t), torch.stack([f(a, b) for a, b in zip(x, t, strict=True)]))
    torch.testing.assert_close(vmap(gradient, (None, 0))(x[0], t), torch.stack([gradient(x[0], b) for b in t]))


def test_third_derivative_is_refused_and_not_wrong() -> None:
    a = with_eigenvalues([0.4, 0.9], torch.float64)
    f = lambda x: spectral.logm(x)[0, 1]  # noqa: E731
    for third in (jacfwd(jacfwd(jacfwd(f))), jacrev(jacrev(jacrev(f))), jacrev(hessian(f))):
        with pytest.raises(NotImplementedError, match="first and second derivatives"):
            third(a)


def test_eigendecomposition_is_not_repeated_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: calls.append(1) or eigh(a))
    x = torch.eye(3, requires_grad=True)
    (g,) = torch.autograd.grad(spectral.logm(x).sum(), x, create_graph=True)
    g.sum().backward()
    assert calls == [1]


# torch.compile itself instantiates a Function while it traces one (2.13)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_graph_break() -> None:
    f = lambda x: spectral.expm(x).sum()  # noqa: E731
    x = torch.randn(2, 3, 3, requires_grad=True)
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(f(x), x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), f(x))
    torch.testing.assert_close(compiled(x.detach()), f(x))


# ------------------------------------------------------------------ floor, NaN
POSITIVE = ["logm", "log1pm", "sqrtm", "inv_sqrtm", "powm -1.7", "powm 0.3"]


@pytest.mark.parametrize("name", POSITIVE)
def test_near_singular_float32_is_finite(name: str) -> None:
    """CASES 10: the smallest computed eigenvalue may be negative."""
    function = FUNCTIONS[name][0]
    negative = 0
    for dtype in (torch.float32, torch.complex64):
        a = torch.stack([with_eigenvalues([1e-8, 1.0, 1.0, 100.0], dtype) for _ in range(40)])
        negative += int((torch.linalg.eigvalsh(a) < 0).sum())
        a = (a - torch.eye(4) if name == "log1pm" else a).requires_grad_()
        value = function(a)
        (gradient,) = torch.autograd.grad(value.abs().sum(), a)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
    assert negative


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floor_is_epsilon_times_the_largest_eigenvalue(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for low, high in itertools.product((0.0, -1.0, eps / 8), (1.0, 1e-12, 1e12)):
        a = torch.diag(torch.tensor([low * high, high], dtype=dtype))
        scale = max(1.0, abs(low)) * high
        expected = torch.tensor([eps * scale, high], dtype=dtype)
        torch.testing.assert_close(spectral.logm(a), torch.diag(expected.log()), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(spectral.sqrtm(a), torch.diag(expected.sqrt()), rtol=1e-5, atol=0)
    zero = torch.zeros(2, 2, dtype=dtype)
    torch.testing.assert_close(spectral.inv_sqrtm(zero), eps**-0.5 * torch.eye(2, dtype=dtype))
    above = torch.diag(torch.tensor([4 * eps, 1.0], dtype=dtype))  # left alone
    torch.testing.assert_close(spectral.sqrtm(above).diagonal(), above.diagonal().sqrt(), rtol=4 * eps, atol=0)
    below = torch.diag(torch.tensor([-1.0, 0.5], dtype=dtype))
    torch.testing.assert_close(
        spectral.log1pm(below)[0, 0].exp(), torch.tensor(1.5 * eps, dtype=dtype), rtol=0.3, atol=0
    )


def test_floored_eigenvalues_still_have_a_gradient() -> None:
    a = torch.diag(torch.tensor([-1e-9, 1.0])).requires_grad_()
    (gradient,) = torch.autograd.grad(spectral.logm(a).diagonal().sum(), a)
    torch.testing.assert_close(gradient.diagonal(), torch.tensor([1 / torch.finfo(torch.float32).eps, 1.0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@SMOOTH
def test_nan_stays_in_its_matrix_and_does_not_raise(name: str, bad: float) -> None:
    function = FUNCTIONS[name][0]
    good = with_eigenvalues([0.4, 0.9, 2.2], torch.complex64)
    broken = good.clone()
    broken[0, 1] = bad
    x = torch.stack([broken, good]).requires_grad_()
    result = function(x)
    (gradient,) = torch.autograd.grad(result.abs().sum(), x)
    for t in (result, gradient):
        assert t[0].isnan().all()
        assert t[1].isfinite().all()
    torch.testing.assert_close(result[1], function(good))


# ------------------------------------------------------------------ logarithm of a Gram matrix
@MODES
def test_log_gram(dtype: torch.dtype) -> None:
    w = gaussian(2, 3, 4, 4, dtype=dtype) + 2 * torch.eye(4)
    result = spectral.log_gram(w)
    assert torch.equal(result, result.mH)
    torch.testing.assert_close(result, spectral.logm(w @ w.mH), rtol=1e-9, atol=1e-9)
    t = torch.randn_like(w)
    for single in (w[0, 0], torch.eye(4, dtype=dtype), torch.linalg.qr(w[0, 0])[0]):  # singular values that repeat too
        x = single.clone().requires_grad_()
        assert gradcheck(spectral.log_gram, (x,), check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(spectral.log_gram, (x,), check_fwd_over_rev=True, fast_mode=True)
        two = [
            jvp(lambda y: jvp(f, (y,), (t[0, 0],))[1], (single,), (t[0, 1],))[1]  # noqa: B023
            for f in (spectral.log_gram, lambda y: spectral.logm(y @ y.mH))
        ]
        torch.testing.assert_close(*two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_log_gram_takes_twice_the_condition_number(dtype: torch.dtype) -> None:
    singular = [1e-3, 1e-2, 1.0, 1e3]
    q = [
        torch.linalg.qr(gaussian(4, 4, dtype=torch.complex128 if dtype.is_complex else torch.float64))[0] for _ in "ab"
    ]
    w = (q[0] * torch.tensor(singular).double()) @ q[1]
    expected = (q[0] * (2 * torch.tensor(singular).double().log())) @ q[0].mH
    assert torch.linalg.matrix_norm(spectral.log_gram(w.to(dtype)) - expected) < 0.5
    assert torch.linalg.matrix_norm(spectral.logm((w @ w.mH).to(dtype)) - expected) > 5


def test_log_gram_floor_and_nan() -> None:
    eps = torch.finfo(torch.float32).eps
    w = torch.diag(torch.tensor([0.0, 3.0])).requires_grad_()
    value = spectral.log_gram(w)
    (gradient,) = torch.autograd.grad(value.sum(), w)
    torch.testing.assert_close(value.diagonal(), 2 * torch.tensor([3 * eps, 3.0]).log())
    assert gradient.isfinite().all()
    broken = torch.stack([torch.full((2, 2), torch.nan), torch.eye(2)])
    result = spectral.log_gram(broken)
    assert result[0].isnan().all()
    assert (result[1] == 0).all()


# ------------------------------------------------------------------ positive part
@MODES
def test_relu_is_the_nearest_positive_semidefinite_matrix(dtype: torch.dtype) -> None:
    a = gaussian(4, 5, 5, dtype=dtype)
    p = spectral.relum(a)
    n = p - herm(a)
    assert (torch.linalg.eigvalsh(p) > -1e-13).all()
    assert (torch.linalg.eigvalsh(n) > -1e-13).all()
    assert (p @ n).abs().max() < 1e-13  # Moreau: a difference of two orthogonal elements of the cone


def test_relu_derivative_is_right_at_repeated_eigenvalues() -> None:
    e = gaussian(3, 3, dtype=torch.float64)
    for sign, expected in ((1.0, herm(e)), (-1.0, torch.zeros(3, 3).double())):
        torch.testing.assert_close(jvp(spectral.relum, (sign * torch.eye(3).double(),), (e,))[1], expected)
