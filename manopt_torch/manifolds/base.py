"""The protocol that every manifold fulfils, and the notation used throughout the library.

Notation
--------
``x, y`` points; ``u, v`` tangent vectors at ``x``; ``g`` an ambient gradient; ``S`` the event shape (the shape of one
point) and ``event_dim = len(S)``; ``*B`` any leading batch; ``(*B, *S)`` the shape of a batch of points. Every function
is batched over ``*B`` and broadcasts its arguments. ``mH`` is the conjugate transpose, ``herm(A) = (A + Aᴴ)/2``.

``⟨a, b⟩ = Re Σ conj(a)·b``. torch's gradient ``g`` of a real loss with respect to a complex tensor is
``∂f/∂Re x + i ∂f/∂Im x``, exactly the ``g`` with ``df = ⟨g, dx⟩``: real and complex tensors share every line.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import typing
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from manopt_torch.precision import full_precision

# fmt: off
_GEOMETRY = (
    "project", "retract", "residual", "rgrad", "inner", "norm", "move", "nearest", "exp", "log", "dist",
    "weingarten",
)
# fmt: on


class Manifold(abc.ABC):
    """An immutable, size-free description of a set of tensors, with the batched functions an optimizer needs.

    A subclass is a ``@dataclass(frozen=True)``; equality, hash, pickle and a ``repr`` of the fields that are not at
    their defaults follow. It must
    write :meth:`project`, :meth:`retract`, :meth:`residual` and :meth:`random`; the other methods have defaults that
    are right for an embedded manifold with the ambient metric ``⟨u, v⟩``.

    Half-precision arguments are computed in float32 and rounded once at the end, and ``torch.autocast`` is switched
    off inside: this holds for every subclass, which writes its methods for float32 and above only.
    """

    #: every point has the same Euclidean norm, so that ``project(x, x) = 0`` and weight decay has no effect
    constant_norm: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Manifold.__repr__  # type: ignore[method-assign]  # dataclass keeps what it finds
        for name in _GEOMETRY:
            if name in cls.__dict__:
                setattr(cls, name, full_precision(cls.__dict__[name]))

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, f.name), hints[f.name]
            options = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            if (options and value not in options) or (hint is int and not (type(value) is int and value >= 0)):
                expected = f"one of {options}" if options else "an integer >= 0"
                raise ValueError(f"{f.name} of {type(self).__name__} must be {expected}, got {value!r}")

    def __repr__(self) -> str:
        shown = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    # ------------------------------------------------------------------ what the manifold says of itself
    @property
    @abc.abstractmethod
    def event_dim(self) -> int:
        """Number of dimensions of one point: 0 a number, 1 a vector, 2 a matrix."""

    @property
    @abc.abstractmethod
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Examples of event shapes, small ones; the conformance suite walks them."""

    @property
    def second_order(self) -> bool:
        """``retract`` agrees with the geodesic to second order: ‖R_x(tu) − exp_x(tu)‖ = O(t³)."""
        return False

    @property
    def isometric(self) -> bool:
        """``move`` carries vectors without changing their inner products."""
        return False

    @property
    def step_limit(self) -> float:
        """Largest ‖u‖_x for which ``retract(x, u)`` is on the manifold to working accuracy."""
        return math.inf

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ``ValueError``, saying what to write instead, if ``shape`` is not ``(*B, *S)`` for some S."""
        if len(shape) < self.event_dim:
            raise ValueError(f"{self!r} needs at least {self.event_dim} dimension(s), got shape {tuple(shape)}")
        if 0 in shape[len(shape) - self.event_dim :]:
            raise ValueError(f"{self!r} has no points without entries, got shape {tuple(shape)}")

    def dim(self, *shape: int, dtype: torch.dtype | None = None) -> int:
        """Real dimension of the manifold of tensors of shape ``(*B, *S)``; a complex ``dtype`` counts both parts,
        and None means real.

        The default is the trace of the tangent projection at a random point, in double precision.
        """
        self.check_shape(shape)
        wide = torch.complex128 if dtype is not None and dtype.is_complex else torch.float64
        batch, event = shape[: len(shape) - self.event_dim], shape[len(shape) - self.event_dim :]
        size = math.prod(event)
        x = self.random(*event, dtype=wide, generator=torch.Generator().manual_seed(0))
        basis = torch.eye(size, dtype=wide).reshape(size, *event)
        if wide.is_complex:
            basis = torch.cat([basis, 1j * basis])
        trace = (basis.conj() * self.project(x.expand_as(basis), basis)).real.sum()
        return math.prod(batch) * round(trace.item())

    # ------------------------------------------------------------------ must be written
    @abc.abstractmethod
    def project(self, x: Tensor, v: Tensor) -> Tensor:
        """Orthogonal projection (for ⟨·,·⟩) of an ambient ``v`` on the tangent space at ``x``: (*B,*S) -> (*B,*S)."""

    @abc.abstractmethod
    def retract(self, x: Tensor, u: Tensor) -> Tensor:
        """``R_x(u)``, a point, with R_x(0) = x bit for bit and DR_x(0) = id: (*B,*S) -> (*B,*S)."""

    @abc.abstractmethod
    def residual(self, x: Tensor) -> Tensor:
        """Distance from the manifold, 0 exactly on it, per point: (*B,*S) -> (*B,), real."""

    @abc.abstractmethod
    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Random points of shape ``(*B, *S)``, uniform (Haar) where the manifold is compact."""

    # ------------------------------------------------------------------ right for the ambient metric
    @full_precision
    def rgrad(self, x: Tensor, g: Tensor) -> Tensor:
        """Riemannian gradient: the tangent vector with ⟨rgrad(g), u⟩_x = ⟨g, u⟩ for every tangent ``u``."""
        return self.project(x, g)

    @full_precision
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """``⟨u, v⟩_x`` per point: (*B,*S) -> (*B,), real."""
        product = (u.conj() * v).real if u.is_complex() else u * v
        if product.shape != x.shape:
            product, _ = torch.broadcast_tensors(product, x)
        return product.sum(dim=tuple(range(-self.event_dim, 0))) if self.event_dim else product

    @full_precision
    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        """``‖u‖_x`` per point, with derivative zero where ``u`` is: (*B,*S) -> (*B,)."""
        square = self.inner(x, u, u)
        zero = square <= 0  # not "> 0", so that NaN stays NaN
        return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())

    @full_precision
    def move(self, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        """``(y, *vs')``: the point y = R_x(u), and each tangent ``v`` at x carried, linearly, to T_y."""
        y = self.retract(x, u)
        return (y, *(self.project(y, v) for v in vs))

    @full_precision
    def weingarten(self, x: Tensor, u: Tensor, g: Tensor) -> Tensor:
        """What the bending of ``retract`` adds to the Hessian of a cost with ambient gradient ``g``: an ambient ``w``
        with ⟨w, v⟩ = ⟨g, D²R_x(0)[u, v]⟩ for every tangent ``v``; (*B,*S) each -> (*B,*S).

        For the ambient metric and a second-order retraction its tangent part is that of the Weingarten map (Absil,
        Mahony, Trumpf 2013, "An extrinsic look at the Riemannian Hessian"). The default differentiates ``retract``
        twice; a closed form is ten times as fast.
        """

        def pairing(v: Tensor) -> Tensor:
            return (g.conj() * self.retract(x, v)).sum().real

        with torch.enable_grad():
            (w,) = torch.func.vjp(torch.func.grad(pairing), torch.zeros_like(u))[1](u)
        return cast(Tensor, w)

    def transport(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """``v`` carried from x to R_x(u); when the point is wanted too, ``move`` gives both in one go."""
        return self.move(x, u, v)[1]

    def scale(self, a: Tensor, u: Tensor) -> Tensor:
        """Each tangent vector times its own number: (*B,), (*B,*S) -> (*B,*S)."""
        return a.reshape(a.shape + (1,) * self.event_dim) * u

    # ------------------------------------------------------------------ optional
    def nearest(self, z: Tensor) -> Tensor:
        """The point nearest to an ambient ``z`` in the Euclidean norm."""
        self._absent("nearest")

    def exp(self, x: Tensor, u: Tensor) -> Tensor:
        """End of the geodesic that starts at ``x`` with velocity ``u``, at time 1."""
        self._absent("exp")

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """The shortest tangent ``u`` with exp(x, u) = y."""
        self._absent("log")

    @full_precision
    def dist(self, x: Tensor, y: Tensor) -> Tensor:
        """Geodesic distance per point: (*B,*S) -> (*B,), real; |log(x, y)| unless a closed form is written."""
        return self.norm(x, self.log(x, y))

    def _absent(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{self!r} has no {name}: no closed or convergent form is known for it")
