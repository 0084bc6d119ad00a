"""Small healthy manifolds, optimizers and solvers, and broken ones: each must be refused by the law of its fault.

``MANIFOLDS``, ``OPTIMIZERS`` and ``SOLVERS`` map a healthy class to its faulty subclasses; ``law`` of a faulty class is
the law that must refuse it. Concrete classes are subclassed here and nowhere else: a fault is the difference to the
healthy class.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim import (
    POGO,
    Landing,
    RiemannianAdagrad,
    RiemannianASA,
    RiemannianMatrixAdam,
    RiemannianMuon,
)
from manopt_torch.solvers import Problem, Solver, State
from manopt_torch.solvers.problem import combine


def gaussian(shape: tuple[int, ...], dtype: Any, device: Any, generator: Any) -> Tensor:
    """A standard normal tensor; half precision rounded from single."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return torch.randn(shape, dtype=wide, device=device, generator=generator)


def keep(x: Tensor, u: Tensor, y: Tensor, event_dim: int) -> Tensor:
    """y, but x where u is zero, bit for bit; derivatives are those of y."""
    zero = (u == 0).flatten(-event_dim).all(-1).reshape(u.shape[: u.ndim - event_dim] + (1,) * event_dim)
    return torch.where(zero, x.detach() + (y - y.detach()), y)


