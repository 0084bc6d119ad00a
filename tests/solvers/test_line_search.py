"""Line searches: their conditions on curves with a known minimum, their limits, what they evaluate."""

import itertools
import math

import pytest
import torch

from manopt_torch import SPD, Euclidean, Sphere, Stiefel, Unitary
from manopt_torch.manifolds.product import Product
from manopt_torch.solvers import Armijo, GradientDescent, HagerZhang, Problem, StrongWolfe, minimize
from manopt_torch.solvers.line_search import Curve, LineSearch

SEARCHES = [Armijo(), StrongWolfe(), StrongWolfe(curvature=0.01), HagerZhang(), HagerZhang(curvature=0.2)]
every = pytest.mark.parametrize("search", SEARCHES, ids=repr)


class Calls:
    """A cost that remembers where it was asked."""

    def __init__(self, f):
        self.f, self.values = f, []

    def __call__(self, *x):
        value = self.f(*x)
        self.values.append(value.item())
        return value


def along_gradient(f, x, manifold=None):
    """The problem, and its curve from x along minus the gradient."""
    problem = Problem(f, Product(Euclidean() if manifold is None else manifold))
    state = GradientDescent().init(problem, (x,))
    return problem, Curve(problem, state, tuple(-t[None] for t in state.g))


#: costs of one number, each from a start
CURVES = {
    "parabola": (lambda x: 0.5 * x.square().sum(), 3.0),
    "quartic": (lambda x: (x**4).sum(), 2.0),
    "cosine": (lambda x: -x.cos().sum(), 2.0),
    "flat valley": (lambda x: (1 + 1e-6 * x.square()).log().sum(), 50.0),
    "steep": (lambda x: (20 * x).cosh().log().sum(), 1.0),
    "barrier": (lambda x: x.sum() - x.log().sum(), 0.01),  # NaN for x < 0
    "kink": (lambda x: (x.abs() + 0.1 * x.square()).sum(), 1.0),
}


@every
@pytest.mark.parametrize("t", [1e-6, 1e-2, 1.0, 1e4])
@pytest.mark.parametrize("name", CURVES)
def test_a_step_fulfils_its_conditions(search, name, t):
    """φ(t) ≤ φ(0) + c₁ t φ'(0), and the bounds of φ'(t), with φ' from autograd by hand."""
    f, x = CURVES[name]
    calls = Calls(f)
    problem, curve = along_gradient(calls, torch.tensor([x], dtype=torch.float64))
    end = search(curve, t)

    def phi(t):
        y = (curve.start.x[0] + t * curve.start.carried[0][0]).requires_grad_()
        return f(y).item(), (torch.autograd.grad(f(y), y)[0] * curve.start.carried[0][0]).sum().item()

    (f0, slope0), (ft, slope) = phi(0.0), phi(end.step)
    assert end.step > 0
    assert ft < f0
    assert math.isclose(end.f, ft, rel_tol=1e-14)
    assert math.isclose(end.slope, slope, rel_tol=1e-9, abs_tol=1e-14)
    smooth = name != "kink"  # no slope near zero there
    if smooth or isinstance(search, Armijo):
        assert ft <= f0 + search.decrease * end.step * slope0 or isinstance(search, HagerZhang)
    if isinstance(search, StrongWolfe) and smooth:
        assert abs(slope) <= -search.curvature * slope0
    if isinstance(search, HagerZhang) and smooth:
        assert slope >= search.curvature * slope0
        assert ft <= f0 + search.decrease * end.step * slope0 or slope <= (2 * search.decrease - 1) * slope0
    assert len(calls.values) == problem.nfev <= 1 + search.max_evaluations
    assert problem.njev <= problem.nfev


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    ("manifold", "shape", "exact"),
    [
        (Sphere(), (4, 3), True),
        (SPD(), (3, 3), True),
        (Unitary(retraction="exp"), (3, 3), True),
        (Euclidean(), (5,), True),
        (Unitary(), (3, 3), False),
        (Stiefel(), (5, 3), False),
        (Stiefel(retraction="qr"), (5, 3), False),
    ],
    ids=repr,
)
def test_slopes_are_derivatives_along_the_curve(manifold, shape, exact, dtype):
    """φ'(t) against a central difference of order four: everywhere where the carried direction is the velocity of the
    curve, elsewhere near t = 0."""
    x = manifold.random(*shape, dtype=dtype)
    a = torch.randn(shape, dtype=dtype)
    _, curve = along_gradient(lambda x: (a.conj() * x).real.sin().sum(), x, manifold)
    for t in (0.0, 1e-2, 0.3, 1.1) if exact else (0.0, 1e-3):
        h = 1e-3
        left2, left, right, right2 = (curve.at(t + k * h).f for k in (-2, -1, 1, 2))
        expected = (8 * (right - left) - (right2 - left2)) / (12 * h)
        assert math.isclose(curve.at(t).slope, expected, rel_tol=1e-8 if exact else 3 * t + 1e-8, abs_tol=1e-9)


@every
def test_one_evaluation_where_the_first_step_is_good(search):
    problem, curve = along_gradient(lambda x: 0.5 * x.square().sum(), torch.ones(3, dtype=torch.float64))
    end = search(curve, 1.0)
    assert end.step == 1.0
    assert (problem.nfev, problem.njev) == (2, 2)
    assert end.g[0].abs().max() == 0
    assert (problem.nfev, problem.njev) == (2, 2), "the gradient was computed again"


