"""Every law on every optimizer: class × options × manifold × dtype, each a test; known optima; loud errors.

Classes are found by walking ``manopt_torch.optim.__all__``: a new one is under the laws, with its defaults, once it
is exported, and with other options when they are added to ``OPTIONS``.
"""

import math

import pytest
import torch
from torch import nn

import manopt_torch.optim
from manopt_torch import SPD, Euclidean, ManifoldParameter, Sphere, Stiefel, Unitary, View
from manopt_torch.optim import (
    RiemannianAdagrad,
    RiemannianAdam,
    RiemannianOptimizer,
    RiemannianRMSprop,
    RiemannianSGD,
    riemannian,
)
from manopt_torch.testing import OPTIMIZER_LAWS, check_optimizer, exemption

CLASSES = [
    c
    for c in map(vars(manopt_torch.optim).get, manopt_torch.optim.__all__)
    if isinstance(c, type) and issubclass(c, RiemannianOptimizer) and c is not RiemannianOptimizer
]

#: settings of each class; ``lr`` is 0.05 where nothing else is said
OPTIONS = {
    "RiemannianSGD": [
        {"momentum": 0.9},
        {},
        {"momentum": 0.8, "dampening": 0.5},
        {"momentum": 0.8, "nesterov": True},
        {"momentum": 0.5, "weight_decay": 0.1},
        {"momentum": 0.5, "maximize": True},
    ],
    "RiemannianAdam": [
        {},
        {"amsgrad": True},
        {"betas": (0.5, 0.9), "eps": 1e-2},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True},
    ],
    "RiemannianRMSprop": [
        {"lr": 0.01, "momentum": 0.5},
        {"lr": 0.01},
        {"lr": 0.02, "alpha": 0.5, "eps": 1e-2},
        {"lr": 0.01, "weight_decay": 0.1, "maximize": True},
    ],
    "RiemannianAdagrad": [
        {"lr": 0.2},
        {"lr": 0.2, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "eps": 1e-2},
        {"lr": 0.2, "weight_decay": 0.1, "maximize": True},
    ],
    "RiemannianASA": [{}, {"beta": 0.9, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}],
    "RiemannianMatrixAdam": [{}, {"betas": (0.5, 0.9), "eps": 1e-2, "weight_decay": 0.1, "maximize": True}],
    "Landing": [{"lr": 0.1}, {"momentum": 0.5, "attraction": 0.5, "safe": 0.1, "maximize": True}],
    "POGO": [{"lr": 0.1}, {"momentum": 0.5, "maximize": True}, {"betas": (0.9, 0.99)}],
    "RiemannianMuon": [{}, {"momentum": 0.5, "nesterov": False, "maximize": True}],
}
ELEMENTWISE = {"O6": "torch's second moment is one number per entry, and entries are not preserved by an isometry"}
AMBIENT = {
    **ELEMENTWISE,
    "O2 the nearest point is found": "an ambient gradient that is normal at the optimum is not normal once rescaled",
}
WRAPPED = [
    (torch.optim.SGD, {"momentum": 0.9}, {}, {}),
    (torch.optim.Adam, {}, {}, ELEMENTWISE),
    (torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True}, {}, ELEMENTWISE),
    (torch.optim.RMSprop, {"momentum": 0.5, "lr": 0.01}, {}, ELEMENTWISE),
    (torch.optim.RMSprop, {"lr": 0.01}, {"frame": "ambient"}, AMBIENT),
    (torch.optim.Adagrad, {"lr": 0.2}, {}, ELEMENTWISE),
]


TWINS = {
    RiemannianSGD: torch.optim.SGD,
    RiemannianAdagrad: torch.optim.Adagrad,
    RiemannianAdam: torch.optim.Adam,
    RiemannianRMSprop: torch.optim.RMSprop,
}