# ====================================================================== healthy manifolds
@dataclass(frozen=True)
class Frames(Manifold):
    """Matrices with orthonormal columns: Euclidean metric, QR retraction."""

    event_dim = 2
    event_shapes = ((4, 2), (3, 3))
    constant_norm = True

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        a = x.mH @ v
        return v - x @ (a + a.mH) / 2

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return keep(x, u, _qr(x + u), 2)

    def residual(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(x.mH @ x - torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        q = _qr(gaussian(shape, dtype, device, generator))
        return q if dtype is None else q.to(dtype)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        w = u @ x.mH
        return _expm(w - w.mH) @ x @ _expm(-x.mH @ u)

    def nearest(self, z: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(z, full_matrices=False)
        return u @ vh


def _expm(a: Tensor) -> Tensor:
    """torch's exponential of two copies: of a single matrix it is good to 1e-10 only (torch 2.13)."""
    return torch.linalg.matrix_exp(torch.stack([a, a]))[0]


def _qr(a: Tensor) -> Tensor:
    """The Q factor for which R has a positive diagonal."""
    q, r = torch.linalg.qr(a)
    d = r.diagonal(dim1=-2, dim2=-1).detach()
    return q * (d / d.abs())[..., None, :]


@dataclass(frozen=True)
class Ball(Manifold):
    """The unit sphere: retraction by normalising, exact exp, log and dist, parallel transport left to others."""

    event_dim = 1
    event_shapes = ((4,), (3,))
    constant_norm = True
    second_order = True

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - x * self._dot(x, v)

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.conj() * b).sum(-1, keepdim=True).real

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        y = x + u
        return keep(x, u, y / self._dot(y, y).sqrt(), 1)

    def residual(self, x: Tensor) -> Tensor:
        return (self._dot(x, x)[..., 0] - 1).abs()

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        x = gaussian(shape, dtype, device, generator)
        x = x / self._dot(x, x).sqrt()
        return x if dtype is None else x.to(dtype)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        length = self.norm(x, u)[..., None]
        return x * length.cos() + u * torch.sinc(length / torch.pi)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        chord, v = self._chord(x, y), self.project(x, y - x)
        angle = 2 * chord.asin()
        return v / torch.sinc(angle / torch.pi)

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * self._chord(x, y)[..., 0].asin()

    def _chord(self, x: Tensor, y: Tensor) -> Tensor:
        square = self._dot(y - x, y - x)
        positive = square > 0
        return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0) / 2

    def nearest(self, z: Tensor) -> Tensor:
        return z / self._dot(z, z).sqrt()


@dataclass(frozen=True)
class Positive(Manifold):
    """Positive numbers with the metric uv/x²: real only, not compact, not the ambient metric, parallel transport."""

    event_dim = 0
    event_shapes = ((),)
    second_order = True
    isometric = True

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v.expand(torch.broadcast_shapes(x.shape, v.shape))

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return x * x * g

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return u * v / (x * x)

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return x * (u / x).exp()

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        y = self.retract(x, u)
        return (y, *(v * y / x for v in vs))

    def residual(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, 0.0, torch.inf).to(x.dtype)

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        x = gaussian(shape, dtype, device, generator).exp()
        return x if dtype is None else x.to(dtype)

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self.retract(x, u)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return x * (y / x).log()

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return (y / x).log().abs()


# ====================================================================== faulty manifolds
@dataclass(frozen=True)
class RandomOffManifold(Frames):
    law = "M1 random points lie on the manifold"

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        return 1.001 * super().random(*shape, dtype=dtype, device=device, generator=generator)


@dataclass(frozen=True)
class RandomIgnoresGenerator(Frames):
    law = "M1 random obeys its generator"

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        return super().random(*shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class RandomIsConstant(Frames):
    law = "M1 random obeys its generator"

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        return super().random(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class RandomIgnoresDtype(Frames):
    law = "M1 random gives the shape, dtype and device asked for"

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        return super().random(*shape, dtype=dtype or torch.float64, device=device, generator=generator)


@dataclass(frozen=True)
class RandomBatchRepeats(Ball):
    """One draw for the whole batch."""

    law = "M1 random points of a batch are independent"

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        x = super().random(shape[-1], dtype=dtype, device=device, generator=generator)
        return x.expand(shape).contiguous()


@dataclass(frozen=True)
class ResidualAlwaysZero(Frames):
    law = "M1 residual grows off the manifold and only there"

    def residual(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[:-2], dtype=x.dtype.to_real())


@dataclass(frozen=True)
class TangentSpaceTooSmall(Frames):
    """An orthogonal projection, but on the horizontal space of the Grassmannian."""

    law = "M1 residual grows off the manifold and only there"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - x @ (x.mH @ v)


@dataclass(frozen=True)
class ProjectTwiceTheNormal(Frames):
    """geoopt's canonical Stiefel: V - X Vᴴ X for a projection."""

    law = "M2 project is idempotent"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return v - x @ (v.mH @ x)


@dataclass(frozen=True)
class ConjugateDropped(Frames):
    """.mT where .mH is meant: right for real matrices."""

    law = "M2 project is idempotent"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        a = x.mT @ v
        return v - x @ (a + a.mT) / 2


@dataclass(frozen=True)
class ObliqueProjection(Ball):
    """A projection on the tangent space, along a direction that is not normal."""

    law = "M2 project is self-adjoint"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        along = x + torch.roll(x, 1, -1) / 4
        return v - along * self._dot(x, v) / self._dot(x, along)


@dataclass(frozen=True)
class ProjectNormalises(Ball):
    law = "M2 project is real-linear"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        v = super().project(x, v)
        return v / self._dot(v, v).sqrt().clamp(min=1)


@dataclass(frozen=True)
class DimCountsComplexAsOne(Frames):
    law = "M2 dim is the trace of the projection"

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        return super().dim(*shape, dtype=torch.float64)


@dataclass(frozen=True)
class ConstantNormDenied(Frames):
    law = "M2 constant_norm is told truthfully"
    constant_norm = False


@dataclass(frozen=True)
class ConstantNormClaimed(Positive):
    law = "M2 constant_norm is told truthfully"
    constant_norm = True


@dataclass(frozen=True)
class FactorTwo(Frames):
    law = "M3 rgrad represents the differential"

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return 2 * self.project(x, g)


@dataclass(frozen=True)
class GradientOfOtherMetric(Frames):
    """The gradient of the canonical metric, sold with the Euclidean one."""

    law = "M3 rgrad represents the differential"

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return g - x @ (g.mH @ x)


@dataclass(frozen=True)
class GradientNotTangent(Frames):
    law = "M3 rgrad is tangent"

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return g


@dataclass(frozen=True)
class InnerIsComplex(Frames):
    law = "M3 inner is a real inner product"

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (u.conj() * v).sum((-2, -1))


@dataclass(frozen=True)
class InnerNotSymmetric(Ball):
    law = "M3 inner is a real inner product"

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return super().inner(x, u, v) + super().inner(x, u[..., :1], v[..., 1:2]) / 4


@dataclass(frozen=True)
class QRWithoutSigns(Frames):
    """The Q that LAPACK returns: columns change sign."""

    law = "M4 a zero step keeps the bits"

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.linalg.qr(x + u)[0]


@dataclass(frozen=True)
class ZeroStepRounds(Ball):
    law = "M4 a zero step keeps the bits"

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        y = x + u
        return y / self._dot(y, y).sqrt()


@dataclass(frozen=True)
class HalfStep(Ball):
    law = "M4 the derivative of retract at zero is the identity"

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return super().retract(x, u / 2)


@dataclass(frozen=True)
class EuclideanStep(Frames):
    law = "M4 retract stays on the manifold"

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u


@dataclass(frozen=True)
class FirstOrderSoldAsSecond(Frames):
    law = "M5 retract follows the geodesic to its order"
    second_order = True


@dataclass(frozen=True)
class ExpIsRetraction(Frames):
    law = "M5 exp runs at constant speed and continues itself"

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return self.retract(x, u)


@dataclass(frozen=True)
class ExpOfOtherMetric(Frames):
    """The geodesic of the canonical metric: of constant speed in both metrics."""

    law = "M5 exp has no tangential acceleration"

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        w = u @ x.mH - x @ (u.mH @ x) @ x.mH / 2
        return _expm(w - w.mH) @ x


@dataclass(frozen=True)
class CanonicalWithEuclideanExp(Frames):
    """The canonical metric, with the geodesic of the Euclidean one: of constant speed in both metrics too."""

    law = "M5 exp makes the energy stationary"

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return super().inner(x, u, v) - super().inner(x, u, x @ (x.mH @ v)) / 2

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return g - x @ (g.mH @ x)


@dataclass(frozen=True)
class MoveGoesElsewhere(Ball):
    law = "M6 move goes where retract goes"

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        y = keep(x, u, self.exp(x, u), 1)
        return (y, *(self.project(y, v) for v in vs))


@dataclass(frozen=True)
class MoveForgetsToCarry(Frames):
    law = "M6 carried vectors are tangent"

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        return (self.retract(x, u), *vs)


@dataclass(frozen=True)
class MoveKeepsLength(Frames):
    """Projected and rescaled to the old length, which is not linear."""

    law = "M6 move carries linearly, and by zero not at all"

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        y, *carried = super().move(x, u, *vs)
        return (y, *(self.scale(self.norm(x, v) / self.norm(y, c), c) for v, c in zip(vs, carried, strict=True)))


@dataclass(frozen=True)
class ProjectionSoldAsIsometry(Frames):
    law = "M6 isometric is told truthfully"
    isometric = True


@dataclass(frozen=True)
class BatchMixedUp(Ball):
    """Normalised by the length of the whole batch."""

    law = "M7 a batch is its points"

    def nearest(self, z: Tensor) -> Tensor:
        return z / z.norm() * max(1, z[..., 0].numel()) ** 0.5


@dataclass(frozen=True)
class TakesOneBatchDimension(Ball):
    law = "M7 a batch is its points"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        dot = torch.einsum("...i,...i->...", x.conj(), v).real
        return v - x * (dot[:, None] if dot.ndim == 1 else dot.mean() if dot.ndim == 0 else dot.mean(0)[..., None])


@dataclass(frozen=True)
class BranchesOnValues(Ball):
    """Python control flow on a tensor's value: cannot be mapped."""

    law = "M7 vmap is a batch"

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        return x.expand_as(u).clone() if not u.abs().max() > 0 else super().exp(x, u)


@dataclass(frozen=True)
class DoesNotBroadcast(Frames):
    law = "M7 arguments broadcast"

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        q, r = torch.linalg.qr(torch.cat([x, u], -1) @ torch.cat([torch.eye(x.shape[-1], dtype=x.dtype)] * 2))
        d = r.diagonal(dim1=-2, dim2=-1).detach()
        return keep(x, u, q * (d / d.abs())[..., None, :], 2)


@dataclass(frozen=True)
class FailsOnEmptyBatch(Frames):
    law = "M7 an empty batch is empty"

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        if not x.numel():
            raise RuntimeError("max of an empty tensor")
        return super().project(x, v)


@dataclass(frozen=True)
class NeedsContiguousMemory(Frames):
    law = "M7 memory layout does not matter"

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return self.project(x, g.view(-1).view(g.shape))


@dataclass(frozen=True)
class WritesToItsArgument(Ball):
    law = "M7 memory layout does not matter"

    def nearest(self, z: Tensor) -> Tensor:
        return z.div_(self._dot(z, z).sqrt())


@dataclass(frozen=True)
class RealIsNotEmbedded(Ball):
    """The complex sphere of radius one in each part: real points with zero imaginary parts are moved elsewhere."""

    law = "M8 real points are complex points"

    def nearest(self, z: Tensor) -> Tensor:
        return super().nearest(z * (1 + 1j) if z.is_complex() else z)


@dataclass(frozen=True)
class ComplexIsReal(Frames):
    """Complex tensors whose imaginary parts are zero: all other laws see only real numbers."""

    law = "M8 complex points have dense imaginary parts"

    def random(self, *shape: int, dtype: Any = None, device: Any = None, generator: Any = None) -> Tensor:
        real = super().random(*shape, dtype=dtype.to_real() if dtype else None, device=device, generator=generator)
        return real if dtype is None else real.to(dtype)


@dataclass(frozen=True, eq=False)
class EqualByIdentity(Frames):
    law = "M9 equality is by value"
    power: int = 1

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Mutable(Frames):
    law = "M9 a manifold is immutable"

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, repr=False)
class ReprHidesOptions(Frames):
    law = "M9 repr is the code that builds it"
    power: int = 1

    def __repr__(self) -> str:
        return "ReprHidesOptions()"


@dataclass(frozen=True)
class PicklesToDefaults(Frames):
    law = "M9 pickle and deepcopy give an equal manifold"
    power: int = 1

    def __reduce__(self) -> Any:
        return PicklesToDefaults, ()


@dataclass(frozen=True)
class GradientByHandIsWrong(Ball):
    """A gradient that is right at first order only near the equator: scaled where the first entry is large."""

    law = "M10 Taylor series along retract"

    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        return super().rgrad(x, g) * (1 + 1e-3 * x[..., :1].abs())


@dataclass(frozen=True)
class BendsTheOtherWay(Ball):
    """The second derivative of the retraction with the sign of −x‖u‖² forgotten."""

    law = "M10 weingarten is the second derivative of retract"

    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        return (x * g).sum(-1, keepdim=True) * u


@dataclass(frozen=True)
class LogWithWrongSign(Ball):
    law = "M11 log inverts exp"

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return -super().log(x, y)


@dataclass(frozen=True)
class DistByArccos(Ball):
    """acos of a clamped product: the distance of close points is lost in single precision."""

    law = "M11 dist is the length of the geodesic"

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return self._dot(x, y)[..., 0].clamp(-1 + 1e-4, 1 - 1e-4).acos()


@dataclass(frozen=True)
class DistNotSymmetric(Positive):
    law = "M11 dist is the length of the geodesic"

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return super().dist(x, y) * (1 + x / 100)


@dataclass(frozen=True)
class DistGradientNaN(Ball):
    """sqrt at zero: 0 · inf."""

    law = "M11 log and dist are differentiable where points coincide"

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * (self._dot(y - x, y - x).sqrt() / 2)[..., 0].asin()


@dataclass(frozen=True)
class DistPartlyDetached(Ball):
    """The value is right, half of its derivative is lost."""

    law = "M11 the gradient of half the squared distance is −log"

    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        d = super().dist(x, y)
        return (d + d.detach()) / 2


@dataclass(frozen=True)
class NearestByQR(Frames):
    """A point near by, not the nearest."""

    law = "M11 nearest is the nearest point"

    def nearest(self, z: Tensor) -> Tensor:
        return _qr(z)


@dataclass(frozen=True)
class DetachedStep(Ball):
    """The length is taken out of the graph."""

    law = "M12 derivatives of retract and move"

    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        y = x + u
        return keep(x, u, y / self._dot(y, y).sqrt().detach(), 1)


@dataclass(frozen=True)
class CarriedDetached(Ball):
    law = "M12 derivatives of retract and move"

    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        y = self.retract(x, u)
        return (y, *(self.project(y.detach(), v) for v in vs))


@dataclass(frozen=True)
class AutocastDecides(Frames):
    """The protocol's guard undone: under autocast the product is taken in half precision."""

    law = "M13 half precision is single precision rounded once"


AutocastDecides.project = Frames.__dict__["project"].__wrapped__  # type: ignore[method-assign]


# ====================================================================== healthy optimizers
class Descent(torch.optim.Optimizer):
    """Gradient descent with momentum 0.9, one parameter after the other; all are computed before any is written."""

    tangent_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(self, params: Any, lr: float = 0.05, maximize: bool = False) -> None:
        super().__init__(params, {"lr": lr, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        live = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        moved = [self.moved(group, p) for group, p in live]
        for (_, p), (y, state) in zip(live, moved, strict=True):
            p.copy_(y)
            self.state[p].update(state)
        return loss

    def moved(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        M, g = group["manifold"], p.grad
        r = M.rgrad(p, -g if group["maximize"] else g)
        buffer = self.momentum(M, p, r, self.state[p])
        y, buffer = self.carry(M, p, -group["lr"] * buffer, buffer)
        return y, {"momentum_buffer": buffer}

    def momentum(self, M: Manifold, p: Tensor, r: Tensor, state: dict[str, Tensor]) -> Tensor:
        return 0.9 * state["momentum_buffer"] + r if state else r

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        return M.move(p, u, buffer)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        groups = [{k: repr(v) if k == "manifold" else v for k, v in g.items()} for g in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        manifolds = [group["manifold"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, manifold in zip(self.param_groups, manifolds, strict=True):
            group["manifold"] = manifold


class Adaptive(Descent):
    """Adam with one second moment per point."""

    def moved(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        M, g, s = group["manifold"], p.grad, self.state[p]
        r = M.rgrad(p, -g if group["maximize"] else g)
        count = s.get("step", torch.zeros(())) + 1
        t = count.item()
        m = 0.9 * s["momentum_buffer"] + 0.1 * r if s else 0.1 * r
        v = 0.99 * s["second"] + 0.01 * self.square(M, p, r) if s else 0.01 * self.square(M, p, r)
        root = (v / (1 - 0.99**t)).sqrt() + 1e-8
        direction = M.project(p, m / root) if root.shape == m.shape else M.scale(1 / root, m)
        y, m = self.carry(M, p, -group["lr"] / (1 - 0.9**t) * direction, m)
        return y, {"step": count, "momentum_buffer": m, "second": v}

    def square(self, M: Manifold, p: Tensor, r: Tensor) -> Tensor:
        return M.inner(p, r, r)


# ====================================================================== faulty optimizers
class LeavesManifold(Descent):
    law = "O1 points stay on the manifold and momentum stays tangent"

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        return p + u, M.project(p + u, buffer)


class UntransportedMomentum(Descent):
    law = "O1 points stay on the manifold and momentum stays tangent"

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        return M.retract(p, u), buffer


class StopsShort(Descent):
    """A step that is lengthened to a minimum: circles around the optimum."""

    law = "O2 the nearest point is found"

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        length = M.norm(p, u)
        return super().carry(M, p, M.scale((0.1 / length.clamp(min=1e-9)).clamp(min=1), u), buffer)


class Ascends(Descent):
    law = "O2 the Fréchet mean is found"

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        return super().carry(M, p, -u, buffer)


class BucketOrderMixed(Descent):
    """Same-shape parameters are stacked, and handed back in reverse."""

    law = "O3 many parameters at once are each on its own"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for shape in {p.shape for p in group["params"]}:
                params = [p for p in group["params"] if p.shape == shape and p.grad is not None]
                moved = [self.moved(group, p) for p in params]
                for p, (y, state) in zip(params, reversed(moved), strict=True):
                    p.copy_(y)
                    self.state[p].update(state)


class FirstStepDamped(Descent):
    """Momentum that starts from (1 − μ) r, where torch's starts from r."""

    law = "O4 on Euclidean() it is its torch twin"

    def momentum(self, M: Manifold, p: Tensor, r: Tensor, state: dict[str, Tensor]) -> Tensor:
        return super().momentum(M, p, r, state) if state else 0.1 * r


class DampedLater(Descent):
    """The momentum is damped once more."""

    law = "O5 it is the wrapped optimizer"

    def momentum(self, M: Manifold, p: Tensor, r: Tensor, state: dict[str, Tensor]) -> Tensor:
        return 0.9 * super().momentum(M, p, r, state) + 0.1 * r


class ElementwiseSecondMoment(Adaptive):
    """Coordinates of the embedding decide: sold without saying so."""

    law = "O6 an isometry maps iterates to iterates"

    def square(self, M: Manifold, p: Tensor, r: Tensor) -> Tensor:
        return r.abs().square()


class StepCountNotSaved(Adaptive):
    law = "O7 training resumes bit for bit"

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        state = {k: {**s, "step": torch.zeros(())} if s else s for k, s in saved["state"].items()}
        return {**saved, "state": state}


class SavesTheManifold(Descent):
    """An object in the state dict: not loadable with weights_only."""

    law = "O7 training resumes bit for bit"

    def state_dict(self) -> dict[str, Any]:
        return torch.optim.Optimizer.state_dict(self)


class AddsDecayToGradient(Descent):
    """geoopt's: p.grad is written to in a step."""

    law = "O8 gradients are left untouched"

    def moved(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        p.grad.add_(p, alpha=0.1)  # type: ignore[union-attr]
        return super().moved(group, p)


class NoneCrashes(Descent):
    law = "O8 parameters without gradient are skipped"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(1)
        return super().step(closure)


class NoneIsZero(Descent):
    """Momentum moves a parameter that has no gradient."""

    law = "O8 parameters without gradient are skipped"

    def step(self, closure: Any = None) -> Any:
        missing = [p for group in self.param_groups for p in group["params"] if p.grad is None and self.state[p]]
        for p in missing:
            p.grad = torch.zeros_like(p)
        loss = super().step(closure)
        for p in missing:
            p.grad = None
        return loss


class AlwaysStabilizes(Descent):
    law = "O8 a zero step keeps the bits"

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        y, buffer = M.move(p, u, buffer)
        return M.nearest(y), buffer


class ClosureWithoutGrad(Descent):
    law = "O8 a closure sees gradients enabled"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        return loss


class LossSwallowed(Descent):
    law = "O8 a closure sees gradients enabled"

    def step(self, closure: Any = None) -> Any:
        super().step(closure)


class WritesAsItGoes(Descent):
    """A step that raises has moved the parameters before."""

    law = "O8 a step that raises changes nothing"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    y, state = self.moved(group, p)
                    p.copy_(y)
                    self.state[p].update(state)
        return loss


class HoldsALambda(Descent):
    law = "O9 deep copies and pickles continue alike"

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.defaults["schedule"] = lambda t: t


class CopyForgetsMomentum(Descent):
    law = "O9 deep copies and pickles continue alike"

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "state": type(self.state)(dict)}


class LearningRateCached(Descent):
    law = "O9 learning rate schedulers act"

    def moved(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return super().moved({**group, "lr": self.defaults["lr"]}, p)


class StepsOnInfinity(Descent):
    """Declares that it handles the scale itself, and does not."""

    law = "O9 GradScaler works"
    _step_supports_amp_scaling = True


class FirstGroupOnly(Descent):
    law = "O9 add_param_group adds"

    def step(self, closure: Any = None) -> Any:
        groups, self.param_groups = self.param_groups, self.param_groups[:1]
        loss = super().step(closure)
        self.param_groups = groups
        return loss


class MaximizeIgnored(Descent):
    law = "O9 maximize ascends"

    def moved(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return super().moved({**group, "maximize": False}, p)


class SkipsRetraction(Descent):
    """Believes after 400 steps (of three parameters) that short steps need no retraction."""

    law = "O11 single precision does not drift"
    count = 0

    def carry(self, M: Manifold, p: Tensor, u: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        self.count += 1
        return (p + u, buffer) if self.count > 1200 else super().carry(M, p, u, buffer)


# ====================================================================== faulty native optimizers
class DecayedSum(RiemannianAdagrad):
    """The sum of squares forgets, as that of RMSprop."""

    law = "O4 on Euclidean() it is its torch twin"

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        if s:
            s["sum"] = 0.9 * s["sum"]
        return super().direction(M, x, r, s, group)


class WeightsOfTheBucket(RiemannianASA):
    """The step is scaled by the norm of the whole bucket."""

    law = "O3 many parameters at once are each on its own"

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        u = super().direction(M, x, r, s, group)
        return u / (1 + torch.linalg.vector_norm(u))


class DiagonalOfTheGram(RiemannianMatrixAdam):
    """Only the diagonal of the second moment is kept: columns of this basis decide."""

    law = "O6 an isometry maps iterates to iterates"

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        if s:
            s["exp_avg_gram"] = torch.diag_embed(s["exp_avg_gram"].diagonal(dim1=-2, dim2=-1))
        return super().direction(M, x, r, s, group)


class DiagonalOfTheDual(RiemannianMuon):
    """Only the diagonal of the dual variable is kept: columns of this basis decide."""

    law = "O6 an isometry maps iterates to iterates"

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        if s:
            s["dual"] = torch.diag_embed(s["dual"].diagonal(dim1=-2, dim2=-1))
        return super().direction(M, x, r, s, group)


class StepOfTheBucket(Landing):
    """The step of one point depends on the others of its bucket."""

    law = "O3 many parameters at once are each on its own"

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        u = super().direction(M, x, r, s, group)
        return u / (1 + torch.linalg.vector_norm(u))


class SkewOfThisBasis(POGO):
    """The first row of a step is forgotten."""

    law = "O6 an isometry maps iterates to iterates"

    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        u = super().direction(M, x, r, s, group).clone()
        u[..., 0, :] = 0
        return u


NATIVE = (DecayedSum, WeightsOfTheBucket, DiagonalOfTheGram, DiagonalOfTheDual, StepOfTheBucket, SkewOfThisBasis)


# ====================================================================== healthy solvers
@dataclass(frozen=True)
class DirectionState(State):
    d: tuple[Tensor, ...]


@dataclass(frozen=True)
class Conjugate(Solver):
    """Conjugate gradients of Polak and Ribière: steps are halved from 1 until the cost falls enough."""

    def init(self, problem: Problem, x: Any) -> DirectionState:
        state = super().init(problem, x)
        return DirectionState(state.x, state.f, state.g, state.norm, combine((-1.0, state.g)))

    def step(self, problem: Problem, state: Any) -> Any:
        for d in (state.d, combine((-1.0, state.g))):
            slope = self.dot(problem, state.x, state.g, d)
            t = 1.0
            while slope < 0 and t > 1e-9:
                u = combine((t, d))
                y = self.retract(problem, state.x, u)
                f, g = self.evaluate(problem, y)
                if self.accept(f - state.f, t * slope):
                    return self.arrived(problem, state, u, d, y, f, g)
                t /= 2
        return dataclasses.replace(state, halted="no lower cost was found")

    def dot(self, problem: Problem, x: Any, u: Any, v: Any) -> float:
        return problem.manifold.inner(x, u, v).item()

    def retract(self, problem: Problem, x: Any, u: Any) -> Any:
        return problem.manifold.retract(x, u)

    def evaluate(self, problem: Problem, y: Any) -> Any:
        return problem.gradient(y)

    def accept(self, change: float, expected: float) -> bool:
        return change <= 0.1 * expected

    def carry(self, problem: Problem, x: Any, u: Any, *vs: Any) -> Any:
        return problem.manifold.move(x, u, *vs)[1:]

    def arrived(self, problem: Problem, state: Any, u: Any, d: Any, y: Any, f: float, g: Any) -> Any:
        d, old = self.carry(problem, state.x, u, d, state.g)
        beta = max(0.0, self.dot(problem, y, g, combine((1.0, g), (-1.0, old))) / state.norm**2)
        return DirectionState(y, f, g, problem.manifold.norm(y, g).item(), combine((-1.0, g), (beta, d)))


# ---------------------------------------------------------------------- solvers with a fault
class AddsTheStep(Conjugate):
    law = "S1 points stay on the manifold, in their dtype"

    def retract(self, problem: Problem, x: Any, u: Any) -> Any:
        return combine((1.0, x), (1.0, u))


class ComputesInDouble(Conjugate):
    law = "S1 points stay on the manifold, in their dtype"

    def retract(self, problem: Problem, x: Any, u: Any) -> Any:
        wide = [tuple(t.to(torch.promote_types(t.dtype, torch.float64)) for t in part) for part in (x, u)]
        return problem.manifold.retract(*wide)


class AcceptsAnything(Conjugate):
    """A wrong sign of β, and no search that would notice."""

    law = "S2 the cost never rises"

    def accept(self, change: float, expected: float) -> bool:
        return True

    def arrived(self, problem: Problem, state: Any, *where: Any) -> Any:
        return super().arrived(problem, dataclasses.replace(state, d=combine((-1.0, state.d))), *where)


class OldGradient(Conjugate):
    """The gradient of the point before."""

    law = "S3 a state says what is at its point"

    def arrived(self, problem: Problem, state: Any, u: Any, d: Any, y: Any, f: float, g: Any) -> Any:
        (old,) = self.carry(problem, state.x, u, state.g)
        return dataclasses.replace(super().arrived(problem, state, u, d, y, f, g), g=old)


class NormOfEntries(Conjugate):
    """The norm of the gradient is its largest entry."""

    law = "S3 a state says what is at its point"

    def arrived(self, *where: Any) -> Any:
        state = super().arrived(*where)
        return dataclasses.replace(state, norm=max(t.abs().max().item() for t in state.g))


class ForgetsToCarry(Conjugate):
    law = "S4 what is remembered is tangent"

    def carry(self, problem: Problem, x: Any, u: Any, *vs: Any) -> Any:
        return vs


class CountsTheStart(Conjugate):
    """Only the start is counted."""

    law = "S5 evaluations are counted"

    def evaluate(self, problem: Problem, y: Any) -> Any:
        before = problem.nfev, problem.njev
        found = problem.gradient(y)
        problem.nfev, problem.njev = before
        return found


class EvaluatesTwice(Conjugate):
    """The gradient of the accepted point is computed again, behind the back of the problem."""

    law = "S5 evaluations are counted"

    def arrived(self, problem: Problem, state: Any, u: Any, d: Any, y: Any, f: float, g: Any) -> Any:
        counts = problem.nfev, problem.njev
        f, g = problem.gradient(y)
        problem.nfev, problem.njev = counts
        return super().arrived(problem, state, u, d, y, f, g)


class GivesUp(Conjugate):
    """Halts when a step gains little."""

    law = "S6 the optimum is found"

    def arrived(self, problem: Problem, state: Any, *where: Any) -> Any:
        end = super().arrived(problem, state, *where)
        return dataclasses.replace(end, halted="little was gained") if end.f > state.f - 1e-6 else end


class ShakesTheStart(Conjugate):
    """A small step away from the start, lest it be a saddle."""

    law = "S7 a critical start is kept"

    def init(self, problem: Problem, x: Any) -> DirectionState:
        shaken = tuple(t + 1e-3 for t in x)
        return super().init(problem, problem.manifold.retract(x, problem.manifold.project(x, shaken)))


class NormalizesTheGradient(Conjugate):
    """pymanopt's: the first direction is −g/‖g‖ though g is zero; and the start is moved along it."""

    law = "S7 a critical start is kept"

    def init(self, problem: Problem, x: Any) -> DirectionState:
        state = super().init(problem, x)
        return super().init(problem, self.retract(problem, x, combine((-1e-6 / torch.tensor(state.norm), state.g))))


class LeavesMinima(Conjugate):
    """A small step from where the gradient is zero, lest it be a saddle; the cost there is not asked for."""

    law = "S7 a critical start is kept"

    def escape(self, problem: Problem, state: Any) -> Any:
        shaken = problem.manifold.project(state.x, tuple(1e-3 * torch.ones_like(t) for t in state.x))
        return self.init(problem, self.retract(problem, state.x, shaken))


class CountsProductsThatNobodyAsked(Conjugate):
    """Products of the Hessian are counted where gradients are computed."""

    law = "S5 evaluations are counted"

    def evaluate(self, problem: Problem, y: Any) -> Any:
        problem.nhev += 1
        return super().evaluate(problem, y)


class RemembersTheLastRun(Conjugate):
    """The number of steps so far decides how much decrease is enough."""

    law = "S8 a run leaves nothing behind"
    accepted: ClassVar[list[float]] = []

    def retract(self, problem: Problem, x: Any, u: Any) -> Any:
        self.accepted.append(1.0)
        return super().retract(problem, x, combine((1 + 1e-3 * len(self.accepted) ** -0.5, u)))


class Entrywise(Conjugate):
    """The step is rescaled entry by entry."""

    law = "S9 an isometry maps iterates to iterates"

    def arrived(self, problem: Problem, *where: Any) -> Any:
        state = super().arrived(problem, *where)
        scaled = tuple(-t / (t.abs() + state.norm).sqrt() for t in state.g)
        return dataclasses.replace(state, d=problem.manifold.project(state.x, scaled))


class AcceptsNaN(Conjugate):
    """NaN compares as false."""

    law = "S10 where the cost is not a number is not entered"

    def accept(self, change: float, expected: float) -> bool:
        return not change > 0.1 * expected


def build(kind: type) -> Any:
    """A manifold of this class, its option away from the default if it has one."""
    return kind(*(2 for _ in dataclasses.fields(kind)))


def faulty(healthy: type) -> list[type]:
    """The faulty classes derived from ``healthy``: those that name the ``law`` that must refuse them."""
    return [kind for kind in healthy.__subclasses__() if hasattr(kind, "law")]


MANIFOLDS = {Frames: faulty(Frames), Ball: faulty(Ball), Positive: faulty(Positive)}
OPTIMIZERS = {Descent: faulty(Descent), Adaptive: faulty(Adaptive)}
SOLVERS = {Conjugate: faulty(Conjugate)}
