"""Every law on every manifold: class × option × dtype × batch shape, each a test.

Classes are found by walking ``manopt_torch.manifolds.__all__`` and options by their type hints, so that a new class or
a new ``Literal`` is under the laws the moment it is written.
"""

import dataclasses
import itertools
import types
import typing

import matplotlib.figure
import pytest
import torch

import manopt_torch.manifolds
from manopt_torch.manifolds import Blocks, Manifold, Sphere, Stiefel, View
from manopt_torch.testing import (
    BATCH_SHAPES,
    DTYPES,
    MANIFOLD_LAWS,
    LawViolation,
    check_gradient,
    check_hessian,
    check_manifold,
    check_retraction,
    exemption,
)

#: what a field of type Manifold ranges over
BASES = (Stiefel(), Sphere(), View(Stiefel(), "transpose"))


def values(hint, default):
    """What a field of this type ranges over."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if hint is Manifold:
        return BASES
    if hint is bool:
        return (False, True)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(itertools.chain.from_iterable(values(h, default) for h in typing.get_args(hint)))
    if hint is types.NoneType:
        return (None,)
    return (4 if default is None or default is dataclasses.MISSING else default,)


def instances(cls):
    """The class with every combination of options that it accepts."""
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    for combination in itertools.product(*(values(hints[f.name], f.default) for f in fields)):
        try:
            manifold = cls(*combination)
        except ValueError:  # a combination that the class refuses
            continue
        if manifold != View(View(Stiefel(), "transpose"), "transpose"):  # Stiefel() again, at some length
            yield manifold


CLASSES = [
    c
    for c in map(vars(manopt_torch.manifolds).get, manopt_torch.manifolds.__all__)
    if isinstance(c, type) and issubclass(c, Manifold) and c is not Manifold
]
#: with free rows and without: what the base ranges over is tested by itself
BLOCKS = [Blocks(Stiefel(), 2), Blocks(Stiefel(), 1, of=2)]
MANIFOLDS = [*(m for c in CLASSES if c is not Blocks for m in instances(c)), *BLOCKS]


def cases():
    for manifold in MANIFOLDS:
        for name, law in MANIFOLD_LAWS.items():
            if exemption(name, manifold):
                yield manifold, name, {}, "exempt"
            elif law.fine:
                for dtype in (torch.float64, torch.complex128):
                    yield manifold, name, {"dtypes": [dtype]}, f"{dtype}"
            else:
                for dtype, batch in itertools.product(DTYPES, BATCH_SHAPES):
                    yield manifold, name, {"dtypes": [dtype], "batch_shapes": [batch]}, f"{dtype}-{batch}"


@pytest.mark.parametrize(
    ("manifold", "law", "where"),
    [pytest.param(m, law, where, id=f"{m!r}-{law}-{label}") for m, law, where, label in cases()],
)
def test_law(manifold, law, where):
    if not check_manifold(manifold, laws=[law], **where):
        pytest.skip("the law does not apply")


def test_every_class_and_option_is_found():
    assert {"Euclidean", "Sphere", "Stiefel", "Unitary", "SPD", "View"} <= {c.__name__ for c in CLASSES}
    assert Stiefel(metric="canonical", retraction="polar") in MANIFOLDS
    assert View(View(Stiefel(), "transpose"), "flatten", ndim=4) in MANIFOLDS


def test_unknown_laws_are_named():
    with pytest.raises(ValueError, match=r"no law 'M99'; the laws are: M1 random"):
        check_manifold(Sphere(), laws=["M99"])


def test_functions_check_what_they_say():
    assert check_retraction(Sphere("projection"), (3,)).order == pytest.approx(3, abs=0.1)
    assert check_retraction(Stiefel(), (5, 3)).order == pytest.approx(2, abs=0.1)  # first order in this metric
    M = Stiefel()
    x = M.random(4, 5, 3, dtype=torch.complex128)
    a = torch.randn(5, 5, dtype=torch.complex128)

    def f(y):
        return (y.conj() * (a @ y)).sum((-2, -1)).real

    assert check_gradient(M, f, x).order == pytest.approx(2, abs=0.1)
    check_gradient(M, f, x, gradient=lambda y: a @ y + a.mH @ y)
    slope = check_hessian(M, f, x)
    assert slope.order == pytest.approx(3, abs=0.1)
    axes = slope.plot(matplotlib.figure.Figure().add_subplot())
    points, line = axes.get_lines()
    assert points.get_ydata()[3] == slope.errors[3]
    assert line.get_ydata()[-1] == pytest.approx(slope.errors[0] * (slope.steps[-1] / slope.steps[0]) ** 3)
    with pytest.raises(LawViolation, match="measured order 1"):
        check_gradient(M, f, x, gradient=lambda y: a @ y)
    with pytest.raises(LawViolation, match="check_hessian"):
        check_hessian(M, lambda y: (y - x).abs().square().sum((-2, -1)) ** 1.25, x)
    with pytest.raises(ValueError, match="double precision"):
        check_gradient(M, f, x.to(torch.complex64))


def test_checks_see_costs_of_any_size():
    M, a = Stiefel(), torch.diag(torch.arange(6, dtype=torch.float64))
    x = M.random(6, 2, dtype=torch.float64)

    def f(y):
        return (y.mH @ a @ y).diagonal(dim1=-2, dim2=-1).sum(-1)

    for scale in (1e-11, 1.0, 1e11):
        check_gradient(M, lambda y, s=scale: s * f(y), x)
        with pytest.raises(LawViolation, match="measured order 1"):
            check_gradient(M, lambda y, s=scale: s * f(y), x, lambda y, s=scale: -s * y)
    check_hessian(M, lambda y: 1e5 + f(y), x)


def test_checks_refuse_what_they_cannot_measure():
    M = Stiefel()
    x = M.random(4, 5, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="x is not on the manifold"):
        check_gradient(M, lambda y: y.sum((-1, -2)), 2 * x)
    with pytest.raises(ValueError, match=r"to real numbers \(4,\), got a tensor of shape \(\)"):
        check_gradient(M, lambda y: y.sum(), x)
    with pytest.raises(ValueError, match="got no points"):
        check_hessian(M, lambda y: y.sum((-1, -2)), x[:0])
    with pytest.raises(TypeError, match="a tensor of its points"):
        check_gradient(M, lambda y: y.sum(), (x,))
