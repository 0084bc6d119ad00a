"""The truncated normal distribution: values to 1e-10 on the reference points, derivatives in every mode, samples."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import mpmath as mp
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from manopt_torch import special

POINTS = json.loads((Path(__file__).parent / "reference" / "trug_moments.json").read_text())["points"]
COLUMNS = {k: torch.tensor([float(p[k]) for p in POINTS], dtype=torch.float64) for k in POINTS[0] if k != "kind"}
INPUTS = tuple(COLUMNS[k] for k in ("z", "sigma", "xi1", "xi2"))
INF = math.inf


doubles = functools.partial(torch.tensor, dtype=torch.float64)


def double(*values: float) -> list[Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


def assert_near(value: Tensor, expected: Tensor, floor: Tensor | float, tolerance: float = 1e-10) -> None:
    """|value − expected| ≤ tolerance · max(|expected|, floor), at every point."""
    assert value.isfinite().all()
    error = (value - expected).abs() / torch.maximum(expected.abs(), torch.as_tensor(floor, dtype=torch.float64))
    i = int(error.argmax())
    assert error[i] <= tolerance, (float(error[i]), POINTS[i] if len(error) == len(POINTS) else i)


# ------------------------------------------------------------------ values
def test_moments_at_the_reference_points() -> None:
    found, deviation = special.moments(*INPUTS), COLUMNS["var"].sqrt()
    assert len(POINTS) == 315
    assert_near(found.mean, COLUMNS["mean"], 0.1 * deviation)
    assert_near(special.mean(*INPUTS), COLUMNS["mean"], 0.1 * deviation)
    assert_near(found.variance, COLUMNS["var"], 0.0)
    assert_near(found.third, COLUMNS["m3"], 1e-3 * deviation**3)
    assert_near(found.log_partition, COLUMNS["logZ"], 1e-12)
    for density, key in ((found.density_low, "p_xi1"), (found.density_high, "p_xi2")):
        assert_near(density, COLUMNS[key], 1e-290)
        assert (density[COLUMNS[key] == 0] == 0).all()


def test_derivatives_at_the_reference_points() -> None:
    x = [t.clone().requires_grad_() for t in INPUTS]
    found = special.moments(*x)
    deviation, scale, keys = COLUMNS["var"].sqrt(), COLUMNS["sigma"], ("z", "xi1", "xi2")
    for output, name, floors in (
        (special.mean(*x), "mean", (0.0, 1e-12, 1e-12)),
        (found.mean, "mean", (0.0, 1e-12, 1e-12)),
        (found.variance, "var", (1e-3 * deviation**3 / scale**2, 1e-12 * deviation, 1e-12 * deviation)),
        (found.log_partition, "logZ", (1e-3 / scale, 1e-12, 1e-12)),
    ):
        gradients = torch.autograd.grad(output.sum(), x, retain_graph=True)
        for gradient, key, floor in zip((gradients[0], *gradients[2:]), keys, floors, strict=True):
            assert_near(gradient, COLUMNS[f"d{name}_d{key}"], floor)
        if name == "mean":
            assert_near(gradients[1], COLUMNS["dmean_dsigma"], 1e-3 * deviation / scale)


def exact(z: float, s: float, low: float, high: float) -> dict[str, float]:
    """From antiderivatives in terms of erfc, with enough digits."""
    with mp.workdps(100):
        z, s, low, high = (mp.mpf(v) for v in (z, s, low, high))
        a, b = (low - z) / s, (high - z) / s
        if a + b < 0:
            return {k: sign * v for (k, v), sign in zip(exact(-z, s, -high, -low).items(), (-1, 1, 1, 1), strict=True)}
        tail = [mp.erfc(x / mp.sqrt(2)) / 2 if mp.isfinite(x) else mp.mpf(x < 0) for x in (a, b)]
        density = [mp.npdf(x) if mp.isfinite(x) else mp.mpf(0) for x in (a, b)]
        P = tail[0] - tail[1]
        A, B = density[0] / P, density[1] / P
        moved = [x * y if mp.isfinite(x) else mp.mpf(0) for x, y in ((a, A), (b, B))]
        variance = s**2 * (1 + moved[0] - moved[1] - (A - B) ** 2)
        return {
            "mean": z + s * (A - B),
            "variance": variance,
            "log_partition": mp.log(P),
            "deviation": mp.sqrt(variance),
        }


def test_float32_in_and_out() -> None:
    x = [t.float() for t in INPUTS]
    kept = x[2] < x[3]
    x = [t[kept] for t in x]
    assert len(x[0]) > 290
    rows = [exact(*point) for point in zip(*(t.tolist() for t in x), strict=True)]
    expected = {k: torch.tensor([float(r[k]) for r in rows], dtype=torch.float64) for k in rows[0]}
    found = special.moments(*x)
    assert {t.dtype for t in found} == {torch.float32}
    assert_near(found.mean.double(), expected["mean"], 0.1 * expected["deviation"].abs(), 2e-6)
    assert_near(special.mean(*x).double(), expected["mean"], 0.1 * expected["deviation"].abs(), 2e-6)
    assert_near(found.variance.double(), expected["variance"], 0.0, 2e-6)
    assert_near(found.log_partition.double(), expected["log_partition"], 1e-12, 2e-6)


def test_float32_rounds_the_reference_once() -> None:
    """Where the inputs are float32 numbers, so are the values, to rounding."""
    same = functools.reduce(torch.logical_and, (t.float().double() == t for t in INPUTS))
    assert same.sum() > 60
    found = special.moments(*(t[same].float() for t in INPUTS))
    for value, key in ((found.mean, "mean"), (found.variance, "var"), (found.log_partition, "logZ")):
        floor = 0.1 * COLUMNS["var"][same].sqrt() if key == "mean" else 1e-12
        assert_near(value.double(), COLUMNS[key][same], floor, 2e-7)


@pytest.mark.parametrize("flip", [False, True])
def test_where_methods_meet(flip: bool) -> None:
    """On both sides of the borders between closed forms and quadratures."""
    borders = [
        (3.0, 1.5),
        (3.0, INF),
        (6.0, 1.5),
        (6.0, INF),
        (0.0, 1.0),
        (4.0, 1.0),
        (-0.4, 1.0),
        (9.0, 2 / 3),
        (39, 1),
        (3.0, math.sqrt(93) - 3),  # w (a + w/2) = 42
        (5.0, math.sqrt(109) - 5),
        (30.0, math.sqrt(984) - 30),
        (37.4, INF),
    ]
    near = [(a + 1e-3 * i, 1e-3 * j + w) for a, w in borders for i in (-1, 1) for j in (-1, 1)]
    near += [(-0.5 * w, w) for w in (1e-9, 0.999, 1.001, 10.0, 79.99, 80.01, 1e3)]
    points = [(-0.7 * a, 0.7, 0.0, 0.7 * w) for a, w in near]
    points = [(-z, s, -high, -low) for z, s, low, high in points] if flip else points
    rows = [exact(*p) for p in points]
    found = special.moments(*doubles(points).unbind(1))
    expected = {k: doubles([float(r[k]) for r in rows]) for k in rows[0]}
    assert_near(found.mean, expected["mean"], 0.1 * expected["deviation"].abs())
    assert_near(found.variance, expected["variance"], 0.0)
    assert_near(found.log_partition, expected["log_partition"], 1e-12)


@pytest.mark.parametrize(("a", "b"), [(3.1, INF), (3.1, 7.0), (8.0, INF), (50.0, INF), (12.0, 15.6), (7.0, 9.0)])
def test_high_orders_in_the_tail(a: float, b: float) -> None:
    """Central moments that derivatives of order five need, by quadrature with many digits."""
    found = special._moments(6, *double(-a, 1.0, 0.0, b - a))
    with mp.workdps(40):
        pieces = [
            mp.mpf(0),
            *(mp.mpf(t) for t in (1 / a, 3 / a, 10 / a, 30 / a) if t < b - a),
            min(b - a, 100 / a + 12),
        ]
        total, *raw = (
            mp.quad(lambda t, k=k: t**k * mp.exp(-a * t - t * t / 2), [mp.mpf(p) for p in pieces]) for k in range(7)
        )
        raw = [mp.mpf(1), *(r / total for r in raw)]
        for k in range(2, 7):
            expected = sum(mp.binomial(k, j) * raw[j] * (-raw[1]) ** (k - j) for j in range(k + 1))
            assert abs(found[5 + k].item() / expected - 1) < 1e-10, k


@pytest.mark.parametrize("flip", [False, True])
def test_an_infinite_end_for_all_is_that_end_for_each(flip: bool) -> None:
    """An end given as one number, the same in a tensor, and in a tensor beside a finite one."""
    z = torch.linspace(-50, 50, 101, dtype=torch.float64)
    ends = [torch.full_like(z, 0.3), torch.full_like(z, INF)]
    mixed = ends[1].clone()
    mixed[::2] = 0.5
    low, high, other = (-ends[1], ends[0], -mixed) if flip else (*ends, mixed)
    one_number = special.moments(z, 0.5, *((-INF, 0.3) if flip else (0.3, INF)))
    for value, each, beside in zip(
        one_number,
        special.moments(z, 0.5, low, high),
        special.moments(z, 0.5, *((other, high) if flip else (low, other))),
        strict=True,
    ):
        torch.testing.assert_close(value, each, rtol=1e-14, atol=0)
        torch.testing.assert_close(value[1::2], beside[1::2], rtol=1e-12, atol=1e-300)
    untruncated = special.moments(z, 0.5, torch.full_like(z, -INF), torch.full_like(z, INF))
    assert torch.equal(untruncated.mean, z)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_that_of_the_arguments(dtype: torch.dtype) -> None:
    z = torch.randn(5, dtype=dtype, requires_grad=True)
    value = special.mean(z, 0.5, 0.0, INF)
    value.sum().backward()
    assert value.dtype == z.grad.dtype == dtype
    torch.testing.assert_close(value, special.mean(z.detach().double(), 0.5, 0.0, INF).to(dtype))
    assert special.mean(z, torch.tensor(0.5), 0.0, 1.0).dtype == torch.float32
    assert special.mean(0.3, 0.5, 0.0, 1.0).dtype == torch.get_default_dtype()


def test_complex_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="real floating point"):
        special.mean(torch.ones(2, dtype=torch.complex64), 1.0, 0.0, 1.0)


def test_untruncated() -> None:
    z = torch.linspace(-1e4, 1e4, 7, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    found = special.moments(z, s, -INF, INF)
    assert (found.mean == z).all()
    assert (found.variance - 0.49).abs().max() < 1e-15
    assert found.log_partition.abs().max() == found.third.abs().max() == 0
    dz, ds = torch.autograd.grad(found.mean.sum(), (z, s))
    assert (dz - 1).abs().max() < 1e-15
    assert ds == 0


@pytest.mark.parametrize(("low", "high"), [(-1.0, 2.5), (0.0, INF), (-INF, -0.3), (1.0, 1.0001)])
def test_shift_scale_reflection(low: float, high: float) -> None:
    z = torch.cat([torch.linspace(-60, 60, 41), torch.tensor([-1e4, 1e4])]).double()
    plain, s = special.moments(z, 0.8, low, high), 0.8
    shifted = special.moments(z + 0.75, s, low + 0.75, high + 0.75)
    assert (shifted.mean - plain.mean - 0.75).abs().max() < 1e-11
    scaled, mirrored = special.moments(3 * z, 3 * s, 3 * low, 3 * high), special.moments(-z, s, -high, -low)
    torch.testing.assert_close(scaled.mean, 3 * plain.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled.variance, 9 * plain.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(mirrored.mean, -plain.mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(mirrored.third, -plain.third, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(mirrored.density_low, plain.density_high, rtol=1e-14, atol=0)
    bound = doubles([s**2, (high - low) ** 2 / 4]).min()
    assert (plain.variance <= bound * (1 + 1e-12)).all()
    assert (plain.variance > 0).all()
    assert (plain.mean >= low).all()
    assert (plain.mean <= high).all()


def test_narrow_interval_is_uniform() -> None:
    for width in (1e-3, 1e-6, 1e-12):
        x = [t.requires_grad_() for t in double(0.1, 0.5, 0.0, width)]
        found = special.moments(*x)
        dz, _, dlow, dhigh = torch.autograd.grad(found.mean, x)
        assert abs(found.mean.item() / width - 0.5) < width
        assert abs(found.variance.item() * 12 / width**2 - 1) < width
        assert abs(dz.item() * 12 * 0.25 / width**2 - 1) < width
        assert abs(dlow.item() - 0.5) + abs(dhigh.item() - 0.5) < width


# ------------------------------------------------------------------ derivatives
def far_points() -> list[Tensor]:
    z = doubles([-1e4, -300.0, -40.0, -9.0, 0.0, 9.0, 40.0, 300.0, 1e4])
    ends = doubles([[0.0, INF], [-INF, 0.0], [-1.0, 1.0], [-INF, INF], [0.2, 0.2 + 1e-9]])
    return [t.clone() for t in torch.broadcast_tensors(z, doubles(1.0), ends[:, :1], ends[:, 1:])]


def test_gradients_are_finite_and_sum_to_one() -> None:
    x = [t.requires_grad_() for t in far_points()]
    value = special.mean(*x)
    first = torch.autograd.grad(value.sum(), x, create_graph=True)
    plain = torch.autograd.grad(special.mean(*x).sum(), x)
    for a, b in zip(first, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-300)
    dz, _, dlow, dhigh = first
    assert (dz + dlow + dhigh - 1).abs().max() < 1e-12
    assert all((d >= 0).all() for d in (dz, dlow, dhigh))
    assert (dlow[x[2] == -INF] == 0).all()
    assert (dhigh[x[3] == INF] == 0).all()
    second = torch.autograd.grad(sum(d.sum() for d in first), x, retain_graph=True)
    for derivative in (*first, *second):
        assert derivative.isfinite().all()
    # translation: derivatives of dz along (1, 0, 1, 1) vanish
    by = torch.autograd.grad(dz.sum(), x)
    assert ((by[0] + by[2] + by[3]).abs() <= 1e-11 * by[0].abs() + 1e-14).all()
    everything = special.moments(*x)
    for derivative in torch.autograd.grad(sum(t.sum() for t in everything), x):
        assert derivative.isfinite().all()


def ordinary(seed: int = 3, n: int = 3) -> tuple[Tensor, ...]:
    """Arguments of functions of z, log scale, low, log width."""
    generator = torch.Generator().manual_seed(seed)
    return tuple((0.6 * torch.randn(n, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(4))


def of_log(function: Callable) -> Callable:
    return lambda z, s, low, w: function(z, s.exp(), low, low + w.exp())


CASES = {
    "mean": special.mean,
    "moments": lambda *x: tuple(special.moments(*x)),
    "log_density": lambda z, s, low, high: special.log_density(0.3 * low + 0.7 * high, z, s, low, high),
    "cumulative": lambda z, s, low, high: special.cumulative(0.3 * low + 0.7 * high, z, s, low, high),
    "quantile": lambda z, s, low, high: special.quantile(0.3, z, s, low, high),
    "one-sided": lambda z, s, low, high: tuple(special.moments(z, s, low, INF)),
    "one-sided quantile": lambda z, s, low, high: special.quantile(torch.sigmoid(high), z, s, -INF, low),
    "tail": lambda z, s, low, high: special.moments(z - 12 * s, s, low, high)[:4],
    "tail quantile": lambda z, s, low, high: special.quantile(0.6, z + 14 * s, s, low, high),
}


@pytest.mark.parametrize("name", CASES)
def test_two_derivatives(name: str) -> None:
    function = of_log(CASES[name])
    x = ordinary()
    assert gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, x, check_fwd_over_rev=True, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("name", ["mean", "log_density", "quantile", "cumulative"])
def test_modes_nest(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        return of_log(CASES[name])(*x.unbind())

    x, a, b, c = doubles([[0.2, -0.3, 0.4, 0.9], [1.0, 2.0, 0.3, -1.0], [0.5, 0, 1, 1], [-2, 1, 1, 0]])
    expected = jacrev(jacrev(f))(x)
    torch.testing.assert_close(expected, expected.mH, rtol=1e-10, atol=1e-12)
    batched = vmap(hessian(f))(torch.stack([x, x + 0.1]))[0]
    for found in (hessian(f)(x), jacfwd(jacfwd(f))(x), jacrev(jacfwd(f))(x), batched):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    def along(g: Callable, e: Tensor) -> Callable:
        return lambda x: jvp(g, (x,), (e,))[1]

    third = grad(lambda x: grad(lambda x: grad(f)(x) @ a)(x) @ b)(x) @ c
    torch.testing.assert_close(along(along(along(f, a), b), c)(x), third, rtol=1e-9, atol=1e-12)


def test_vmap_over_some_arguments() -> None:
    z, low = torch.randn(3, 5).double(), torch.randn(3).double()
    expected = special.mean(z, 0.5, low[:, None], low[:, None] + 1)
    torch.testing.assert_close(vmap(lambda z, low: special.mean(z, 0.5, low, low + 1))(z, low), expected)
    torch.testing.assert_close(vmap(lambda z: special.mean(z, 0.5, low, low + 1), in_dims=1, out_dims=1)(z), expected)
    torch.testing.assert_close(
        vmap(grad(lambda z: special.mean(z, 0.5, 0.0, INF)))(low), special.moments(low, 0.5, 0.0, INF).variance / 0.25
    )


def test_blocks_and_broadcasting() -> None:
    z, low = torch.randn(700, 100).double() * 8, torch.linspace(-1, 0, 100).double()
    whole = special.mean(z, 0.5, low, low + 1)
    for i, j in ((0, 0), (699, 99), (655, 36), (350, 50)):
        assert whole[i, j] == special.mean(z[i, j], 0.5, low[j], low[j] + 1)
    assert special.mean(z[:0], 0.5, low, 1.0).shape == (0, 100)


# torch.compile itself instantiates a Function while it traces one (2.13)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_has_no_graph_break() -> None:
    def f(z: Tensor, low: Tensor) -> Tensor:
        return special.mean(z, 0.5, low, low + 1) + special.moments(z, 0.5, low, INF).variance

    z, low = (torch.randn(4).double().requires_grad_() for _ in range(2))
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(z, low), f(z, low))
    torch.testing.assert_close(compiled(z.detach(), low.detach()), f(z, low))
    found = torch.autograd.grad(compiled(z, low).sum(), (z, low))
    torch.testing.assert_close(found, torch.autograd.grad(f(z, low).sum(), (z, low)))


def test_operators_obey_the_rules_of_torch_library() -> None:
    x = [t.contiguous() for t in torch.broadcast_tensors(5 * torch.randn(3, 4).double(), *double(0.7, -1.0, 1.0))]
    torch.library.opcheck(special._mean_kernel, tuple(x))
    torch.library.opcheck(special._moments_kernel, (*x, 3))
    torch.library.opcheck(special._quantile_kernel, (torch.rand(3, 4).double(), *x))


# ------------------------------------------------------------------ distribution function, quantile, samples
PLACES = [
    (0.0, 1.0, -1.0, 1.0),
    (0.0, 1.0, -INF, INF),
    (-3.0, 1.0, 0.0, INF),
    (-40.0, 1.0, 0.0, INF),
    (-1e4, 1.0, 0.0, INF),
    (-1e4, 1.0, 0.0, 1e-4),
    (1e4, 1.0, -0.7, 0.1),
    (9.0, 2.0, -INF, -3.0),
    (0.1, 1.0, 0.0, 0.5),
    (-5.0, 1.0, 0.0, 0.3),
    (-20.0, 1.0, 0.0, 0.3),
    (0.3, 1.0, 0.0, 1e-9),
    (5.0, 0.4, 0.0, 4.0),
]


def exact_cumulative(x: float, z: float, s: float, low: float, high: float) -> mp.mpf:
    x, z, s, low, high = (mp.mpf(v) for v in (x, z, s, low, high))
    sign = -1 if z > high else 1  # tails on the side where they are small

    def tail(v: mp.mpf) -> mp.mpf:
        return mp.erfc(sign * (v - z) / s / mp.sqrt(2)) / 2 if mp.isfinite(v) else mp.mpf(sign * v < 0)

    return (tail(low) - tail(x)) / (tail(low) - tail(high))


@pytest.mark.parametrize("place", PLACES)
def test_quantile_and_distribution_function(place: tuple[float, ...]) -> None:
    u = doubles([1e-6, 0.01, 0.3, 0.5, 0.77, 0.999, 1 - 1e-6])
    x = special.quantile(u, *place)
    with mp.workdps(60):
        expected = doubles([float(exact_cumulative(v, *place)) for v in x.tolist()])
    torch.testing.assert_close(special.cumulative(x, *place), expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(u, expected, rtol=1e-9, atol=0)
    low, high = place[2:]
    ends = special.cumulative(doubles([low - 1, low, high, high + 1]), *place)
    assert ends.tolist() == [0, 0, 1, 1]
    extreme = special.quantile(doubles([0.0, 1.0]), *place)
    assert extreme.isfinite().all()
    assert low <= extreme[0] < extreme[1] <= high


@pytest.mark.parametrize("place", PLACES)
def test_log_density(place: tuple[float, ...]) -> None:
    z, _, low, high = place
    x = special.quantile(doubles([0.1, 0.5, 0.9]), *place)
    with mp.workdps(60):
        step = [mp.mpf(v) for v in place]
        sign = -1 if z > high else 1
        tails = [
            mp.erfc(sign * (v - step[0]) / step[1] / mp.sqrt(2)) / 2 if mp.isfinite(v) else mp.mpf(sign * v < 0)
            for v in step[2:]
        ]
        expected = [float(mp.log(mp.npdf(v, step[0], step[1]) / abs(tails[0] - tails[1]))) for v in x.tolist()]
    torch.testing.assert_close(special.log_density(x, *place), doubles(expected), rtol=1e-11, atol=1e-11)
    outside = doubles([low - 1.0, high + 1.0])
    assert (special.log_density(outside, *place).exp() == 0).all()


# an interval of few float32 numbers is no place for a continuous distribution
@pytest.mark.parametrize(
    ("dtype", "place"), [(torch.float64, p) for p in PLACES] + [(torch.float32, p) for p in PLACES if p[0] != 1e4]
)
def test_samples(dtype: torch.dtype, place: tuple[float, ...]) -> None:
    """Kolmogorov-Smirnov at level 1e-4; the seed is fixed."""
    z = torch.full((4000,), place[0], dtype=dtype)
    h = special.sample(z, *place[1:], generator=torch.Generator().manual_seed(7))
    assert h.dtype == dtype
    assert (h >= place[2]).all()
    assert (h <= place[3]).all()
    u = special.cumulative(h.double(), *place)
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    again = special.sample(z, *place[1:], generator=torch.Generator().manual_seed(7))
    assert torch.equal(h, again)


def test_samples_move_as_the_distribution_does() -> None:
    """Means of pathwise derivatives are the derivatives of the mean."""
    x = [t.requires_grad_() for t in double(-0.4, 0.8, 0.1, 1.3)]
    h = special.sample(x[0].expand(100_000), *x[1:], generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(h.mean(), x)
    expected = torch.autograd.grad(special.mean(*x), x)
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) < 5 * 1 / math.sqrt(100_000)


@pytest.mark.parametrize("place", PLACES)
def test_samples_have_finite_derivatives(place: tuple[float, ...]) -> None:
    x = [t.requires_grad_() for t in double(*place)]
    u = doubles([0.0, 1e-6, 0.4, 1 - 1e-9, 1.0])
    h = special.quantile(u, *x)
    first = torch.autograd.grad(h.sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(d for d in first), x)
    assert all(d.isfinite() for d in (*first, *second))
    for end, derivative in zip(x[2:], first[2:], strict=True):
        assert end.isfinite() or derivative == 0