class Settings:
    """A factory for :func:`check_optimizer`, that can be printed."""

    def __init__(self, kind, options, frame=None, exempt=None):
        self.kind, self.options, self.frame = kind, {"lr": 0.05, **options}, frame
        self.exempt = {**getattr(kind, "exempt", {}), **(exempt or {})}

    def __repr__(self):
        options = ", ".join(f"{k}={v}" for k, v in {**self.options, **(self.frame or {})}.items())
        text = f"{self.kind.__name__}({options})"
        return text if self.frame is None else f"riemannian({text})"

    def __call__(self, groups):
        optimizer = self.kind(groups, **self.options)
        return optimizer if self.frame is None else riemannian(optimizer, **self.frame)

    def twin(self, groups):
        """The torch optimizer that this one is on Euclidean()."""
        options = {k: v for k, v in self.options.items() if k != "decoupled_weight_decay"}
        kind = TWINS.get(self.kind, self.kind)
        if self.options.get("decoupled_weight_decay"):
            kind = torch.optim.AdamW
        return kind(groups, **options)

    def wrapped(self, groups):
        """The wrapped torch optimizer that this one is on any manifold."""
        return riemannian(self.twin(groups))


NATIVE = [Settings(c, options) for c in CLASSES for options in OPTIONS.get(c.__name__, [{}])]
SETTINGS = [*NATIVE, *(Settings(c, options, frame, exempt) for c, options, frame, exempt in WRAPPED)]
#: these see every manifold; the first two the long runs as well
FIRST = [*{s.kind: s for s in reversed(NATIVE)}.values(), *SETTINGS[len(NATIVE) :][:2]]
PLACES = [
    (Stiefel(), (5, 3)),
    (Euclidean(), ()),
    (Sphere(), (4,)),
    (Stiefel(metric="canonical"), (4, 2)),
    (Unitary(), (3, 3)),
    (SPD(), (2, 2)),
    (View(Stiefel(), "transpose"), (2, 4)),
]


def defined(settings, manifold, shape):
    """Whether the optimizer takes this manifold; that others are refused, and which, is tested with its class."""
    try:
        settings([{"params": [nn.Parameter(manifold.random(*shape))], "manifold": manifold}])
    except ValueError:
        return False
    return True


def wanted(settings, manifold, name):
    """Whether this law is checked here: long runs are few, of most classes on one manifold."""
    widely = settings.frame is not None or settings.kind in (RiemannianSGD, RiemannianAdam)
    if name.startswith("O11"):
        places = (Sphere(), Stiefel(), Unitary(), SPD()) if widely else (Stiefel(),)
        return settings in FIRST and settings.frame is None and manifold in places
    if "Fréchet" in name:  # log on Stiefel is an iteration, and the laws M11 speak of it
        return settings in FIRST and (manifold == Unitary() or (widely and not isinstance(manifold, (Stiefel, View))))
    return True


def cases():
    for settings in SETTINGS:
        for manifold, shape in PLACES if settings in FIRST else PLACES[:2]:
            if not defined(settings, manifold, shape):
                continue
            exempt = {} if isinstance(manifold, Euclidean) else settings.exempt  # torch's own step there
            here = Settings(settings.kind, settings.options, settings.frame, exempt)
            for name in OPTIMIZER_LAWS:
                if wanted(settings, manifold, name):
                    both = [torch.float64, torch.complex64]
                    for dtypes in [both] if exemption(name, here) else [[d] for d in both]:
                        label = f"{settings!r}-{manifold!r}-{name}-{'-'.join(map(str, dtypes))}"
                        yield pytest.param(here, manifold, shape, name, dtypes, id=label)


@pytest.mark.parametrize(("settings", "manifold", "shape", "law", "dtypes"), list(cases()))
def test_law(settings, manifold, shape, law, dtypes):
    flat = isinstance(manifold, Euclidean)
    twins = {"twin": settings.twin if flat and settings.frame is None else None}
    twins["wrapped"] = settings.wrapped if settings.kind is RiemannianSGD and not flat else None
    if not check_optimizer(settings, manifold, shape, dtypes=dtypes, laws=[law], **twins):
        pytest.skip("the law does not apply")


def test_every_class_is_found():
    assert set(TWINS) <= set(CLASSES)


# ---------------------------------------------------------------------- O2 known optima
OPTIMA = [
    lambda params: RiemannianSGD(params, lr=0.1, momentum=0.5),
    lambda params: RiemannianAdam(params, lr=0.1),
    lambda params: RiemannianRMSprop(params, lr=0.02, momentum=0.5),
    lambda params: riemannian(torch.optim.RMSprop(params, lr=0.05)),
]
both = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
every = pytest.mark.parametrize("factory", OPTIMA, ids=["SGD", "Adam", "RMSprop", "wrapped RMSprop"])


