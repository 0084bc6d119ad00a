"""The laws that manifolds, optimizers and solvers obey, as functions that can be run on any class, your own included.

::

    check_manifold(MyManifold(), (5, 3))                            # every law, four dtypes, two batch shapes
    check_manifold(MyManifold(), (5, 3), laws=["M2", "M3"])         # some
    check_optimizer(lambda groups: MyOptimizer(groups, lr=0.1), Stiefel(), (5, 3))
    check_solver(LBFGS(), Stiefel(), (5, 3))
    check_gradient(M, f, x); check_hessian(M, f, x)                 # is M right for this f, and f smooth at x?

A law that is broken raises :class:`LawViolation`, which names the law, what was measured and what is allowed. Nothing
here compares a formula with a copy of itself: expected values are what the law says, or another way to compute them.

A class that breaks a law knowingly says so in a class attribute ``exempt = {"O6": "why"}``, by the law's number or its
whole name; an exemption from a law that in fact holds is a violation too.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import jvp, vmap

from manopt_torch.manifolds import Manifold
from manopt_torch.manifolds.product import Product
from manopt_torch.parameter import fault_of
from manopt_torch.solvers import Problem, Result, Solver, minimize

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
BATCH_SHAPES: tuple[tuple[int, ...], ...] = ((), (2, 3))

#: An entry of a result is right to this many units of roundoff, and a Frobenius norm of N entries to √N times that: an
#: entry comes from a few products and one factorisation of small matrices, each good to a few units
#: (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5 and theorem 10.3).
ROUNDOFF = 64
#: A measured order may fall short of the true one by this much: the fit sees the next term of the series too.
SLOPE_SLACK = 0.2
#: Relative error of a central difference of step h = ε^(1/3) is ε^(2/3), about 4e-11; curvature costs the rest.
DIFFERENCE = 1e-6
#: Relative error left when an optimum is approached with a decaying learning rate; a wrong optimum is off by O(1).
OPTIMUM = 1e-2
#: Least growth of the residual per unit of departure from the manifold.
RESIDUAL_GROWTH = 0.02

Parameters = list[nn.Parameter]
Factory = Callable[[Any], torch.optim.Optimizer]


class LawViolation(AssertionError):
    """A law does not hold; ``law`` is its name."""

    def __init__(self, law: str, message: str) -> None:
        super().__init__(f"{law}: {message}")
        self.law = law


class NotApplicable(Exception):
    """A law has nothing to say here: an optional method is absent, or the option it speaks of is off."""


class Law(NamedTuple):
    """``check(setting)`` returns if the law holds there. A ``fine`` law runs in double precision on single points."""

    check: Callable[[Any], object]
    fine: bool


#: every law by its name, in the order in which they are checked
MANIFOLD_LAWS: dict[str, Law] = {}
OPTIMIZER_LAWS: dict[str, Law] = {}
SOLVER_LAWS: dict[str, Law] = {}

Check = TypeVar("Check", bound=Callable[[Any], object])


def _law(registry: dict[str, Law], name: str, fine: bool = False) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        registry[name] = Law(check, fine)
        return check

    return register


def _named(name: str, law: str) -> bool:
    return law in (name, name.split()[0])


def select_laws(registry: Mapping[str, Law], laws: Iterable[str] | None) -> dict[str, Law]:
    """The laws with these names or numbers; all for None. ``ValueError`` for an unknown one."""
    if laws is None:
        return dict(registry)
    wanted = [laws] if isinstance(laws, str) else some(laws=laws)
    for law in wanted:
        if not any(_named(name, law) for name in registry):
            raise ValueError(f"there is no law {law!r}; the laws are: {'; '.join(registry)}")
    return {name: law for name, law in registry.items() if any(_named(name, w) for w in wanted)}


def some(**given: Iterable[Any]) -> tuple[Any, ...]:
    """The one argument as a tuple; ``ValueError`` for an empty one, with which nothing would be checked."""
    ((name, values),) = given.items()
    if not (items := tuple(values)):
        raise ValueError(f"{name} is empty, so that nothing would be checked")
    return items


def exemption(name: str, *owners: Any) -> str | None:
    """The sentence with which one of ``owners`` excuses itself from the law ``name``; None without one."""
    for owner in owners:
        for law, sentence in getattr(owner, "exempt", {}).items():
            if _named(name, law):
                return str(sentence)
    return None


def _hold(name: str, law: Law, settings: Iterable[Any], excuse: str | None) -> bool:
    """Check one law in all settings; whether it applied in any of them."""
    applied, violation = False, None
    for setting in settings:
        try:
            law.check(setting)
        except NotApplicable:
            continue
        except Exception as error:
            violation = error if isinstance(error, LawViolation) else setting.violation(f"raised {error!r}")
            if excuse is None:
                raise violation from (None if violation is error else error)
        applied = True
    if excuse is not None and applied and violation is None:
        raise LawViolation(name, f"an exemption is declared ({excuse!r}), but the law holds: remove it")
    return applied


class _Setting:
    """Where a law is checked, and how what is measured there is compared."""

    def __init__(
        self, law: str, manifold: Manifold, shape: tuple[int, ...], batch: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.law, self.manifold, self.shape, self.batch, self.dtype = law, manifold, shape, batch, dtype
        self.generator = torch.Generator().manual_seed(2016)
        size = math.prod(shape) * (2 if dtype.is_complex else 1)
        self.tolerance = ROUNDOFF * torch.finfo(dtype).eps * math.sqrt(size)

    def violation(self, message: str) -> LawViolation:
        where = f"{self.manifold!r}, {self.dtype}, shape {(*self.batch, *self.shape)}"
        return LawViolation(self.law, f"{message} ({where})")

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise self.violation(message)

    def small(self, what: str, measured: Tensor | float, allowed: float) -> None:
        """Require max |measured| <= allowed; NaN is not."""
        worst = float(torch.as_tensor(measured).detach().abs().amax()) if _numel(measured) else 0.0
        self.require(worst <= allowed, f"{what}: measured {worst:.3g}, allowed {allowed:.3g}")

    def close(self, what: str, actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
        """Require equal shapes and dtypes, and entries equal to ``scale`` tolerances of the largest."""
        self.require(
            actual.shape == expected.shape and actual.dtype == expected.dtype,
            f"{what}: got {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}",
        )
        difference = torch.where(actual == expected, 0, actual - expected)
        finite = expected[expected.abs().isfinite()].abs()
        largest = max(1.0, float(finite.max()) if finite.numel() else 0.0)
        self.small(what, difference, self.tolerance * scale * largest)

    def order(self, what: str, error: Callable[[float], Tensor], least: float, scale: float = 1.0) -> Slope:
        """Require ``error(t)``, a difference of numbers of size ``scale``, to fall at least like t^least."""
        errors = torch.stack([error(float(t)).detach().abs().max().double() for t in STEPS])
        slope = Slope(what, tuple(STEPS.tolist()), tuple(errors.tolist()), least, scale)
        self.require(
            slope.order >= least - SLOPE_SLACK,
            f"{what}: measured order {slope.order:.3g}, at least {least:g} required",
        )
        return slope

    # ------------------------------------------------------------------ points and vectors
    def point(self, *batch: int) -> Tensor:
        return self.manifold.random(*(batch or self.batch), *self.shape, dtype=self.dtype, generator=self.generator)

    def ambient(self, *batch: int) -> Tensor:
        shape = (*(batch or self.batch), *self.shape)
        return torch.randn(shape, dtype=self.dtype, generator=self.generator)

    def tangent(self, x: Tensor) -> Tensor:
        """A random tangent vector at each x, of Euclidean length 1."""
        u = self.manifold.project(x, torch.randn(x.shape, dtype=x.dtype, generator=self.generator))
        return _unit(u, self.lengths(u))

    def step(self, x: Tensor, length: float) -> Tensor:
        """A random tangent vector at each x, of the given length in its metric, or of the longest allowed."""
        u = self.tangent(x)
        norm = self.manifold.norm(x, u).reshape(x.shape[: x.ndim - len(self.shape)] + (1,) * len(self.shape))
        allowed = min(length, 0.999 * self.manifold.step_limit)
        return allowed * _unit(u, norm)

    def lengths(self, u: Tensor) -> Tensor:
        """Euclidean length of each vector, in the shape that divides it."""
        rows = u.reshape(*u.shape[: u.ndim - len(self.shape)], -1)
        return rows.norm(dim=-1).reshape(rows.shape[:-1] + (1,) * len(self.shape))

    def condition(self, *points: Tensor) -> float:
        """Largest condition number of the metric on the tangent spaces at the points: it multiplies roundoff."""
        wide = torch.promote_types(self.dtype, torch.float64)
        worst = 1.0
        for x in points:
            for one in x.detach().to(wide).reshape(-1, *self.shape):
                basis = _basis(self.shape, wide)
                n = len(basis)
                t = self.manifold.project(one.expand_as(basis), basis)
                left = t[:, None].expand(n, n, *self.shape).reshape(n * n, *self.shape)
                right = t[None].expand(n, n, *self.shape).reshape(n * n, *self.shape)
                gram = self.manifold.inner(one.expand_as(left), left, right).reshape(n, n)
                values = torch.linalg.eigvalsh((gram + gram.mT) / 2)
                values = values[values > 1e-9 * values[-1]]
                worst = max(worst, float(values[-1] / values[0])) if len(values) else worst
        return worst

    def calls(self, *batch: int) -> dict[str, tuple[Tensor, ...]]:
        """Arguments for each function of tensors that the manifold has."""
        x, g = self.point(*batch), self.ambient(*batch)
        u, v = self.step(x, 0.5), self.tangent(x)
        y = self.manifold.retract(x, u)
        arguments = {
            "project": (x, g),
            "retract": (x, u),
            "residual": (x + g / 16,),
            "rgrad": (x, g),
            "inner": (x, u, v),
            "norm": (x, v),
            "move": (x, u, v),
            "weingarten": (x, u, g),
            "nearest": (x + g / 16,),
            "exp": (x, u),
            "log": (x, y),
            "dist": (x, y),
        }
        if type(self.manifold).dist is Manifold.dist:
            del arguments["dist"]  # the norm of log, which is checked
        if type(self.manifold).weingarten is Manifold.weingarten:
            del arguments["weingarten"]  # the derivative of retract, which is checked; it takes long
        return {name: args for name, args in arguments.items() if self.has(name, *args)}

    def has(self, name: str, *arguments: Tensor) -> bool:
        """Whether the manifold has this function; asked with an empty batch, which costs little."""
        try:
            getattr(self.manifold, name)(*(a.reshape(-1, *self.shape)[:0] for a in arguments))
        except NotImplementedError:
            return False
        except Exception:
            return True  # it is there, and the law will say what is wrong with it
        return True

    def need(self, name: str, *arguments: Tensor) -> None:
        if not self.has(name, *arguments):
            raise NotApplicable


def _unit(u: Tensor, norm: Tensor) -> Tensor:
    """u / norm; zero where that is no direction, as on a manifold of dimension 0."""
    return u / torch.where(norm > 0, norm, 1)


def _numel(value: Tensor | float) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _dot(a: Tensor, b: Tensor, dims: int) -> Tensor:
    """⟨a, b⟩ = Re Σ conj(a)·b over the last ``dims`` dimensions."""
    product = (a.conj() * b).real if a.is_complex() else a * b
    return product.sum(dim=tuple(range(-dims, 0))) if dims else product


def _basis(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An orthonormal basis of the real vector space of tensors of this shape."""
    size = math.prod(shape)
    basis = torch.eye(size, dtype=dtype).reshape(size, *shape)
    return torch.cat([basis, 1j * basis]) if dtype.is_complex else basis