def test_armijo_asks_no_gradient_where_it_refuses():
    problem, curve = along_gradient(lambda x: 0.5 * x.square().sum(), torch.ones(3, dtype=torch.float64))
    Armijo()(curve, 64.0)
    assert problem.nfev > 2
    assert problem.njev == 2


@every
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_evaluations_are_capped(search, limit):
    """A cost that falls nowhere but at the start's left: no more than the cap, and the start comes back."""
    search = type(search)(max_evaluations=limit)
    problem, curve = along_gradient(lambda x: (1 + x.sum().abs()).log(), torch.tensor([1e-30], dtype=torch.float64))
    end = search(curve, 1.0)
    assert problem.nfev <= 1 + limit
    assert end.f <= curve.start.f
    if end is not curve.start:
        assert end.f < curve.start.f


@every
def test_a_wrong_gradient_ends_at_the_start(search):
    """Uphill everywhere along d: t = 0, and no evaluation beyond the cap."""
    problem = Problem(lambda x: x.square().sum(), Product(Euclidean()))
    x = torch.ones(2, dtype=torch.float64)
    state = GradientDescent().init(problem, (x,))
    curve = Curve(problem, state, tuple(t[None] for t in state.g))
    curve.start.slope = -1.0  # what a wrong gradient would claim
    end = search(curve, 1.0)
    assert end is curve.start
    assert problem.nfev <= 1 + search.max_evaluations


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_accepted(search, bad):
    """The cost is bad beyond x < 1/2: steps are shortened until it is not."""

    def f(x):
        return torch.where(x < 0.5, bad, x).sum()

    _, curve = along_gradient(f, torch.ones(1, dtype=torch.float64))
    end = search(curve, 100.0)
    assert 0 < end.step <= 0.5
    assert math.isfinite(end.f)


@every
def test_a_gradient_that_is_not_finite_is_never_accepted(search):
    """√(x − 1/2) where x is large, 0 with a gradient of NaN below 1/2."""

    def f(x):
        return (x.clamp(min=0.5) - 0.5).sqrt().sum() + x.sum()

    _, curve = along_gradient(f, torch.ones(1, dtype=torch.float64))
    end = search(curve, 0.5)
    assert math.isfinite(end.slope)


@every
def test_the_step_limit_of_a_manifold_is_respected(search):
    """newton_schulz is feasible up to a length: every point of a batch keeps to it, whatever t is tried."""
    manifold = Stiefel(retraction="newton_schulz")
    a, x = torch.randn(3, 4, 2, dtype=torch.float64), manifold.random(3, 4, 2, dtype=torch.float64)
    _, curve = along_gradient(lambda x: (a * x).sum(), x, manifold)
    longest = manifold.norm(x, curve.start.carried[0][0]).max()
    end = search(curve, 1e6)
    assert math.isclose(curve.limit * longest, manifold.step_limit, rel_tol=1e-12)
    assert 0 < end.step <= curve.limit
    assert manifold.residual(end.x[0]).max() < 1e-13


def test_rounding_is_told_by_slopes():
    """Near the minimum of a cost of size 1e8 costs are equal to rounding: Hager and Zhang's search still goes on."""
    a = torch.linspace(1, 3, 5, dtype=torch.float64)
    x0 = torch.full((5,), 1e-5, dtype=torch.float64)

    def f(x):
        return 1e8 + (a * x.square()).sum() / 2

    settings = {"tolerance_grad": 1e-9, "max_iter": 60}
    assert minimize(f, Euclidean(), x0, GradientDescent(HagerZhang()), **settings).success
    stuck = minimize(f, Euclidean(), x0, GradientDescent(Armijo()), **settings)
    assert not stuck.success
    assert "at working precision" in stuck.message


@pytest.mark.parametrize(
    "search",
    [
        lambda: Armijo(decrease=0.0),
        lambda: Armijo(decrease=1.0),
        lambda: StrongWolfe(decrease=0.5, curvature=0.1),
        lambda: HagerZhang(curvature=math.nan),
        lambda: HagerZhang(max_evaluations=0),
    ],
)
def test_bad_constants_are_refused(search):
    with pytest.raises(ValueError, match=r"expected 0 < decrease.*< 1 and max_evaluations >= 1, got"):
        search()


def test_a_search_of_ones_own():
    """A line search is a class with a judge: here exact to a per cent."""

    class Exact(LineSearch):
        max_evaluations = 40

        def judge(self, curve, trial):
            return 0 if abs(trial.slope) < 0.01 * abs(curve.start.slope) else int(math.copysign(1, trial.slope))

    a = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    x0 = Sphere().nearest(torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64))
    costs = []
    result = minimize(
        lambda x: x @ a @ x, Sphere(), x0, GradientDescent(Exact()), callback=lambda r: costs.append(r.fun)
    )
    assert result.success
    assert math.isclose(result.fun, 1.0, rel_tol=1e-10)
    assert all(b <= a for a, b in itertools.pairwise(costs))


def test_epsilon_of_hager_and_zhang():
    """With a good slope costs are accepted up to 16 units of roundoff above the start's, and no more."""
    _, curve = along_gradient(lambda x: 1e8 + x.square().sum(), torch.ones(1, dtype=torch.float64))
    trial = curve.at(0.5)  # the minimum of the parabola
    eps = torch.finfo(torch.float64).eps * curve.start.f
    trial.slope = 0.5 * curve.start.slope * (-1)
    for units, verdict in ((-100, 0), (8, 0), (64, 1)):
        trial.f = curve.start.f + units * eps
        assert HagerZhang().judge(curve, trial) == verdict