def minimize(factory, manifold, x, cost, steps=600):
    p = nn.Parameter(x.clone())
    optimizer = factory([{"params": [p], "manifold": manifold}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1e-4 ** max(0, 2 * t / steps - 1))
    for _ in range(steps):
        optimizer.zero_grad()
        value = cost(p)
        value.backward()
        optimizer.step()
        scheduler.step()
    assert manifold.residual(p.detach()) < 1e-12
    return cost(p.detach()).item()


def hermitian(spectrum, dtype):
    """A dense matrix with these eigenvalues."""
    q = Unitary().random(len(spectrum), len(spectrum), dtype=dtype)
    return q @ torch.diag(torch.tensor(spectrum, dtype=dtype)) @ q.mH


@both
@every
def test_rayleigh_quotient(factory, dtype):
    """min xᴴAx on the sphere is the least eigenvalue."""
    a = hermitian([-1.0, 0.5, 1.0, 2.0, 2.5], dtype)
    x = Sphere().random(5, dtype=dtype)
    found = minimize(factory, Sphere(), x, lambda x: (x.conj() * (a @ x)).sum().real)
    assert math.isclose(found, -1.0, abs_tol=1e-5)


@both
@every
def test_brockett_cost(factory, dtype):
    """min tr(XᴴAXN) on Stiefel with N = diag(3, 2, 1) is 3λ₁ + 2λ₂ + λ₃ for eigenvalues in ascending order."""
    a = hermitian([-1.0, 0.0, 0.5, 2.0, 2.5], dtype)
    n = torch.tensor([3.0, 2.0, 1.0], dtype=dtype)
    x = Stiefel().random(5, 3, dtype=dtype)
    found = minimize(factory, Stiefel(), x, lambda x: (x.conj() * (a @ x) * n).sum().real)
    assert math.isclose(found, -2.5, abs_tol=1e-3)


@both
@every
def test_procrustes(factory, dtype):
    """min ‖XB − C‖² over orthogonal or unitary X: the singular values of CBᴴ give the value at its polar factor."""
    b, c = torch.randn(2, 4, 7, dtype=dtype)
    u, s, vh = torch.linalg.svd(c @ b.mH)
    x = u @ vh
    if not dtype.is_complex:  # start in the component of the optimum: a reflection cannot be reached from a rotation
        x = x @ torch.linalg.matrix_exp(torch.triu(torch.ones(4, 4, dtype=dtype), 1) - torch.ones(4, 4).tril(-1))
    else:
        x = Unitary().random(4, 4, dtype=dtype)
    best = (b.abs().square().sum() + c.abs().square().sum() - 2 * s.sum()).item()
    found = minimize(factory, Unitary(), x, lambda x: (x @ b - c).abs().square().sum())
    assert math.isclose(found, best, rel_tol=1e-4)


@both
@every
def test_frechet_mean_of_definite_matrices(factory, dtype):
    """The mean of commuting matrices is exp of the mean of their logarithms."""
    q = Unitary().random(3, 3, dtype=dtype)
    logs = torch.randn(4, 3, dtype=torch.float64) / 2
    points = (q * logs.exp()[:, None].to(dtype)) @ q.mH
    mean = (q * logs.mean(0).exp().to(dtype)) @ q.mH

    def cost(x):
        return SPD().dist(x, points).square().mean()

    found = minimize(factory, SPD(), torch.eye(3, dtype=dtype), cost, steps=300)
    assert math.isclose(found, cost(mean).item(), rel_tol=1e-6)


# ---------------------------------------------------------------------- O8 loud errors
@pytest.mark.parametrize("kind", CLASSES)
def test_a_plain_parameter_in_a_list_is_an_error(kind):
    good = ManifoldParameter(Stiefel(), (4, 2))
    for params in ([nn.Parameter(torch.randn(4, 2))], [good, nn.Parameter(torch.randn(3))]):
        with pytest.raises(TypeError, match=r"has no manifold.*param_groups\(model\)"):
            kind(params)
    kind([good])