def _along(f: Callable[[Tensor], Tensor], at: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """f and its derivative along a direction."""
    value = jvp(f, (at,), (direction,))
    return value[0], value[1]


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


#: where errors are measured that must fall with the step
STEPS = torch.logspace(-0.5, -4.0, 29, dtype=torch.float64)


class Slope(NamedTuple):
    """How an error falls with the step: ``errors[i]`` at ``steps[i]``, which must be O(t^required)."""

    what: str
    steps: tuple[float, ...]
    errors: tuple[float, ...]
    required: float
    #: the size of the numbers whose difference the errors are
    scale: float = 1.0

    @property
    def order(self) -> float:
        """The k of O(tᵏ), from a fit of log against log to the four shortest steps whose error stands clear of the
        roundoff of double precision; inf if it is nothing but roundoff, -inf for errors that are not finite."""
        steps, errors = torch.tensor([self.steps, self.errors], dtype=torch.float64)
        if not bool(errors.isfinite().all()):
            return -math.inf
        clear = errors > 1e-11 * self.scale
        if int(clear.sum()) < 4:
            return math.inf
        last = int(clear.nonzero()[-1]) + 1  # the shortest clear step
        t, e = steps[:last][-4:].log(), errors[:last][-4:].log()
        return float(((t - t.mean()) * (e - e.mean())).sum() / (t - t.mean()).square().sum())

    def plot(self, axes: Any) -> Any:
        """Draw the errors in double logarithmic scale, with a line of the required slope, on Matplotlib's ``axes``,
        such as ``plt.gca()``, which are returned."""
        axes.loglog(self.steps, self.errors, "o", markersize=3, label=f"{self.what}, order {self.order:.2f}")
        scale = self.errors[0] / self.steps[0] ** self.required
        line = [scale * t**self.required for t in self.steps]
        axes.loglog(self.steps, line, "--", linewidth=1, label=f"slope {self.required:g}")
        axes.set_xlabel("t")
        axes.legend()
        return axes


def _fine(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


# ====================================================================== manifolds
def check_manifold(
    manifold: Manifold,
    *shapes: tuple[int, ...],
    dtypes: Iterable[torch.dtype] = DTYPES,
    batch_shapes: Iterable[tuple[int, ...]] = BATCH_SHAPES,
    laws: Iterable[str] | None = None,
) -> list[str]:
    """Check the laws M1 to M13 on ``manifold``; the names of those that applied are returned.

    Args:
        manifold: the one to check.
        shapes: event shapes of points, ``manifold.event_shapes`` by default.
        dtypes, batch_shapes: where to check. Orders, second derivatives and ``gradcheck`` are checked in double
            precision on single points whatever is asked for.
        laws: names or numbers (``"M4"``) of laws; all by default. ``testing.MANIFOLD_LAWS`` lists them.

    Raises:
        LawViolation: the first law that does not hold.
        TypeError: for a class instead of an instance, and for a class that is no dataclass.
        ValueError: for an unknown law, and where nothing would be checked.
    """
    if not isinstance(manifold, Manifold):
        raise TypeError(f"got {manifold!r}, expected an instance of a manifold, such as Stiefel()")
    if not dataclasses.is_dataclass(manifold):
        raise TypeError(f"write @dataclasses.dataclass(frozen=True) over the class {type(manifold).__name__}")
    dtypes, batch_shapes = some(dtypes=dtypes), some(batch_shapes=batch_shapes)
    shapes = shapes or some(event_shapes=manifold.event_shapes)
    applied = []
    for name, law in select_laws(MANIFOLD_LAWS, laws).items():
        kinds = tuple(dict.fromkeys(map(_fine, dtypes))) if law.fine else dtypes
        settings = (
            _Setting(name, manifold, tuple(shape), batch, dtype)
            for shape in shapes
            for dtype in kinds
            for batch in (((),) if law.fine else batch_shapes)
        )
        if _hold(name, law, settings, exemption(name, manifold)):
            applied.append(name)
    return applied


def check_retraction(manifold: Manifold, *shapes: tuple[int, ...], **where: Any) -> Slope:
    """The laws of ``retract`` and ``exp``, M4 and M5; arguments as in :func:`check_manifold`.

    Returns:
        :class:`Slope` of the distance between ``retract`` and ``exp``, or without ``exp`` the ambient line, on points
        of the first shape: its ``order`` for a test, its ``plot`` for a person.

    Raises:
        LawViolation: the first law that does not hold.
    """
    check_manifold(manifold, *shapes, laws=["M4", "M5"], **where)
    shape = tuple((shapes or manifold.event_shapes)[0])
    return _retract_order(_Setting("check_retraction", manifold, shape, (), torch.float64))


def check_gradient(
    manifold: Manifold,
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    gradient: Callable[[Tensor], Tensor] | None = None,
) -> Slope:
    """Require |f(R_x(tu)) − f(x) − t ⟨grad f, u⟩_x| = O(t²) at the points x, ``(*B, *S)`` in double precision.

    ``f`` maps points to numbers ``(*B,)``. The ambient gradient is torch's, or that of the function ``gradient`` under
    test, in torch's convention for complex tensors.

    Returns:
        :class:`Slope` of the remainder: its ``order`` for a test, its ``plot`` for a person.

    Raises:
        LawViolation: with the order that was measured.
    """
    setting = _at(manifold, x, "check_gradient", f)
    u = setting.step(x, 1.0)
    slope = _directional(manifold, f, x, u, gradient)
    value = f(x)

    def error(t: float) -> Tensor:
        return f(manifold.retract(x, t * u)) - value - t * slope

    return setting.order("|f(R(tu)) − f(x) − t⟨grad f, u⟩_x|", error, 2, _size(value, slope))


def check_hessian(manifold: Manifold, f: Callable[[Tensor], Tensor], x: Tensor) -> Slope:
    """Require a symmetric second derivative H of f∘R_x at 0, and |f(R_x(tu)) − f(x) − t Df[u] − t²/2 H[u,u]| = O(t³).

    Arguments as in :func:`check_gradient`. Where ``retract`` is of second order, H is the Riemannian Hessian.
    """
    setting = _at(manifold, x, "check_hessian", f)
    u, v = setting.step(x, 1.0), setting.step(x, 1.0)

    def second(a: Tensor, b: Tensor) -> Tensor:
        def first(w: Tensor) -> Tensor:
            return _along(lambda s: f(manifold.retract(x, s)), w, a)[1]

        return _along(first, torch.zeros_like(u), b)[1]

    setting.close("H[u,v] against H[v,u]", second(u, v), second(v, u), 16 * setting.condition(x))
    slope, curvature, value = _directional(manifold, f, x, u, None), second(u, u), f(x)

    def error(t: float) -> Tensor:
        return f(manifold.retract(x, t * u)) - value - t * slope - t * t / 2 * curvature

    return setting.order("|f(R(tu)) − f(x) − t Df[u] − t²/2 H[u,u]|", error, 3, _size(value, slope, curvature))


def _size(*numbers: Tensor) -> float:
    """The largest of all."""
    return max(float(t.detach().abs().max()) for t in numbers)


def _at(manifold: Manifold, x: Tensor, law: str, f: Callable[[Tensor], Tensor]) -> _Setting:
    if not isinstance(manifold, Manifold) or not isinstance(x, Tensor):
        raise TypeError(f"{law} takes a manifold and a tensor of its points, got {manifold!r} and {type(x).__name__}")
    if x.dtype not in (torch.float64, torch.complex128):
        raise ValueError(f"{law} measures orders of convergence and needs double precision, got {x.dtype}")
    manifold.check_shape(tuple(x.shape))
    split = x.ndim - manifold.event_dim
    if fault := fault_of(x.detach(), manifold):
        raise ValueError(f"{law}: x is not on the manifold: {fault}")
    if not x.numel() or (value := f(x)).shape != x.shape[:split] or not value.is_floating_point():
        got = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if x.numel() else "no points"
        raise ValueError(f"{law}: f maps points {tuple(x.shape)} to real numbers {tuple(x.shape[:split])}, got {got}")
    setting = _Setting(law, manifold, tuple(x.shape[split:]), tuple(x.shape[:split]), x.dtype)
    setting.generator.manual_seed(2017)  # x may have been drawn from the seed of a setting: no direction parallel to it
    return setting


def _directional(
    manifold: Manifold,
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    u: Tensor,
    gradient: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """⟨grad f, u⟩_x."""
    if gradient is None:
        leaf = x.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf).sum(), leaf)
    else:
        g = gradient(x)
    return manifold.inner(x, manifold.rgrad(x, g), u)


def _quadratic(setting: _Setting) -> Callable[[Tensor], Tensor]:
    """A smooth function of points that is not convex, with a dense gradient."""
    a, b, dims = setting.ambient(1), setting.ambient(1), len(setting.shape)
    return lambda y: _dot(a, y, dims) + _dot(b, y, dims).square()


# ---------------------------------------------------------------------- M1 random and residual
@_law(MANIFOLD_LAWS, "M1 random points lie on the manifold")
def _random_on_manifold(s: _Setting) -> None:
    """residual(random) = 0, a real number per point."""
    residual = s.manifold.residual(s.point())
    s.require(
        residual.shape == s.batch and residual.dtype == s.dtype.to_real(),
        f"residual is {tuple(residual.shape)} {residual.dtype}, expected {s.batch} {s.dtype.to_real()}",
    )
    s.small("residual(random)", residual, s.tolerance)


@_law(MANIFOLD_LAWS, "M1 random gives the shape, dtype and device asked for")
def _random_metadata(s: _Setting) -> None:
    """random(*B, *S) is (*B, *S), in torch's default dtype and on its default device unless said otherwise."""
    shape = (*s.batch, *s.shape)
    x = s.manifold.random(*shape, dtype=s.dtype, device="cpu")
    s.require(
        tuple(x.shape) == shape and x.dtype == s.dtype and x.device.type == "cpu",
        f"asked for {shape} {s.dtype} on cpu, got {tuple(x.shape)} {x.dtype} on {x.device}",
    )
    default = s.manifold.random(*shape)
    s.require(
        tuple(default.shape) == shape and default.dtype == torch.get_default_dtype(),
        f"asked for {shape} in the default dtype, got {tuple(default.shape)} {default.dtype}",
    )
    empty = s.manifold.random(0, *s.shape, dtype=s.dtype)
    s.require(tuple(empty.shape) == (0, *s.shape), f"an empty batch has shape {tuple(empty.shape)}")


@_law(MANIFOLD_LAWS, "M1 random obeys its generator")
def _random_generator(s: _Setting) -> None:
    """The same seed gives the same points, another seed others; torch's global generator serves when none is given."""

    shape = (20, *s.batch, *s.shape)  # of few points the same may come twice: O(1) has two

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return s.manifold.random(*shape, dtype=s.dtype, generator=generator)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = draw(5)
        s.require(torch.equal(before, torch.get_rng_state()), "a generator was given, but the global one was used")
        s.require(torch.equal(first, draw(5)), "the same seed gave other points")
        s.require(not torch.equal(first, draw(6)), "another seed gave the same points")
        generator = torch.Generator().manual_seed(5)
        twice = [s.manifold.random(*shape, dtype=s.dtype, generator=generator) for _ in range(2)]
        s.require(not torch.equal(*twice), "the generator does not advance")
        torch.manual_seed(1)
        unseeded = s.manifold.random(*shape, dtype=s.dtype)
        torch.manual_seed(1)
        s.require(
            torch.equal(unseeded, s.manifold.random(*shape, dtype=s.dtype)),
            "torch.manual_seed is not obeyed",
        )


@_law(MANIFOLD_LAWS, "M1 random points of a batch are independent")
def _random_independent(s: _Setting) -> None:
    """A batch of random points spans as many dimensions as points drawn one at a time."""
    count = 4 * math.prod(s.shape) + 4

    def spanned(x: Tensor) -> int:
        rows = x.to(_fine(s.dtype)).reshape(count, -1)
        values = torch.linalg.svdvals(torch.view_as_real(rows).flatten(1) if s.dtype.is_complex else rows)
        return int((values > 1e-4 * values[0]).sum())

    together = s.manifold.random(count, *s.shape, dtype=s.dtype, generator=s.generator)
    single = [s.manifold.random(*s.shape, dtype=s.dtype, generator=s.generator) for _ in range(count)]
    s.require(
        spanned(together) == spanned(torch.stack(single)),
        f"{count} points of one batch span {spanned(together)} dimensions, drawn singly {spanned(torch.stack(single))}",
    )


@_law(MANIFOLD_LAWS, "M1 residual grows off the manifold and only there", fine=True)
def _residual_grows(s: _Setting) -> None:
    """residual(x + tu) = O(t²) for tangent u, and residual(x + tn) ≥ c t for a unit normal n."""
    x, v = s.point(8), s.ambient(8)
    u = s.step(x, 1.0)
    s.order("residual(x + tu)", lambda t: s.manifold.residual(x + t * u), 2)
    n = v - s.manifold.project(x, v)
    lengths = s.lengths(n)
    if bool((lengths < 1e-8).any()):
        raise NotApplicable  # the manifold is open in the ambient space
    t = 1e-4
    growth = s.manifold.residual(x + t * n / lengths) / t
    s.require(
        float(growth.min()) >= RESIDUAL_GROWTH,
        f"residual(x + tn)/t: measured {float(growth.min()):.3g}, at least {RESIDUAL_GROWTH} required",
    )


# ---------------------------------------------------------------------- M2 project
@_law(MANIFOLD_LAWS, "M2 project is idempotent")
def _project_idempotent(s: _Setting) -> None:
    """P(P(v)) = P(v)."""
    x, v = s.point(), s.ambient()
    once = s.manifold.project(x, v)
    s.close("P(P(v)) against P(v)", s.manifold.project(x, once), once)


@_law(MANIFOLD_LAWS, "M2 project is self-adjoint")
def _project_selfadjoint(s: _Setting) -> None:
    """⟨P(v), w⟩ = ⟨v, P(w)⟩ for the ambient inner product: the projection is orthogonal."""
    x, v, w = s.point(), s.ambient(), s.ambient()
    dims, scale = len(s.shape), float(s.lengths(v).max() * s.lengths(w).max())
    left, right = _dot(s.manifold.project(x, v), w, dims), _dot(v, s.manifold.project(x, w), dims)
    s.small("⟨P(v), w⟩ − ⟨v, P(w)⟩", left - right, s.tolerance * scale)


@_law(MANIFOLD_LAWS, "M2 project is real-linear")
def _project_linear(s: _Setting) -> None:
    """P(av + bw) = aP(v) + bP(w) for real a, b."""
    x, v, w = s.point(), s.ambient(), s.ambient()
    P = s.manifold.project
    s.close("P(2v − 3w)", P(x, 2 * v - 3 * w), 2 * P(x, v) - 3 * P(x, w), 4)


@_law(MANIFOLD_LAWS, "M2 dim is the trace of the projection", fine=True)
def _dim(s: _Setting) -> None:
    """dim(*B, *S) = |B| · tr P_x, counting real dimensions."""
    x = s.point()
    basis = _basis(s.shape, s.dtype)
    trace = float(_dot(basis, s.manifold.project(x.expand_as(basis), basis), len(s.shape)).sum())
    for batch in ((), (2, 3)):
        dim = s.manifold.dim(*batch, *s.shape, dtype=s.dtype)
        s.require(isinstance(dim, int), f"dim is {dim!r}, expected an int")
        s.small(f"dim of batch {batch} against the trace", dim - math.prod(batch) * trace, 1e-6)


@_law(MANIFOLD_LAWS, "M2 constant_norm is told truthfully", fine=True)
def _constant_norm(s: _Setting) -> None:
    """constant_norm says whether every point has the same Euclidean length; if so, P_x(x) = 0."""
    x = s.point(16)
    lengths = s.lengths(x)
    spread = float((lengths.max() - lengths.min()) / lengths.max())
    if s.manifold.constant_norm:
        s.small("spread of ‖x‖ over random points, constant_norm is True", spread, s.tolerance)
        s.small("P_x(x), constant_norm is True", s.manifold.project(x, x), s.tolerance)
    else:
        s.require(spread > 1e-6, "constant_norm is False, but all random points have the same length")


# ---------------------------------------------------------------------- M3 metric
@_law(MANIFOLD_LAWS, "M3 rgrad represents the differential")
def _rgrad(s: _Setting) -> None:
    """⟨rgrad(g), u⟩_x = ⟨g, u⟩ for every tangent u."""
    x, g = s.point(), s.ambient()
    u = s.tangent(x)
    left = s.manifold.inner(x, s.manifold.rgrad(x, g), u)
    scale = float(s.lengths(g).max()) * s.condition(x)
    s.small("⟨rgrad(g), u⟩_x − ⟨g, u⟩", left - _dot(g, u, len(s.shape)), s.tolerance * scale)


@_law(MANIFOLD_LAWS, "M3 rgrad is tangent")
def _rgrad_tangent(s: _Setting) -> None:
    """P_x(rgrad(g)) = rgrad(g)."""
    x, g = s.point(), s.ambient()
    r = s.manifold.rgrad(x, g)
    s.close("P(rgrad(g)) against rgrad(g)", s.manifold.project(x, r), r)


@_law(MANIFOLD_LAWS, "M3 inner is a real inner product")
def _inner(s: _Setting) -> None:
    """⟨u, v⟩_x is real, symmetric, bilinear and positive, one number per point; norm is its root."""
    x = s.point()
    u, v, w = s.tangent(x), s.tangent(x), s.tangent(x)
    inner = s.manifold.inner
    uv = inner(x, u, v)
    s.require(
        uv.shape == s.batch and uv.dtype == s.dtype.to_real(),
        f"inner is {tuple(uv.shape)} {uv.dtype}, expected {s.batch} {s.dtype.to_real()}",
    )
    scale = s.condition(x)
    s.close("⟨u, v⟩_x against ⟨v, u⟩_x", uv, inner(x, v, u), scale)
    s.close("⟨2u − 3w, v⟩_x", inner(x, 2 * u - 3 * w, v), 2 * uv - 3 * inner(x, w, v), 4 * scale)
    square = inner(x, u, u)
    s.require(
        bool(((square > 0) == u.reshape(*s.batch, -1).any(-1)).all()),
        f"⟨u, u⟩_x = {float(square.min()):.3g} is not positive",
    )
    s.close("‖u‖_x against its definition", s.manifold.norm(x, u), square.sqrt(), scale)
    zero = torch.zeros_like(x).requires_grad_()
    s.manifold.norm(x, zero).sum().backward()
    s.require(zero.grad is not None and not bool(zero.grad.any()), "the derivative of ‖u‖_x at 0 is not 0")


# ---------------------------------------------------------------------- M4 retract
@_law(MANIFOLD_LAWS, "M4 a zero step keeps the bits")
def _zero_step(s: _Setting) -> None:
    """R_x(0) = x bit for bit, also for one point of a batch whose other points move."""
    x = s.point()
    s.require(torch.equal(s.manifold.retract(x, torch.zeros_like(x)), x), "R_x(0) is not x bit for bit")
    x = s.point(3)
    u = s.step(x, 0.5)
    u[1] = 0
    y = s.manifold.retract(x, u)
    s.require(torch.equal(y[1], x[1]), "R_x(0) is not x bit for bit for one point of a batch")
    s.require(not bool(u.any()) or not torch.equal(y[0], x[0]), "R_x(u) is x, for u of length 0.5")
    y = s.manifold.move(x, u, u)[0]
    s.require(torch.equal(y[1], x[1]), "move by 0 is not x bit for bit for one point of a batch")


@_law(MANIFOLD_LAWS, "M4 the derivative of retract at zero is the identity")
def _retract_derivative(s: _Setting) -> None:
    """DR_x(0)[u] = u."""
    x = s.point()
    u = s.tangent(x)
    _, derivative = _along(lambda w: s.manifold.retract(x, w), torch.zeros_like(u), u)
    s.close("DR(0)[u] against u", derivative, u, s.condition(x))


@_law(MANIFOLD_LAWS, "M4 retract stays on the manifold")
def _retract_on_manifold(s: _Setting) -> None:
    """residual(R_x(u)) = 0 for short, unit and long u, up to step_limit."""
    x = s.point()
    for length in (1e-3, 1.0, 100.0 if s.manifold.constant_norm else 4.0):
        y = s.manifold.retract(x, s.step(x, length))
        s.require(y.shape == x.shape and y.dtype == x.dtype, f"R_x(u) is {tuple(y.shape)} {y.dtype}")
        s.small(f"residual(R_x(u)) for ‖u‖ = {length}", s.manifold.residual(y), s.tolerance)


# ---------------------------------------------------------------------- M5 retract against exp, and exp itself
@_law(MANIFOLD_LAWS, "M5 retract follows the geodesic to its order", fine=True)
def _retract_order(s: _Setting) -> Slope:
    """‖R_x(tu) − exp_x(tu)‖ = O(t²), O(t³) if ``second_order``; without exp: R_x(tu) = x + tu + O(t²), and for the
    ambient metric P_x(R_x(tu) − x − tu) = O(t³) if ``second_order``."""
    x = s.point(6)
    u = s.step(x, 1.0)
    M, least = s.manifold, 3 if s.manifold.second_order else 2
    if s.has("exp", x, u):
        return s.order("‖R(tu) − exp(tu)‖", lambda t: M.retract(x, t * u) - M.exp(x, t * u), least)
    slope = s.order("‖R(tu) − x − tu‖", lambda t: M.retract(x, t * u) - x - t * u, 2)
    if least == 3 and _metric_is_ambient(s, x):
        return s.order("‖P(R(tu) − x − tu)‖", lambda t: M.project(x, M.retract(x, t * u) - x - t * u), 3)
    return slope


def _metric_is_ambient(s: _Setting, x: Tensor) -> bool:
    u, v = s.tangent(x), s.tangent(x)
    return bool((s.manifold.inner(x, u, v) - _dot(u, v, len(s.shape))).abs().max() <= s.tolerance)


def _geodesic(s: _Setting, x: Tensor, u: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """γ(t) = exp_x(tu) and its velocity."""
    time = torch.tensor(t, dtype=torch.float64)
    return _along(lambda t: s.manifold.exp(x, t * u), time, torch.ones_like(time))


@_law(MANIFOLD_LAWS, "M5 exp runs at constant speed and continues itself", fine=True)
def _exp_flow(s: _Setting) -> None:
    """γ(t) = exp_x(tu) has γ(0) = x, γ'(0) = u, lies on the manifold, ‖γ'‖ = ‖u‖, exp(γ(r), tγ'(r)) = γ(r + t)."""
    x = s.point(4)
    u = s.step(x, 0.7)
    s.need("exp", x, u)
    scale = 16 * s.condition(x)
    start, velocity = _geodesic(s, x, u, 0.0)
    s.close("exp(0) against x", start, x)
    s.close("γ'(0) against u", velocity, u, scale)
    y, velocity = _geodesic(s, x, u, 0.6)
    s.small("residual(exp)", s.manifold.residual(y), s.tolerance)
    s.close("‖γ'(t)‖ against ‖u‖", s.manifold.norm(y, velocity), s.manifold.norm(x, u), scale)
    s.close("exp(γ(.6), .4 γ'(.6)) against γ(1)", s.manifold.exp(y, 0.4 * velocity), s.manifold.exp(x, u), scale)


@_law(MANIFOLD_LAWS, "M5 exp has no tangential acceleration", fine=True)
def _exp_acceleration(s: _Setting) -> None:
    """P(γ'') = 0 for the ambient metric, whose geodesics are the curves with normal acceleration."""
    x = s.point(4)
    u = s.step(x, 0.7)
    s.need("exp", x, u)
    if not _metric_is_ambient(s, x):
        raise NotApplicable
    time = torch.tensor(0.3, dtype=torch.float64)
    one = torch.ones_like(time)

    def velocity(t: Tensor) -> Tensor:
        return _along(lambda t: s.manifold.exp(x, t * u), t, one)[1]

    _, acceleration = _along(velocity, time, one)
    y = s.manifold.exp(x, time * u)
    s.small("P(γ'')", s.manifold.project(y, acceleration), 16 * s.tolerance)


@_law(MANIFOLD_LAWS, "M5 exp makes the energy stationary", fine=True)
def _exp_energy(s: _Setting) -> None:
    """d/dε ½∫‖∂γ_ε/∂t‖² dt = 0 for γ_ε(t) = R_{γ(t)}(ε t(1−t) w(t)): true of geodesics only, in any metric."""
    x = s.point(1)
    u = s.step(x, 0.7)
    s.need("exp", x, u)
    nodes, weights = _gauss_legendre(12)
    event = (1,) * len(s.shape)
    w = s.ambient(1)

    def energy(eps: float) -> Tensor:
        def curve(t: Tensor) -> Tensor:
            y = s.manifold.exp(x.expand(len(t), *s.shape), t.reshape(-1, *event) * u)
            bump = (t * (1 - t)).reshape(-1, *event)
            return s.manifold.retract(y, eps * bump * s.manifold.project(y, w.expand_as(y)))

        y, velocity = _along(curve, nodes, torch.ones_like(nodes))
        return (weights * s.manifold.inner(y, velocity, velocity)).sum() / 2

    h = 1e-4
    s.small("derivative of the energy", (energy(h) - energy(-h)) / (2 * h), DIFFERENCE * s.condition(x))


def _gauss_legendre(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1] (Golub and Welsch, 1969)."""
    k = torch.arange(1, n, dtype=torch.float64)
    beta = k / (4 * k * k - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beta, 1) + torch.diag(beta, -1))
    return (values + 1) / 2, vectors[0].square()


# ---------------------------------------------------------------------- M6 move
@_law(MANIFOLD_LAWS, "M6 move goes where retract goes")
def _move_point(s: _Setting) -> None:
    """move(x, u, *vs)[0] = R_x(u)."""
    x = s.point()
    u, v = s.step(x, 0.5), s.tangent(x)
    y = s.manifold.retract(x, u)
    for vs in ((), (v,), (v, u)):
        moved = s.manifold.move(x, u, *vs)
        s.require(len(moved) == 1 + len(vs), f"move of {len(vs)} vectors returned {len(moved)} tensors")
        s.close("move(x, u, *vs)[0] against R_x(u)", moved[0], y, s.condition(x))


@_law(MANIFOLD_LAWS, "M6 carried vectors are tangent")
def _move_tangent(s: _Setting) -> None:
    """P_y(v') = v' for (y, v') = move(x, u, v)."""
    x = s.point()
    for length in (0.5, 2.0):
        u, v = s.step(x, length), s.tangent(x)
        y, carried = s.manifold.move(x, u, v)
        s.close("P_y(v') against v'", s.manifold.project(y, carried), carried)


@_law(MANIFOLD_LAWS, "M6 move carries linearly, and by zero not at all")
def _move_linear(s: _Setting) -> None:
    """2v − 3w arrives as 2v' − 3w', alone or in company; move(x, 0, v) = (x, v); transport(x, u, v) = v'."""
    x = s.point()
    u, v, w = s.step(x, 0.5), s.tangent(x), s.tangent(x)
    move, scale = s.manifold.move, s.condition(x)
    _, v1, w1 = move(x, u, v, w)
    s.close("2v − 3w carried", move(x, u, 2 * v - 3 * w)[1], 2 * v1 - 3 * w1, 4 * scale)
    s.close("v alone against v in company", move(x, u, v)[1], v1, scale)
    s.close("transport against move", s.manifold.transport(x, u, v), v1, scale)
    s.close("v carried by a zero step", move(x, torch.zeros_like(u), v)[1], v, scale)


@_law(MANIFOLD_LAWS, "M6 isometric is told truthfully")
def _move_isometric(s: _Setting) -> None:
    """⟨v', w'⟩_y = ⟨v, w⟩_x if ``isometric``."""
    if not s.manifold.isometric:
        raise NotApplicable
    x = s.point()
    for length in (0.5, 1.5):
        u, v, w = s.step(x, length), s.tangent(x), s.tangent(x)
        y, v1, w1 = s.manifold.move(x, u, v, w)
        inner, scale = s.manifold.inner, s.condition(x, y)
        s.close("⟨v', w'⟩_y against ⟨v, w⟩_x", inner(y, v1, w1), inner(x, v, w), scale)
        s.close("⟨v', v'⟩_y against ⟨v, v⟩_x", inner(y, v1, v1), inner(x, v, v), scale)


# ---------------------------------------------------------------------- M7 batches
def _same(s: _Setting, what: str, actual: Any, expected: Any, scale: float) -> None:
    for a, b in zip(_tuple(actual), _tuple(expected), strict=True):
        s.close(what, a, b, scale)


@_law(MANIFOLD_LAWS, "M7 a batch is its points")
def _batch_is_loop(s: _Setting) -> None:
    """Slice i of f(batch) is f(slice i), for every function f."""
    if not s.batch:
        raise NotApplicable
    for name, args in s.calls().items():
        method, scale = getattr(s.manifold, name), s.condition(args[0]) if name != "nearest" else 1.0
        together = _tuple(method(*args))
        for i in torch.cartesian_prod(*(torch.arange(n) for n in s.batch)).reshape(-1, len(s.batch)).tolist():
            at = tuple(i)
            _same(s, f"{name}, slice {at}", tuple(t[at] for t in together), method(*(a[at] for a in args)), scale)


@_law(MANIFOLD_LAWS, "M7 vmap is a batch", fine=True)
def _vmap(s: _Setting) -> None:
    """torch.func.vmap(f) over points is f of the batch; over the second argument alone it broadcasts."""
    for name, args in s.calls(3).items():
        method, scale = getattr(s.manifold, name), s.condition(args[0]) if name != "nearest" else 1.0
        _same(s, f"vmap({name})", vmap(method)(*args), method(*args), scale)
        if len(args) > 1 and name not in ("log", "dist"):
            x = args[0][:1].expand_as(args[0])
            rest = tuple(s.manifold.project(x, a) / 2 for a in args[1:])
            mapped = vmap(method, in_dims=(None, *(0 for _ in rest)))(args[0][0], *rest)
            _same(s, f"vmap({name}) at one point", mapped, method(x, *rest), scale)


@_law(MANIFOLD_LAWS, "M7 arguments broadcast")
def _broadcast(s: _Setting) -> None:
    """x (*B, *S) with u (7, *B, *S) is x expanded; so is one tangent vector alone at (*B, *S)."""
    x = s.point()
    wide = x.expand(7, *x.shape)
    u, v, g = s.step(wide, 0.5), s.tangent(wide), s.ambient(7, *s.batch)
    M, scale = s.manifold, s.condition(x)
    for name, args in {
        "project": (g,),
        "rgrad": (g,),
        "retract": (u,),
        "inner": (u, v),
        "move": (u, v),
        "exp": (u,),
    }.items():
        if s.has(name, wide, *args):
            method = getattr(M, name)
            _same(s, f"{name}, x broadcast", method(x, *args), method(wide, *args), scale)
    one = s.point(1)[0]
    few, w = s.step(one, 0.5), s.tangent(one.expand(7, *s.shape))
    many = M.move(one, few, w)
    for i in range(7):
        _same(s, "move with u broadcast", (many[0].expand(7, *s.shape)[i], many[1][i]), M.move(one, few, w[i]), scale)


@_law(MANIFOLD_LAWS, "M7 an empty batch is empty", fine=True)
def _empty(s: _Setting) -> None:
    """Every function maps shape (0, *S) to shape (0, *S), or (0,) and a real dtype if it gives numbers."""
    for name, args in s.calls(1).items():
        number = name in ("residual", "inner", "norm", "dist")
        shape, dtype = ((0,), s.dtype.to_real()) if number else ((0, *s.shape), s.dtype)
        for a in _tuple(getattr(s.manifold, name)(*(a[:0] for a in args))):
            got, expected = f"{tuple(a.shape)} {a.dtype}", f"{shape} {dtype}"
            s.require(got == expected, f"{name} of an empty batch is {got}, not {expected}")


@_law(MANIFOLD_LAWS, "M7 memory layout does not matter", fine=True)
def _strides(s: _Setting) -> None:
    """Strided, transposed and lazily conjugated inputs give what contiguous ones give, and none is written to."""
    for name, args in s.calls(2).items():
        method, before = getattr(s.manifold, name), [a.clone() for a in args]
        expected = method(*args)
        scale = s.condition(args[0]) if name != "nearest" else 1.0
        layouts = {"strided": tuple(torch.stack((a, a), -1)[..., 0] for a in args)}
        if len(s.shape) >= 2:
            layouts["transposed"] = tuple(a.mT.contiguous().mT for a in args)
        if s.dtype.is_complex:
            layouts["lazily conjugated"] = tuple(a.conj().resolve_conj().conj() for a in args)
        for layout, views in layouts.items():
            _same(s, f"{name}, {layout}", method(*views), expected, scale)
        s.require(all(map(torch.equal, before, args)), f"{name} writes to its arguments")


# ---------------------------------------------------------------------- M8 complex
@_law(MANIFOLD_LAWS, "M8 real points are complex points")
def _real_in_complex(s: _Setting) -> None:
    """With imaginary parts zero every function gives what it gives for real tensors, and imaginary parts zero."""
    if not s.dtype.is_complex:
        raise NotApplicable
    real = _Setting(s.law, s.manifold, s.shape, s.batch, s.dtype.to_real())
    for name, args in real.calls().items():
        method, scale = getattr(s.manifold, name), real.condition(args[0]) if name != "nearest" else 1.0
        for a, b in zip(_tuple(method(*(t.to(s.dtype) for t in args))), _tuple(method(*args)), strict=True):
            if a.is_complex():
                s.small(f"imaginary part of {name} of real tensors", a.imag, s.tolerance * scale * _largest(b))
            s.close(f"{name} of real tensors as complex ones", a.real, b, scale)


def _largest(t: Tensor) -> float:
    return max(1.0, float(t.abs().max()))


@_law(MANIFOLD_LAWS, "M8 complex points have dense imaginary parts")
def _dense_imaginary(s: _Setting) -> None:
    """random in a complex dtype uses the dimensions that a real one does not have; all other laws see such points."""
    if not s.dtype.is_complex:
        raise NotApplicable
    M = s.manifold
    if M.dim(*s.shape, dtype=s.dtype) == M.dim(*s.shape, dtype=s.dtype.to_real()):
        raise NotApplicable
    imaginary = s.point(16).imag.abs().amax()
    s.require(float(imaginary) > 1e-2, f"imaginary parts of 16 random points are at most {float(imaginary):.3g}")


# ---------------------------------------------------------------------- M9 values
@_law(MANIFOLD_LAWS, "M9 equality is by value", fine=True)
def _equality(s: _Setting) -> None:
    """A manifold rebuilt from its fields is equal and hashes alike; another option or class is not equal."""
    M = s.manifold
    s.require(dataclasses.is_dataclass(M), f"{type(M).__name__} is not a dataclass")
    twin = dataclasses.replace(M)  # type: ignore[type-var]
    s.require(twin is not M and twin == M, "a manifold rebuilt from its fields is not equal")
    s.require(hash(twin) == hash(M), "equal manifolds hash differently")
    s.require(len({M, twin, object()}) == 2, "equality or hash is not by value")


@_law(MANIFOLD_LAWS, "M9 a manifold is immutable", fine=True)
def _immutable(s: _Setting) -> None:
    """Assigning any attribute raises."""
    M = s.manifold
    for name in (*(f.name for f in dataclasses.fields(M)), "new_attribute"):  # type: ignore[arg-type]
        try:
            setattr(M, name, getattr(M, name, None))
        except AttributeError:
            continue
        raise s.violation(f"{name} can be assigned: declare the class @dataclass(frozen=True)")


@_law(MANIFOLD_LAWS, "M9 repr is the code that builds it", fine=True)
def _repr(s: _Setting) -> None:
    """eval(repr(M)) == M, and the repr names the fields that are not at their defaults, and only those."""
    M = s.manifold
    s.require(eval(repr(M), _names(M)) == M, f"repr {M!r} does not evaluate to the manifold")
    for f in dataclasses.fields(M):  # type: ignore[arg-type]
        shown, default = f"{f.name}=" in repr(M), getattr(M, f.name) == f.default
        s.require(shown is not default, f"repr {M!r} {'names' if shown else 'omits'} the field {f.name}")


def _names(M: Any) -> dict[str, Any]:
    """The classes that a manifold's repr may name."""
    names: dict[str, Any] = {type(M).__name__: type(M)}
    for f in dataclasses.fields(M):
        value = getattr(M, f.name)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Manifold):
                names |= _names(item)
    return names


@_law(MANIFOLD_LAWS, "M9 pickle and deepcopy give an equal manifold", fine=True)
def _pickle(s: _Setting) -> None:
    """loads(dumps(M)) == deepcopy(M) == M."""
    M = s.manifold
    s.require(pickle.loads(pickle.dumps(M)) == M, "a pickled manifold is not equal")
    s.require(copy.deepcopy(M) == M, "a deep-copied manifold is not equal")


# ---------------------------------------------------------------------- M10 second derivatives
@_law(MANIFOLD_LAWS, "M10 Taylor series along retract", fine=True)
def _taylor(s: _Setting) -> None:
    """First and second derivatives of f∘R_x: the remainders are O(t²) and O(t³), the second one symmetric."""
    x, f = s.point(2), _quadratic(s)
    check = {"gradient": check_gradient, "Hessian": check_hessian}
    for name, function in check.items():
        try:
            function(s.manifold, f, x)
        except LawViolation as violation:
            raise s.violation(f"{name}: {violation}") from None


@_law(MANIFOLD_LAWS, "M10 weingarten is the second derivative of retract", fine=True)
def _weingarten(s: _Setting) -> None:
    """⟨weingarten(x, u, g), v⟩ = D²⟨g, R_x(·)⟩(0)[u, v] for tangent u and v and any g."""
    x, M, dims = s.point(2), s.manifold, len(s.shape)
    u, v, g = s.step(x, 1.0), s.step(x, 1.0), s.ambient(2)

    def first(w: Tensor) -> Tensor:
        return _along(lambda a: _dot(g, M.retract(x, a), dims), w, u)[1]

    expected = _along(first, torch.zeros_like(v), v)[1]
    s.close(
        "⟨weingarten(x, u, g), v⟩ against D²⟨g, R⟩", _dot(M.weingarten(x, u, g), v, dims), expected, 16 * s.condition(x)
    )


# ---------------------------------------------------------------------- M11 exp, log, dist, nearest
@_law(MANIFOLD_LAWS, "M11 log inverts exp")
def _log_exp(s: _Setting) -> None:
    """log(x, exp(x, u)) = u, tangent, for u shorter than the injectivity radius; log(x, x) = 0."""
    x = s.point()
    for length in (1e-2, 0.7):
        u = s.step(x, length)
        s.need("exp", x, u)
        y = s.manifold.exp(x, u)
        s.need("log", x, y)
        v, scale = s.manifold.log(x, y), 4 * s.condition(x, y)
        s.close("log(exp(u)) against u", v, u, scale)
        s.close("P(log) against log", s.manifold.project(x, v), v)
    s.small("log(x, x)", s.manifold.log(x, x), s.tolerance * s.condition(x))


@_law(MANIFOLD_LAWS, "M11 dist is the length of the geodesic")
def _dist(s: _Setting) -> None:
    """dist(x, exp(x, u)) = ‖u‖_x = ‖log‖_x; dist is symmetric, zero from x to x, and obeys the triangle inequality."""
    x = s.point()
    u = s.step(x, 0.7)
    y = s.manifold.retract(x, u)
    s.need("dist", x, y)
    dist, M = s.manifold.dist, s.manifold
    scale = 4 * s.condition(x, y)
    d = dist(x, y)
    s.require(
        d.shape == s.batch and d.dtype == s.dtype.to_real(),
        f"dist is {tuple(d.shape)} {d.dtype}, expected {s.batch} {s.dtype.to_real()}",
    )
    s.close("dist(x, y) against dist(y, x)", d, dist(y, x), scale)
    s.small("dist(x, x)", dist(x, x), s.tolerance * scale)
    z = M.retract(y, s.step(y, 0.7))
    excess = dist(x, z) - d - dist(y, z)
    s.require(bool((excess <= s.tolerance * scale).all()), f"dist exceeds a detour by {float(excess.max()):.3g}")
    if s.has("log", x, y):
        s.close("dist against ‖log‖_x", d, M.norm(x, M.log(x, y)), scale)
    if s.has("exp", x, u):
        s.close("dist(x, exp(x, u)) against ‖u‖_x", dist(x, M.exp(x, u)), M.norm(x, u), scale)
        near = s.step(x, 1e-3)
        s.close("dist(x, exp(x, u)) against ‖u‖_x, ‖u‖ = 1e-3", dist(x, M.exp(x, near)), M.norm(x, near), scale)


@_law(MANIFOLD_LAWS, "M11 log and dist are differentiable where points coincide", fine=True)
def _log_derivative(s: _Setting) -> None:
    """At y = x: D_y log[u] = u, P D_x log[u] = −u, and a finite subgradient of dist."""
    x = s.point(2)
    s.need("log", x, x)
    u, M, scale = s.tangent(x), s.manifold, 4 * s.condition(x)
    zero = torch.zeros_like(u)
    _, of_end = _along(lambda w: M.log(x, M.retract(x, w)), zero, u)
    s.close("D_y log(x, y)[u] against u", of_end, u, scale)
    _, of_start = _along(lambda w: M.log(M.retract(x, w), x), zero, u)
    s.close("P D_x log(x, y)[u] against −u", M.project(x, of_start), -u, scale)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(M.log(leaf, x).abs().square().sum() + M.dist(leaf, x).sum(), leaf)
    s.require(bool(gradient.abs().isfinite().all()), "the gradient of dist(x, y) or log(x, y) at y = x is not finite")


@_law(MANIFOLD_LAWS, "M11 the gradient of half the squared distance is −log", fine=True)
def _dist_gradient(s: _Setting) -> None:
    """grad ½dist²(·, y) at x is −log(x, y): derivatives of dist, for points apart and points close together."""
    x = s.point(3)
    u = torch.stack([s.step(x[i], length) for i, length in enumerate((1e-2, 0.5, 1.0))])
    y = s.manifold.retract(x, u)
    s.need("log", x, y)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(s.manifold.dist(leaf, y).square().sum() / 2, leaf)
    log = s.manifold.log(x, y)
    s.close("grad of ½dist² against −log", s.manifold.rgrad(x, g), -log, DIFFERENCE / s.tolerance)


@_law(MANIFOLD_LAWS, "M11 nearest is the nearest point")
def _nearest(s: _Setting) -> None:
    """nearest(x) = x for points; residual(nearest(z)) = 0; ‖z − nearest(z)‖ ≤ ‖z − y‖ for every point y."""
    x, z = s.point(), s.ambient()
    s.need("nearest", z)
    M = s.manifold
    s.close("nearest(x) against x", M.nearest(x), x)
    n = M.nearest(z)
    s.small("residual(nearest(z))", M.residual(n), s.tolerance)
    here, slack = s.lengths(z - n), s.tolerance * _largest(z)
    around = n.expand(16, *n.shape)
    others = [M.retract(around, s.step(around, length)) for length in (1e-1, 1e-2)]
    others.append(s.point(64, *s.batch))
    for y in others:
        nearer = here - s.lengths(z - y)
        s.require(bool((nearer <= slack).all()), f"another point is nearer by {float(nearer.max()):.3g}")


# ---------------------------------------------------------------------- M12 derivatives
def _where_eigenvalues_repeat(s: _Setting) -> Tensor:
    """The identity matrix or the first unit vector, if it is a point of the manifold; else a random point."""
    eye = torch.eye(math.prod(s.shape[:-1]), s.shape[-1] if s.shape else 1, dtype=s.dtype).reshape(s.shape)
    return eye if float(s.manifold.residual(eye)) <= s.tolerance else s.point()


def _gradcheck(s: _Setting, f: Callable[..., Tensor], *arguments: Tensor) -> None:
    """torch's ``gradcheck``, both modes, along random directions of the real and imaginary parts."""

    def parts(*reals: Tensor) -> Tensor:
        y = f(*map(torch.view_as_complex, reals)) if s.dtype.is_complex else f(*reals)
        return torch.view_as_real(y) if s.dtype.is_complex else y

    reals = (torch.view_as_real(a) if s.dtype.is_complex else a for a in arguments)
    leaves = tuple(a.detach().clone().requires_grad_() for a in reals)
    try:
        gradcheck(parts, leaves, check_forward_ad=True, check_undefined_grad=False, fast_mode=True)
    except GradcheckError as error:
        raise s.violation(f"gradcheck: {str(error).strip().splitlines()[0]}") from None


@_law(MANIFOLD_LAWS, "M12 derivatives of retract and move", fine=True)
def _gradients(s: _Setting) -> None:
    """Backward and forward derivatives of (R_x(u), v') by x, u and v agree with finite differences, also for u = 0 at
    the identity."""
    M, somewhere, eye = s.manifold, s.point(), _where_eigenvalues_repeat(s)
    for x, u in ((somewhere, s.step(somewhere, 0.5)), (eye, torch.zeros_like(eye))):

        def f(z: Tensor, w: Tensor, v: Tensor, x: Tensor = x) -> Tensor:
            y = M.retract(x, M.project(x, z))  # x itself may only vary on the manifold
            w, v = M.project(y, w), M.project(y, v)
            return torch.stack([M.retract(y, w), M.move(y, w, v)[1]])

        _gradcheck(s, f, torch.zeros_like(x), u, s.tangent(x))


# ---------------------------------------------------------------------- M13 half precision
@_law(MANIFOLD_LAWS, "M13 half precision is single precision rounded once")
def _half(s: _Setting) -> None:
    """f of bfloat16 tensors is f of the same numbers in float32, rounded; autocast changes nothing; nothing is NaN."""
    if s.dtype != torch.float32:
        raise NotApplicable
    half = torch.bfloat16
    for name, args in s.calls().items():
        method, rounded = getattr(s.manifold, name), tuple(a.to(half) for a in args)
        for a, b in zip(_tuple(method(*rounded)), _tuple(method(*(r.float() for r in rounded))), strict=True):
            s.require(a.dtype == half and torch.equal(a, b.to(half)), f"{name} of {half} is not that of float32")
            s.require(not bool(a.isnan().any()), f"{name} of {half} is NaN")
        expected = method(*args)
        with torch.autocast("cpu", dtype=half):
            inside = method(*args)
        s.require(all(map(torch.equal, _tuple(inside), _tuple(expected))), f"autocast changes {name}")
    x = s.manifold.random(*s.batch, *s.shape, dtype=half, generator=s.generator)
    s.require(x.dtype == half, f"random asked for {half} is {x.dtype}")
    s.small(f"residual(random) in {half}", s.manifold.residual(x), s.tolerance * 2**16)


# ====================================================================== optimizers
class _Training(_Setting):
    """An optimizer under test and a stochastic problem: at step t, minimize ½ Σ ‖p_i − a_i(t)‖², a_i(t) points.

    The parameters are two of shape S and one of shape (3, *S), in one group. Gradients are written to ``p.grad``.
    """

    def __init__(
        self, law: str, manifold: Manifold, shape: tuple[int, ...], dtype: torch.dtype, factory: Factory, **twins: Any
    ) -> None:
        super().__init__(law, manifold, shape, (), dtype)
        self.factory = factory
        self.twin: Factory | None = twins.get("twin")
        self.wrapped: Factory | None = twins.get("wrapped")
        shapes = ((), (), (3,))
        self.start = [self.at(*batch) for batch in shapes]
        self.targets = [[self.at(*batch) for batch in shapes] for _ in range(7)]

    def at(self, *batch: int) -> Tensor:
        return self.manifold.random(*batch, *self.shape, dtype=self.dtype, generator=self.generator)

    def parameters(self) -> Parameters:
        return [nn.Parameter(x.clone()) for x in self.start]

    def points(self, tensors: Iterable[Tensor]) -> Tensor:
        """All points, or vectors at them, of all parameters as one batch."""
        return torch.cat([t.reshape(-1, *self.shape) for t in tensors])

    def group(self, params: Parameters, **options: Any) -> dict[str, Any]:
        return {"params": list(params), "manifold": self.manifold, **options}

    def optimizer(self, params: Parameters, **options: Any) -> Any:
        return self.factory([self.group(params, **options)])

    def begin(self, **options: Any) -> tuple[Parameters, Any]:
        params = self.parameters()
        return params, self.optimizer(params, **options)

    def gradients(self, params: Parameters, t: int, optimizer: Any = None) -> None:
        """Write the gradients of step t; of −f for an optimizer that maximizes, so that it goes to the targets too."""
        sign = -1 if optimizer is not None and optimizer.param_groups[0].get("maximize") else 1
        for p, a in zip(params, self.targets[t % len(self.targets)], strict=True):
            p.grad = sign * (p.detach() - a)

    def train(self, params: Parameters, optimizer: Any, steps: int, first: int = 0) -> Parameters:
        for t in range(first, first + steps):
            self.gradients(params, t, optimizer)
            optimizer.step()
        return params

    def same(self, what: str, params: Iterable[Tensor], others: Iterable[Tensor], scale: float = 0.0) -> None:
        """Equal bits, or with a ``scale`` equal to that many tolerances."""
        for p, q in zip(params, others, strict=True):
            if scale:
                self.close(what, p.detach(), q.detach(), scale)
            else:
                self.require(
                    torch.equal(p, q), f"{what}: differs by {float((p - q).detach().abs().max()):.3g}, no bit may"
                )


#: Rounding errors of a step are passed on by the steps after it: what some dozens of steps may add to the tolerance of
#: one, as a factor.
GROWTH = 64


def check_optimizer(
    factory: Factory,
    manifold: Manifold,
    shape: tuple[int, ...] | None = None,
    *,
    dtypes: Iterable[torch.dtype] = (torch.float64, torch.complex64),
    laws: Iterable[str] | None = None,
    twin: Factory | None = None,
    wrapped: Factory | None = None,
) -> list[str]:
    """Check the laws O1 to O11 on what ``factory`` builds; the names of those that applied are returned.

    Args:
        factory: ``factory(groups) -> optimizer``; groups are ``{"params": [...], "manifold": manifold}``. Its learning
            rate should suit a cost of curvature 1, and be at most about 0.1 times the size of a point.
        manifold, shape: where to optimize; the first of ``manifold.event_shapes`` by default.
        dtypes: where to check.
        laws: names or numbers of laws; all by default. ``testing.OPTIMIZER_LAWS`` lists them.
        twin: the torch optimizer, as a factory, that this one equals on ``Euclidean()``, for law O4.
        wrapped: another optimizer that this one equals on ``manifold``, for law O5.

    Exemptions are read from ``factory.exempt`` and from the optimizer's class.

    Raises:
        LawViolation: the first law that does not hold.
    """
    event = tuple(manifold.event_shapes[0] if shape is None else shape)
    dtypes = some(dtypes=dtypes)
    example = nn.Parameter(manifold.random(*event, dtype=dtypes[0], generator=torch.Generator().manual_seed(0)))
    kind = type(factory([{"params": [example], "manifold": manifold}]))
    applied = []
    for name, law in select_laws(OPTIMIZER_LAWS, laws).items():
        settings = (_Training(name, manifold, event, dtype, factory, twin=twin, wrapped=wrapped) for dtype in dtypes)
        if _hold(name, law, settings, exemption(name, factory, kind)):
            applied.append(name)
    return applied


def _stay(s: _Training, steps: int, every: int) -> None:
    params, optimizer = s.begin()
    for t in range(every, steps + 1, every):
        s.train(params, optimizer, every, t - every)
        x = s.points(p.detach() for p in params)
        s.small(f"residual after {t} steps", s.manifold.residual(x), s.tolerance)
        for name in getattr(optimizer, "tangent_state", ()):
            if name in optimizer.state[params[0]]:
                value = s.points(optimizer.state[p][name] for p in params)
                s.close(f"{name} projected after {t} steps", s.manifold.project(x, value), value, 4)


@_law(OPTIMIZER_LAWS, "O1 points stay on the manifold and momentum stays tangent")
def _feasible(s: _Training) -> None:
    """residual(p) = 0 and P_p(state) = state after each of 200 steps, for every entry of ``tangent_state``."""
    _stay(s, 200, 1)


def _descend(s: _Training, x: Tensor, gradient: Callable[[Tensor], Tensor], steps: int = 400) -> Tensor:
    """x after steps with a learning rate that decays to 1e-3 of itself."""
    p = nn.Parameter(x.clone())
    optimizer = s.optimizer([p])
    rates = [group["lr"] for group in optimizer.param_groups]
    sign = -1 if optimizer.param_groups[0].get("maximize") else 1
    for t in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 1e-3 ** max(0.0, 2 * t / steps - 1)
        p.grad = sign * gradient(p.detach())
        optimizer.step()
    return p.detach()


def _decays(s: _Training) -> bool:
    """A weight decay acts, and moves the optimum."""
    optimizer = s.begin()[1]
    return bool(optimizer.param_groups[0].get("weight_decay")) and not s.manifold.constant_norm


@_law(OPTIMIZER_LAWS, "O2 the nearest point is found")
def _finds_nearest(s: _Training) -> None:
    """argmin ½‖x − z‖² = y for z = y + a short normal vector at y: the orthogonal Procrustes problem on Stiefel."""
    if _decays(s):
        raise NotApplicable
    y = s.at()
    v = torch.randn(s.shape, dtype=s.dtype, generator=s.generator) / 4
    z = y + v - s.manifold.project(y, v)
    x = s.manifold.retract(y, s.step(y, 0.5))
    found = _descend(s, x, lambda p: p - z)
    s.small("‖x − y‖ / ‖x₀ − y‖", (found - y).norm() / (x - y).norm(), OPTIMUM)


@_law(OPTIMIZER_LAWS, "O2 the Fréchet mean is found")
def _finds_mean(s: _Training) -> None:
    """argmin ½(dist²(x, y) + dist²(x, z)) is the midpoint of y and z, with gradient from autograd."""
    y = s.at()
    u = s.step(y, 0.8)
    for name in ("dist", "exp"):
        s.need(name, y, u if name == "exp" else y)
    if _decays(s):
        raise NotApplicable
    z, best = s.manifold.exp(y, u), s.manifold.exp(y, u / 2)
    x = s.manifold.retract(best, s.step(best, 0.3))

    def gradient(p: Tensor) -> Tensor:
        p = p.clone().requires_grad_()
        cost = (s.manifold.dist(p, y).square() + s.manifold.dist(p, z).square()).sum() / 2
        return torch.autograd.grad(cost, p)[0]

    found = _descend(s, x, gradient, steps=240)
    s.small("‖x − midpoint‖ / ‖x₀ − midpoint‖", (found - best).norm() / (x - best).norm(), OPTIMUM)


@_law(OPTIMIZER_LAWS, "O3 many parameters at once are each on its own")
def _bucketed(s: _Training) -> None:
    """One optimizer of all parameters takes the steps of one optimizer for each."""
    together = s.train(*s.begin(), 20)
    single = s.parameters()
    optimizers = [s.optimizer([p]) for p in single]
    for t in range(20):
        s.gradients(single, t, optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
    s.same("together against one by one", together, single, GROWTH)


@_law(OPTIMIZER_LAWS, "O4 on Euclidean() it is its torch twin")
def _twin(s: _Training) -> None:
    """The same steps as the torch optimizer ``twin`` where the manifold is Euclidean, complex tensors included."""
    from manopt_torch.manifolds import Euclidean

    if s.twin is None:
        raise NotApplicable
    ours, theirs = s.parameters(), s.parameters()
    optimizer, twin = s.factory([{"params": ours, "manifold": Euclidean()}]), s.twin([{"params": theirs}])
    for t in range(30):
        s.train(ours, optimizer, 1, t)
        s.train(theirs, twin, 1, t)
        s.same(f"against the torch twin after {t + 1} steps", ours, theirs, 4)


@_law(OPTIMIZER_LAWS, "O5 it is the wrapped optimizer")
def _wrapped_twin(s: _Training) -> None:
    """The same steps as ``wrapped`` on the manifold."""
    if s.wrapped is None:
        raise NotApplicable
    ours, theirs = s.parameters(), s.parameters()
    optimizer, twin = s.optimizer(ours), s.wrapped([s.group(theirs)])
    for t in range(30):
        s.train(ours, optimizer, 1, t)
        s.train(theirs, twin, 1, t)
    s.same("against the wrapped optimizer", ours, theirs, GROWTH)


Map = Callable[[Tensor], Tensor]


def _isometries(s: _Training | _Search) -> Iterator[tuple[str, Map, Map]]:
    """Linear maps (and inverses) that are isometries of the manifold, and that its retraction respects."""
    wide, shape = _fine(s.dtype), s.shape

    def unitary(n: int) -> Tensor:
        return torch.linalg.qr(torch.randn(n, n, dtype=wide, generator=s.generator))[0]

    maps: list[tuple[str, Map, Map]] = []
    if len(shape) == 1:
        q = unitary(shape[0])
        maps.append(("rotation", lambda x: x @ q.to(x.dtype).mT, lambda x: x @ q.to(x.dtype).conj()))
    if len(shape) == 2:
        a, b, c = unitary(shape[0]), unitary(shape[1]), unitary(shape[0])
        c = c @ torch.diag(torch.linspace(0.8, 1.25, shape[0], dtype=wide)) @ unitary(shape[0])
        d = torch.linalg.inv(c)
        maps.append(("left rotation", lambda x: a.to(x.dtype) @ x, lambda x: a.to(x.dtype).mH @ x))
        maps.append(("right rotation", lambda x: x @ b.to(x.dtype), lambda x: x @ b.to(x.dtype).mH))
        if shape[0] == shape[1]:
            maps.append(
                (
                    "congruence",
                    lambda x: c.to(x.dtype) @ x @ c.to(x.dtype).mH,
                    lambda x: d.to(x.dtype) @ x @ d.to(x.dtype).mH,
                )
            )
    M, x = s.manifold, s.at().to(wide)
    u, v, tolerance = s.step(x, 0.5), s.tangent(x), 1e-9
    for name, there, back in maps:
        y = there(x)
        if float(M.residual(y)) > tolerance:
            continue
        errors = (
            M.inner(y, there(u), there(v)) - M.inner(x, u, v),
            M.project(y, there(u)) - there(u),
            M.retract(y, there(u)) - there(M.retract(x, u)),
        )
        if all(float(e.abs().max()) < tolerance for e in errors):
            yield name, there, back


@_law(OPTIMIZER_LAWS, "O6 an isometry maps iterates to iterates")
def _equivariant(s: _Training) -> None:
    """For an isometry φ, the iterates of f∘φ⁻¹ from φ(x₀) are φ of the iterates of f from x₀."""
    found = False
    for name, there, back in _isometries(s):
        found = True
        params, images = s.parameters(), [nn.Parameter(there(x)) for x in s.start]
        first, second = s.optimizer(params), s.optimizer(images)
        for t in range(20):
            s.gradients(params, t, first)
            for p, q in zip(params, images, strict=True):
                leaf = q.detach().clone().requires_grad_()
                (q.grad,) = torch.autograd.grad(back(leaf), leaf, p.grad)
            first.step()
            second.step()
        scale = GROWTH * s.condition(s.start[0])
        s.same(f"{name} after 20 steps", images, [there(p.detach()) for p in params], scale)
    if not found:
        raise NotApplicable


@_law(OPTIMIZER_LAWS, "O7 training resumes bit for bit")
def _resume(s: _Training) -> None:
    """torch.save and torch.load(weights_only=True) of parameters and state_dict, then the same steps as without."""
    params, optimizer = s.begin()
    s.train(params, optimizer, 5)
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = [nn.Parameter(x) for x in loaded["params"]]
    resumed = s.optimizer(again)
    resumed.load_state_dict(loaded["optimizer"])
    s.train(params, optimizer, 5, 5)
    s.train(again, resumed, 5, 5)
    s.same("resumed against uninterrupted", again, params)


@_law(OPTIMIZER_LAWS, "O8 gradients are left untouched")
def _gradients_untouched(s: _Training) -> None:
    """p.grad is the same tensor with the same bits after a step."""
    params, optimizer = s.begin()
    for t in range(3):
        s.gradients(params, t)
        tensors = [p.grad for p in params]
        bits = [g.clone() for g in tensors if g is not None]
        optimizer.step()
        s.require(all(p.grad is g for p, g in zip(params, tensors, strict=True)), "p.grad is another tensor")
        s.same("p.grad", [p.grad for p in params if p.grad is not None], bits)


@_law(OPTIMIZER_LAWS, "O8 parameters without gradient are skipped")
def _none_skipped(s: _Training) -> None:
    """grad None: neither the parameter nor its state changes, whatever momentum it has; the others move."""
    params, optimizer = s.begin()
    frozen = params[0]
    for first in (0, 4):  # before there is any state, and after
        before, state = frozen.detach().clone(), _snapshot(optimizer.state.get(frozen, {}))
        others = [p.detach().clone() for p in params[1:]]
        for t in range(first, first + 2):
            s.gradients(params, t, optimizer)
            frozen.grad = None
            optimizer.step()
        s.require(torch.equal(frozen, before), "a parameter without gradient moved")
        after = _snapshot(optimizer.state.get(frozen, {}))
        s.require(
            after.keys() == state.keys() and all(torch.equal(after[k], state[k]) for k in state),
            "the state of a parameter without gradient changed",
        )
        s.require(not any(map(torch.equal, params[1:], others)), "the other parameters did not move")
        s.train(params, optimizer, 2, first + 2)
    s.require(not torch.equal(frozen, before), "a parameter whose gradient is back does not move")


def _snapshot(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v).clone() for k, v in state.items() if v is not None}


@_law(OPTIMIZER_LAWS, "O8 a zero step keeps the bits")
def _zero_keeps(s: _Training) -> None:
    """Zero learning rate, or zero gradient before there is momentum: p keeps every bit, each point of a batch too."""
    params, optimizer = s.begin()
    for group in optimizer.param_groups:
        group["lr"] = 0.0 * group["lr"]
    s.train(params, optimizer, 3)
    s.same("lr = 0", params, s.start)
    if _decays(s):
        return
    params, optimizer = s.begin()
    for _ in range(2):
        s.gradients(params, 0)
        for p in params[:2]:
            p.grad = torch.zeros_like(p)
        params[2].grad[1] = 0  # type: ignore[index]
        optimizer.step()
        s.same("zero gradient", [*params[:2], params[2][1]], [*s.start[:2], s.start[2][1]])
        s.require(not torch.equal(params[2][0], s.start[2][0]), "a point with a gradient did not move")


@_law(OPTIMIZER_LAWS, "O8 a closure sees gradients enabled")
def _closure(s: _Training) -> None:
    """step(closure), under no_grad too: the closure runs with gradients on, returns the loss, and sets what is used."""
    params, optimizer = s.begin()
    sign = -1 if optimizer.param_groups[0].get("maximize") else 1
    expected = s.train(*s.begin(), 2)
    enabled = []
    for t in range(2):

        def closure(t: int = t) -> Tensor:
            enabled.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            pairs = zip(params, s.targets[t], strict=True)
            loss = torch.stack([sign * (p - a).abs().square().sum() / 2 for p, a in pairs]).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            loss = optimizer.step(closure)
            s.require(not torch.is_grad_enabled(), "step leaves gradients enabled")
        s.require(isinstance(loss, Tensor) and loss.ndim == 0, f"step returned {loss!r}, not the closure's loss")
    s.require(all(enabled), "the closure ran with gradients disabled")
    s.same("steps with a closure against steps without", params, expected, GROWTH)


@dataclasses.dataclass(frozen=True)
class _Unmovable(Manifold):
    """Numbers that cannot be moved: a step on it raises ``RuntimeError``."""

    event_dim = 0
    event_shapes = ((),)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        raise RuntimeError("this manifold cannot be moved on")

    def residual(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x.real)

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)


@_law(OPTIMIZER_LAWS, "O8 a step that raises changes nothing")
def _failing_step(s: _Training) -> None:
    """When the last of three groups cannot be moved, every p and p.grad keeps its bits: also those of Euclidean().

    An optimizer that refuses these manifolds has a last group with a sparse gradient, which raises as well.
    """
    from manopt_torch.manifolds import Euclidean

    params = s.parameters()
    free, stuck = nn.Parameter(torch.randn(3, dtype=s.dtype)), nn.Parameter(torch.randn(3, dtype=s.dtype))
    groups = [
        s.group(params),
        {"params": [free], "manifold": Euclidean()},
        {"params": [stuck], "manifold": _Unmovable()},
    ]
    free.grad, stuck.grad = torch.ones_like(free), torch.ones_like(stuck)
    try:
        optimizer = s.factory(groups)
    except ValueError:
        stuck = nn.Parameter(s.start[0].clone())
        stuck.grad = torch.ones_like(stuck).to_sparse()
        optimizer = s.factory([s.group(params), s.group([stuck])])
    s.gradients(params, 0)
    everything = [*params, free, stuck]

    def values() -> list[Tensor]:
        return [t.detach().to_dense().clone() for p in everything for t in (p, p.grad) if t is not None]

    before = values()
    try:
        optimizer.step()
    except (RuntimeError, ValueError):
        pass
    else:
        raise s.violation("a step on a manifold that cannot be moved on did not raise")
    s.same("after a step that raised", values(), before)


@_law(OPTIMIZER_LAWS, "O9 deep copies and pickles continue alike")
def _copies(s: _Training) -> None:
    """(parameters, optimizer) deep-copied or pickled together take the same steps, and share nothing."""
    params, optimizer = s.begin()
    s.train(params, optimizer, 3)
    halfway = [p.detach().clone() for p in params]
    copies = {
        "deep copy": copy.deepcopy((params, optimizer)),
        "pickle": pickle.loads(pickle.dumps((params, optimizer))),
    }
    for twin_params, twin in copies.values():
        s.train(twin_params, twin, 3, 3)
        s.same("the original, while its copy trained", params, halfway)
    s.train(params, optimizer, 3, 3)
    for name, (twin_params, _) in copies.items():
        s.same(f"{name} against the original", twin_params, params)


@_law(OPTIMIZER_LAWS, "O9 learning rate schedulers act")
def _scheduler(s: _Training) -> None:
    """StepLR, and a tensor learning rate: the same steps as setting ``lr`` by hand."""
    by_hand, optimizer = s.begin()
    rate = optimizer.param_groups[0]["lr"]
    for t in range(4):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5**t
        s.train(by_hand, optimizer, 1, t)
    params, optimizer = s.begin()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for t in range(4):
        s.train(params, optimizer, 1, t)
        scheduler.step()
    s.same("StepLR against lr by hand", params, by_hand)
    constant = s.train(*s.begin(), 4)
    s.require(not any(map(torch.equal, params, constant)), "steps with StepLR are those without")
    params, optimizer = s.begin()
    for t in range(4):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate * 0.5**t, dtype=torch.float64)
        s.train(params, optimizer, 1, t)
    s.same("tensor lr against a number", params, by_hand, GROWTH)


@_law(OPTIMIZER_LAWS, "O9 GradScaler works")
def _scaler(s: _Training) -> None:
    """Scaled gradients give the unscaled steps; a step with an infinite gradient is left out."""
    if s.dtype.is_complex:
        raise NotApplicable
    expected = s.train(*s.begin(), 3)
    params, optimizer = s.begin()
    sign = -1 if optimizer.param_groups[0].get("maximize") else 1
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(3):
        optimizer.zero_grad()
        pairs = zip(params, s.targets[t], strict=True)
        loss = torch.stack([sign * (p - a).square().sum() / 2 for p, a in pairs]).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    s.same("with GradScaler against without", params, expected, GROWTH)
    before = [p.detach().clone() for p in params]
    s.gradients(params, 0)
    scaler.scale(torch.ones(()))
    params[0].grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    s.same("a step with an infinite gradient", params, before)


@_law(OPTIMIZER_LAWS, "O9 add_param_group adds")
def _add_group(s: _Training) -> None:
    """A group added later takes the steps of one given at the start, with its own settings."""
    expected = s.parameters()
    optimizer = s.factory([s.group(expected[:1]), s.group(expected[1:], lr=0.01)])
    s.train(expected, optimizer, 4)
    params = s.parameters()
    optimizer = s.factory([s.group(params[:1])])
    optimizer.add_param_group(s.group(params[1:], lr=0.01))
    s.train(params, optimizer, 4)
    s.same("added later against given at the start", params, expected)
    s.require(not any(map(torch.equal, params, s.start)), "a parameter of an added group did not move")


@_law(OPTIMIZER_LAWS, "O9 maximize ascends")
def _maximize(s: _Training) -> None:
    """maximize of −f takes the steps of minimizing f."""
    if "maximize" not in s.begin()[1].defaults:
        raise NotApplicable
    params = s.train(*s.begin(maximize=True), 6)
    mirror = s.train(*s.begin(maximize=False), 6)
    s.same("maximize of −f against minimize of f", params, mirror, GROWTH)


@_law(OPTIMIZER_LAWS, "O11 single precision does not drift")
def _drift(s: _Training) -> None:
    """O1 over 1000 steps in single precision."""
    single = torch.complex64 if s.dtype.is_complex else torch.float32
    _stay(_Training(s.law, s.manifold, s.shape, single, s.factory), 1000, 50)


# ====================================================================== solvers
class _Search(_Setting):
    """A solver under test, and a cost with a known minimum, 0 at two target points: ½ Σ w |x − a|², w from 1 to 8."""

    def __init__(
        self, law: str, manifold: Manifold, shape: tuple[int, ...], dtype: torch.dtype, solver: Solver
    ) -> None:
        super().__init__(law, manifold, shape, (2,), dtype)
        self.solver = solver
        self.target = self.point()
        self.start = manifold.retract(self.target, self.step(self.target, 0.5))
        weights = torch.linspace(1, 8, self.target.numel(), dtype=dtype.to_real())
        self.weights = weights[torch.randperm(len(weights), generator=self.generator)].reshape(self.target.shape)

    def at(self) -> Tensor:
        """A single point."""
        return self.point()[0]

    def cost(self, x: Tensor) -> Tensor:
        return (self.weights * (x - self.target).abs().square()).sum() / 2

    def states(
        self, steps: int, cost: Callable[[Tensor], Tensor] | None = None, start: Tensor | None = None
    ) -> list[Any]:
        """The states of so many steps, or of fewer if the solver halts."""
        problem = Problem(self.cost if cost is None else cost, Product(self.manifold))
        states = [self.solver.init(problem, (self.start if start is None else start,))]
        while len(states) <= steps and not states[-1].halted and states[-1].norm > 0:
            states.append(self.solver.step(problem, states[-1]))
        return states

    def minimize(self, **settings: Any) -> Result:
        single = torch.finfo(self.dtype).eps > 1e-10
        settings = {"tolerance_grad": 1e-4 if single else 1e-9, "cost": self.cost, "x0": self.start, **settings}
        return minimize(manifold=self.manifold, solver=self.solver, **settings)

    def rounding(self, value: float) -> float:
        """What a cost of this size is uncertain by."""
        return self.tolerance * abs(value)


def check_solver(
    solver: Solver,
    manifold: Manifold,
    shape: tuple[int, ...] | None = None,
    *,
    dtypes: Iterable[torch.dtype] = (torch.float64, torch.complex64),
    laws: Iterable[str] | None = None,
) -> list[str]:
    """Check the laws S1 to S10 on ``solver``; the names of those that applied are returned.

    Args:
        solver: such as ``LBFGS()``. Exemptions are read from it.
        manifold, shape: where to minimize; the first of ``manifold.event_shapes`` by default.
        dtypes: where to check.
        laws: names or numbers of laws; all by default. ``testing.SOLVER_LAWS`` lists them.

    Raises:
        LawViolation: the first law that does not hold.
    """
    event = tuple(manifold.event_shapes[0] if shape is None else shape)
    dtypes, applied = some(dtypes=dtypes), []
    for name, law in select_laws(SOLVER_LAWS, laws).items():
        settings = (_Search(name, manifold, event, dtype, solver) for dtype in dtypes)
        if _hold(name, law, settings, exemption(name, solver)):
            applied.append(name)
    return applied


@_law(SOLVER_LAWS, "S1 points stay on the manifold, in their dtype")
def _points_kept(s: _Search) -> None:
    for state in s.states(15):
        (x,) = state.x
        s.require(x.dtype == s.dtype and x.shape == s.start.shape, f"got {tuple(x.shape)}, {x.dtype}")
        s.small("residual", s.manifold.residual(x), s.tolerance)


@_law(SOLVER_LAWS, "S2 the cost never rises")
def _monotone(s: _Search) -> None:
    """f(x_{k+1}) ≤ f(x_k), but for rounding errors."""
    costs = [s.cost(*state.x).item() for state in s.states(15)]
    for k, (before, after) in enumerate(itertools.pairwise(costs)):
        s.small(f"rise of the cost in step {k + 1}", max(0.0, after - before), s.rounding(before))


@_law(SOLVER_LAWS, "S3 a state says what is at its point")
def _states_true(s: _Search) -> None:
    """f, g and norm of a state are the cost, its Riemannian gradient and the norm of that at x."""
    scale = 16 * s.condition(s.start[0], s.target[0])
    for state in s.states(10):
        x = state.x[0].detach().requires_grad_()
        f = s.cost(x)
        g = s.manifold.rgrad(x.detach(), *torch.autograd.grad(f, x))
        s.small("f", state.f - f.item(), s.rounding(f.item()))
        s.close("g", state.g[0], g, scale)
        s.small("norm", state.norm - s.manifold.norm(x.detach(), g).square().sum().sqrt().item(), scale * s.tolerance)


@_law(SOLVER_LAWS, "S4 what is remembered is tangent")
def _memory_tangent(s: _Search) -> None:
    """Every tensor in a state but x, of the shape of x or a stack of such, holds tangent vectors at x."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor) and value.shape[value.ndim - s.start.ndim :] == s.start.shape:
            yield value
        elif isinstance(value, (tuple, list)):
            for member in value:
                yield from tensors(member)

    for state in s.states(10):
        for field in dataclasses.fields(state):
            for v in tensors(getattr(state, field.name)) if field.name != "x" else ():
                s.close(f"{field.name}, projected", s.manifold.project(state.x[0], v), v, 16 * s.condition(s.start[0]))


@_law(SOLVER_LAWS, "S5 evaluations are counted")
def _counted(s: _Search) -> None:
    """The cost runs nfev times, for a product of the Hessian at most once more; gradients are made Riemannian
    njev + nhev times; 1 and 1 at the start."""
    counts = {"cost": 0, "rgrad": 0}
    kind = type(s.manifold)

    def rgrad(self: Manifold, x: Tensor, g: Tensor) -> Tensor:
        counts["rgrad"] += 1
        return kind.rgrad(self, x, g)

    def cost(x: Tensor) -> Tensor:
        counts["cost"] += 1
        return s.cost(x)

    counting = type(kind.__name__, (kind,), {"rgrad": rgrad})
    fields = {f.name: getattr(s.manifold, f.name) for f in dataclasses.fields(s.manifold)}  # type: ignore[arg-type]
    for limit in (0, 5):
        counts.update(cost=0, rgrad=0)
        r = minimize(cost, counting(**fields), s.start, s.solver, max_iter=limit, tolerance_grad=0.0)
        s.require(
            r.nfev <= counts["cost"] <= r.nfev + r.nhev,
            f"{counts['cost']} runs of the cost, nfev {r.nfev}, nhev {r.nhev}",
        )
        s.require(counts["rgrad"] == r.njev + r.nhev, f"{counts['rgrad']} gradients, njev {r.njev}, nhev {r.nhev}")
        s.require(limit > 0 or (r.nfev, r.njev, r.nhev) == (1, 1, 0), "the start takes one cost and one gradient")


@_law(SOLVER_LAWS, "S6 the optimum is found")
def _optimum(s: _Search) -> None:
    r = s.minimize()
    single = torch.finfo(s.dtype).eps > 1e-10
    s.require(r.success, f"stopped by: {r.message}")
    s.small("x − a", r.x - s.target, 1e-3 if single else 1e-8)
    s.small("the cost, 0 at the optimum,", r.fun, 1e-6 if single else 1e-15)


@_law(SOLVER_LAWS, "S7 a critical start is kept")
def _critical(s: _Search) -> None:
    """A constant cost, and a start at the optimum: success at once, with the bits of the start."""
    constants = (lambda x: 0 * x.abs().sum() + 3, lambda x: torch.tensor(3.0, dtype=x.dtype.to_real()))
    for f, x, value in [*((c, s.start, 3.0) for c in constants), (s.cost, s.target, 0.0)]:
        for tolerance in (None, 0.0):
            r = s.minimize(cost=f, x0=x, tolerance_grad=tolerance)
            s.require(r.success and r.nit == 0, f"nit = {r.nit}, stopped by: {r.message}")
            s.require(torch.equal(r.x, x) and r.fun == value, f"the start was left, fun = {r.fun}")


@_law(SOLVER_LAWS, "S8 a run leaves nothing behind")
def _clean(s: _Search) -> None:
    """The start keeps its bits and shares no memory with the result; a second run gives the same bits."""
    start, solver = s.start.clone(), copy.deepcopy(s.solver)
    first, second = s.minimize(max_iter=6), s.minimize(max_iter=6)
    s.require(torch.equal(s.start, start), "x0 was written to")
    s.require(
        first.x.data_ptr() != s.start.data_ptr() and not first.x.requires_grad, "the result is x0, or has a graph"
    )
    s.require(torch.equal(first.x, second.x) and first == dataclasses.replace(second, x=first.x), "another run differs")
    s.require(s.solver == solver, f"the solver changed from {solver!r} to {s.solver!r}")


@_law(SOLVER_LAWS, "S9 an isometry maps iterates to iterates")
def _solver_equivariant(s: _Search) -> None:
    """For an isometry φ, the iterates of f∘φ⁻¹ from φ(x₀) are φ of the iterates of f from x₀."""
    found = False
    for name, there, back in _isometries(s):
        found = True
        here = s.states(4)
        images = s.states(4, lambda y, back=back: s.cost(back(y)), there(s.start))  # type: ignore[misc]
        s.require(len(here) == len(images), f"{name}: halts after {len(here) - 1} steps, its image {len(images) - 1}")
        for k, (a, b) in enumerate(zip(here, images, strict=True)):
            s.close(f"{name} after {k} steps", b.x[0], there(a.x[0]), GROWTH * s.condition(s.start[0]))
    if not found:
        raise NotApplicable


@_law(SOLVER_LAWS, "S10 where the cost is not a number is not entered")
def _barrier(s: _Search) -> None:
    """−Σ log(1 − |x − a|²/r²) from just inside the ball outside which it is NaN: costs are finite, and get small."""
    start = s.manifold.retract(s.target, s.step(s.target, 0.2))
    radius = 1.2 * (start - s.target).abs().square().sum().sqrt()

    def cost(x: Tensor) -> Tensor:
        return -torch.log1p(-((x - s.target).abs().square().sum() / radius**2))

    states = s.states(30, cost, start)
    s.require(all(math.isfinite(state.f) and math.isfinite(state.norm) for state in states), "a cost is not finite")
    s.small("the cost, relative to the start's", states[-1].f / states[0].f, 1e-2)
