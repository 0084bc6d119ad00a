"""What every Riemannian optimizer shares: groups with a manifold, one step in five stages, checkpoints."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.checkpoints import with_live_manifolds, with_manifold_names
from manopt_torch.optim.groups import Group, Params, as_groups, refuse_late_declarations, refuse_nonfinite
from manopt_torch.optim.matrices import as_matrices
from manopt_torch.precision import WIDER
from manopt_torch.storage import Buckets

State = dict[str, Tensor]


class RiemannianOptimizer(torch.optim.Optimizer, abc.ABC):
    """``torch.optim.Optimizer`` whose step ends in ``p ← R_p(u)`` instead of ``p ← p + u``.

    A subclass writes :meth:`direction` and names its ``tangent_state``. Parameters are given as
    ``param_groups(model)``, as the module itself (which means the same), as groups ``{"params": […], "manifold": M}``,
    or as a plain list in which every tensor is a ``ManifoldParameter``. ``p.grad`` is never modified; a step that
    raises changes nothing.

    ``maximize`` and ``weight_decay`` mean what they mean in torch: a weight decay is the gradient of ``λ/2 ‖x‖²``, or,
    with ``decoupled_weight_decay``, a displacement by ``−lr·λ·x`` projected on the tangent space. Both vanish where
    every point has the same norm (``Stiefel``, ``Unitary``, ``Sphere``).

    ``error_if_nonfinite`` raises ``RuntimeError`` for a gradient with NaN or inf in it, naming the parameter, before
    any parameter or state is written; it is a setting of each group, and the only one that waits for the device. The
    name is the qualified one where the group holds ``named_parameters()``, as torch has it, else group and position.
    """

    #: names of state entries that are tangent vectors, and therefore travel with the point
    tangent_state: ClassVar[tuple[str, ...]] = ()
    #: names of state entries that are a number, for each point or for the parameter
    number_state: ClassVar[tuple[str, ...]] = ()
    #: state entries that are an array for each point, a matrix (n, p): name -> shape, as "n", "p", "nn" or "pp"
    array_state: ClassVar[dict[str, str]] = {}
    #: takes sparse gradients: of a table (V, ...) of points only the rows that the gradient touches, and theirs of the
    #: state, take part in a step; the others stay bit for bit
    sparse_gradients: ClassVar[bool] = False

    #: the residual that points may have when a group is added; None for what rounding explains
    residual_allowed: float | None = None

    def __init__(self, params: Params, defaults: dict[str, Any], *, error_if_nonfinite: bool = False) -> None:
        super().__init__(
            as_groups(params, self.residual_allowed), {**defaults, "error_if_nonfinite": error_if_nonfinite}
        )

    @abc.abstractmethod
    def direction(self, M: Manifold, x: Tensor, r: Tensor, s: State, group: Group) -> Tensor:
        """The step: a tangent vector at ``x``, from the Riemannian gradient ``r`` and the state ``s``.

        x, r: ``(P, *B, *S)``, P parameters of the manifold M. ``s`` holds what the last step stored (nothing at the
        first one), as ``(P, ...)``; new values are assigned to it, out of place.
        """

    def check_manifold(self, M: Manifold) -> None:
        """Raise ``ValueError`` for a manifold on which this optimizer is not defined."""

    def gradient(self, M: Manifold, x: Tensor, g: Tensor) -> Tensor:
        """What :meth:`direction` is given as ``r``; optimizers whose points are off the manifold do without ``M``."""
        return M.rgrad(x, g)

    def move(self, M: Manifold, x: Tensor, u: Tensor, *vs: Tensor) -> tuple[Tensor, ...]:
        """The new point, and the tangent state carried to it."""
        return M.move(x, u, *vs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` re-evaluates the model and returns the loss, and is run with gradients enabled."""
        refuse_late_declarations(self)
        loss = evaluate(closure)
        plans = self.__dict__.setdefault("_plans", {})
        computed = []
        for i, group in enumerate(self.param_groups):
            decay = 0 if group["manifold"].constant_norm else group.get("weight_decay", 0)
            decoupled = group.get("decoupled_weight_decay", False)
            for bucket in plans.setdefault(i, Buckets()).of(group, self.state):
                M = bucket.manifold
                x, g, s = bucket.gather(self.sparse_gradients)
                g = -g if group.get("maximize") else g
                r = self.gradient(M, x, g + decay * x if decay and not decoupled else g)
                if group.get("error_if_nonfinite"):
                    refuse_nonfinite(self, bucket.params, r)  # of a NaN in g there is one in r
                u = self.direction(M, x, r, s, group)
                if decay and decoupled:
                    u = u - group["lr"] * decay * M.project(x, x)
                tangent = [name for name in self.tangent_state if name in s]
                y, *carried = self.move(M, x, u, *(s[name] for name in tangent))
                if group.get("error_if_nonfinite"):
                    refuse_nonfinite(self, bucket.params, y)
                computed.append((bucket, y, {**s, **dict(zip(tangent, carried, strict=True))}))
        for bucket, y, s in computed:
            bucket.scatter(y, s)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """As torch's. A group without ``"manifold"`` must hold ``ManifoldParameter`` of one manifold."""
        group, *others = as_groups([param_group], self.residual_allowed)
        if others:
            manifolds = [g["manifold"] for g in (group, *others)]
            raise ValueError(f"one group has one manifold, got {manifolds}: add one group for each")
        self.check_manifold(group["manifold"])
        super().add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's: tensors, numbers and strings; a manifold is written as its ``repr``."""
        return with_manifold_names(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the state of the torch optimizer with the same state names is taken over too.

        Its first moments are projected on the tangent space, its second moments summed over each point, and settings
        that it lacks keep their present value. A state saved for another manifold or for parameters of other shapes
        raises ``ValueError``; for another option of the same manifold the present one holds, with a warning.
        """
        super().load_state_dict(with_live_manifolds(state_dict, self.param_groups, self._fits))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            M, foreign = group["manifold"], not isinstance(saved.get("manifold"), str)
            for p, key in zip(group["params"], saved["params"], strict=True):
                # torch rounds the state of a half-precision parameter; what was saved is more exact
                found = state_dict["state"].get(key, {}) if p.dtype in WIDER else self.state.get(p, {})
                own = {k: torch.as_tensor(v).to(p.device, copy=True) for k, v in found.items() if v is not None}
                elementwise = any(k in self.number_state and v.shape == p.shape for k, v in own.items())
                for name, value in own.items() if M.event_dim and (foreign or elementwise) else ():
                    if name in self.tangent_state:
                        own[name] = M.project(p.detach(), value)
                    elif name in self.number_state and value.shape == p.shape:
                        parts = torch.view_as_real(value).sum(-1) if value.is_complex() else value
                        own[name] = parts.sum(dim=tuple(range(-M.event_dim, 0)))
                if own:
                    self.state[p] = own

    def _fits(self, name: str, value: Tensor, p: Tensor, M: Manifold | None) -> bool:
        """Tangent vectors have the shape of the parameter; a number is one for each entry, for each point, or one."""
        known = (*self.tangent_state, *self.number_state, *self.array_state)
        if name not in known:
            raise ValueError(
                f"{type(self).__name__} has no state {name!r}, only {known}: this state was saved by another kind of "
                "optimizer; a class of your own names its entries in tangent_state, number_state or array_state"
            )
        if M and name in self.array_state:
            (seen,), _ = as_matrices(M, p.detach())
            sizes = {"n": seen.shape[-2], "p": seen.shape[-1]}
            return value.shape == (*seen.shape[:-2], *(sizes[letter] for letter in self.array_state[name]))
        per_point = p.shape[: p.dim() - M.event_dim] if M else None
        return value.shape in ([p.shape] if name in self.tangent_state else [p.shape, per_point, torch.Size()])


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss that ``closure`` returns, run with gradients enabled whatever the caller's mode; None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()


def require(**settings: float | Tensor) -> None:
    """Raise ``ValueError`` for a setting that is not a number >= 0."""
    for name, value in settings.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
        if not value >= 0:
            raise ValueError(f"{name} must be a number >= 0, got {value}")
