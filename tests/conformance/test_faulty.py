"""The laws are tested: each broken class is refused by the law that names its fault, healthy ones by none."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from faulty import MANIFOLDS, NATIVE, OPTIMIZERS, SOLVERS, Adaptive, Ball, Conjugate, Descent, Frames, Positive, build

from manopt_torch.manifolds import Manifold, Stiefel
from manopt_torch.testing import (
    DTYPES,
    MANIFOLD_LAWS,
    OPTIMIZER_LAWS,
    SOLVER_LAWS,
    LawViolation,
    check_manifold,
    check_optimizer,
    check_solver,
)

DTYPES_OF = {Frames: DTYPES, Ball: DTYPES, Positive: (torch.float32, torch.float64)}
FAULTY_MANIFOLDS = [(h, f) for h, faulty in MANIFOLDS.items() for f in faulty]
FAULTY_OPTIMIZERS = [f for faulty in OPTIMIZERS.values() for f in faulty]
FAULTY_SOLVERS = [f for faulty in SOLVERS.values() for f in faulty]


def momentum(groups):
    """The torch twin of Descent."""
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("healthy", MANIFOLDS)
def test_healthy_manifolds_obey_every_law(healthy):
    applied = check_manifold(healthy(), dtypes=DTYPES_OF[healthy])
    assert len(applied) > 30


@pytest.mark.parametrize(("healthy", "faulty"), FAULTY_MANIFOLDS, ids=lambda c: c.__name__)
def test_faulty_manifolds_are_refused(healthy, faulty):
    with pytest.raises(LawViolation) as refusal:
        check_manifold(build(faulty), dtypes=DTYPES_OF[healthy], laws=[faulty.law])
    assert refusal.value.law == faulty.law
    assert repr(build(faulty)) in str(refusal.value)
    assert str(refusal.value).startswith(faulty.law)


@pytest.mark.parametrize("healthy", OPTIMIZERS)
@pytest.mark.parametrize("manifold", [Frames(), Ball()], ids=repr)
def test_healthy_optimizers_obey_every_law(healthy, manifold):
    applied = check_optimizer(healthy, manifold, twin=momentum if healthy is Descent else None, wrapped=healthy)
    missing = set(OPTIMIZER_LAWS) - set(applied)
    assert missing <= {"O2 the Fréchet mean is found", "O4 on Euclidean() it is its torch twin"}


@pytest.mark.parametrize("faulty", FAULTY_OPTIMIZERS, ids=lambda c: c.__name__)
def test_faulty_optimizers_are_refused(faulty):
    with pytest.raises(LawViolation) as refusal:
        check_optimizer(faulty, Ball(), laws=[faulty.law], twin=momentum, wrapped=Descent)
    assert refusal.value.law == faulty.law
    assert "Ball()" in str(refusal.value)


@pytest.mark.parametrize("faulty", NATIVE, ids=lambda c: c.__name__)
def test_faulty_native_optimizers_are_refused(faulty):
    (healthy,) = faulty.__bases__
    for kind in (healthy, faulty):

        def factory(groups, kind=kind):
            return kind(groups, lr=0.05)

        def twin(groups):
            return torch.optim.Adagrad(groups, lr=0.05)

        if kind is healthy:
            assert check_optimizer(factory, Stiefel(), (5, 3), laws=[faulty.law], twin=twin) == [faulty.law]
        else:
            with pytest.raises(LawViolation) as refusal:
                check_optimizer(factory, Stiefel(), (5, 3), laws=[faulty.law], twin=twin)
            assert refusal.value.law == faulty.law


@pytest.mark.parametrize("manifold", [Frames(), Ball()], ids=repr)
def test_a_healthy_solver_obeys_every_law(manifold):
    assert set(check_solver(Conjugate(), manifold)) == set(SOLVER_LAWS)


@pytest.mark.parametrize("faulty", FAULTY_SOLVERS, ids=lambda c: c.__name__)
def test_faulty_solvers_are_refused(faulty):
    with pytest.raises(LawViolation) as refusal:
        check_solver(faulty(), Ball(), laws=[faulty.law])
    assert refusal.value.law == faulty.law
    assert "Ball()" in str(refusal.value)


def test_every_law_refuses_somebody():
    refusing = {f.law for f in (*(f for _, f in FAULTY_MANIFOLDS), *FAULTY_OPTIMIZERS, *FAULTY_SOLVERS)}
    assert refusing == {*MANIFOLD_LAWS, *OPTIMIZER_LAWS, *SOLVER_LAWS}


@dataclasses.dataclass(frozen=True)
class Excused(Frames):
    """One exemption that is needed, and one that is stale."""

    isometric = True
    exempt: ClassVar[dict[str, str]] = {"M6 isometric is told truthfully": "a joke", "M3 rgrad is tangent": "stale"}


def test_exemptions_are_checked_both_ways():
    check_manifold(Excused(), laws=["M6"])
    with pytest.raises(LawViolation, match=r"M3 rgrad is tangent: an exemption is declared \('stale'\)"):
        check_manifold(Excused(), laws=["M3"])

    def excused(groups):
        return Adaptive(groups)

    excused.exempt = {"O6": "elementwise, it says"}
    with pytest.raises(LawViolation, match="but the law holds: remove it"):
        check_optimizer(excused, Ball(), laws=["O6"])
    elementwise = next(c for c in FAULTY_OPTIMIZERS if c.__name__ == "ElementwiseSecondMoment")
    excused = lambda groups: elementwise(groups)  # noqa: E731
    excused.exempt = {"O6": "elementwise"}
    assert check_optimizer(excused, Ball(), laws=["O6"])


def test_what_would_check_nothing_is_refused():
    for empty in ("dtypes", "batch_shapes", "laws"):
        with pytest.raises(ValueError, match=f"{empty} is empty"):
            check_manifold(Frames(), **{empty: ()})
    for empty in ("dtypes", "laws"):
        with pytest.raises(ValueError, match=f"{empty} is empty"):
            check_optimizer(Descent, Ball(), **{empty: iter(())})


def test_what_is_no_manifold_is_refused():
    for given in (Frames, "Frames()", None):
        with pytest.raises(TypeError, match="expected an instance of a manifold, such as"):
            check_manifold(given)
    methods = {name: vars(Frames)[name] for name in ("project", "retract", "residual", "random")}
    undecorated = type("Plain", (Manifold,), {**methods, "event_dim": 2, "event_shapes": ((3, 2),)})
    with pytest.raises(TypeError, match=r"write @dataclasses.dataclass\(frozen=True\) over the class Plain"):
        check_manifold(undecorated())
