"""``riemannian(opt)``: any ``torch.optim.Optimizer`` made Riemannian, in place."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from manopt_torch.manifolds import Euclidean, Manifold
from manopt_torch.optim.base import evaluate
from manopt_torch.optim.checkpoints import with_live_manifolds, with_manifold_names
from manopt_torch.optim.groups import Group, as_groups, refuse_late_declarations, refuse_nonfinite
from manopt_torch.optim.refusals import refuse_group, refuse_optimizer
from manopt_torch.precision import widen
from manopt_torch.storage import partition, shard_like, stack, write

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

#: state of torch's own optimizers that is a combination of gradients, and therefore a tangent vector
FIRST_MOMENTS = ("momentum_buffer", "exp_avg", "prev")
#: state that torch keeps for every entry, and our own optimizers for every point
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")


def riemannian(
    optimizer: Opt,
    *,
    frame: Literal["tangent", "ambient"] = "tangent",
    tangent_state: tuple[str, ...] | None = None,
    snapshot: bool = False,
    error_if_nonfinite: bool = False,
) -> Opt:
    """Make ``optimizer`` Riemannian on every group that names a manifold; the same object is returned.

    ::

        optimizer = riemannian(torch.optim.RMSprop(param_groups(model), lr=1e-3))

    In a step, for the parameters of such a group, the base optimizer finds the Riemannian gradient in ``p.grad`` and
    zero in ``p``, so that what it leaves in ``p`` is its displacement d. Then u = project(x, d), p ← R_x(u), and its
    first moments are projected and carried to the new point. Groups without a manifold, or on ``Euclidean()``, are
    left to the base optimizer. ``p.grad`` is what it was, and after a step that raises so is every ``p``.

    Args:
        optimizer: an instance whose parameters were given as ``param_groups(model)``, or in groups with a
            ``"manifold"``. Wrap it before a scheduler is built on it.
        frame: ``"ambient"`` shows the base optimizer the raw gradient and maps its displacement by ``rgrad`` at the
            end; its state then stays in the ambient space. This is the normalised step of the full-capacity unitary
            RNN (Wisdom et al., 2016) with ``torch.optim.RMSprop``.
        tangent_state: names of the state entries that are combinations of gradients. Known for torch's own
            optimizers; a class from elsewhere must say.
        error_if_nonfinite: raise ``RuntimeError``, naming the parameter, before anything is written, if a gradient
            holds NaN or inf; in all groups, those without a manifold included. This waits for the device.
        snapshot: restore the base optimizer's own state too when its step raises, at the price of a copy per step.

    A weight decay acts on the zero that stands in for ``p`` and does nothing: exactly what geometry asks for where all
    points have the same norm (``Stiefel``, ``Unitary``, ``Sphere``). On other manifolds a nonzero one is refused.

    Raises:
        ValueError: for an optimizer or a setting that cannot be made Riemannian, with the reason.
        TypeError: if no group names a manifold, or a ``ManifoldParameter`` is in a group without one.
    """
    kind = type(optimizer)
    if issubclass(kind, _Riemannian):
        raise ValueError(f"{kind.__name__} is Riemannian already")
    refuse_optimizer(optimizer, frame, tangent_state)
    for group in optimizer.param_groups:
        refuse_group(kind.__name__, frame, group)
    options = {
        "frame": frame,
        "tangent_state": FIRST_MOMENTS if tangent_state is None else tangent_state,
        "snapshot": snapshot,
        "error_if_nonfinite": error_if_nonfinite,
    }
    optimizer.__class__ = _wrapped(kind)  # type: ignore[assignment, arg-type]
    optimizer.__dict__["_options"] = options
    optimizer._patch_step_function()
    return optimizer


class _Riemannian(torch.optim.Optimizer):
    """Mixed in front of the class of a wrapped optimizer."""

    _base: type[torch.optim.Optimizer]
    _options: dict[str, Any]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        refuse_late_declarations(self)
        loss = evaluate(closure)
        self._step()
        return loss

    @torch.no_grad()
    def _step(self) -> None:
        # torch wraps step to run the user's hooks; they run once, around our own
        base_step = inspect.unwrap(self._base.step, stop=lambda f: not getattr(f, "hooked", False))
        tangent = self._options["frame"] == "tangent"
        stacks, free = [], []
        for group in self.param_groups:
            refuse_group(self._base.__name__, self._options["frame"], group)
            M, live = group.get("manifold", Euclidean()), [p for p in group["params"] if p.grad is not None]
            if isinstance(M, Euclidean):
                free += [(p, p.detach().clone()) for p in live]
            else:
                stacks += [(M, params, widen(stack(params)).clone()) for params in partition(M, live)]
        grads = [[p.grad for p in params] for _, params, _ in stacks]
        if self._options.get("error_if_nonfinite"):
            for p, _ in free:
                refuse_nonfinite(self, [p], p.grad.coalesce().values()[None] if p.grad.is_sparse else stack([p.grad]))
            for (_, params, _), g in zip(stacks, grads, strict=True):
                refuse_nonfinite(self, params, stack(g))
        shown = [M.rgrad(x, widen(stack(g))) for (M, _, x), g in zip(stacks, grads, strict=True) if tangent]
        if self._options.get("error_if_nonfinite"):
            for (_, params, _), r in zip(stacks, shown, strict=tangent):
                refuse_nonfinite(self, params, r.to(params[0].dtype))  # which is what the base optimizer sees
        before = {p: copy.deepcopy(s) for p, s in self.state.items()} if self._options["snapshot"] else None
        try:
            for (_, params, _), r in zip(stacks, shown, strict=tangent):
                for p, row in zip(params, r.unbind(0), strict=True):
                    p.grad = shard_like(p, row)
            for _, params, x in stacks:
                write(params, torch.zeros_like(x))
            base_step(self)
            moved = [self._moved(M, params, x) for M, params, x in stacks]
        except BaseException:
            for _, params, x in stacks:
                write(params, x)
            for p, x in free:
                p.copy_(x)
            if before is not None:
                self.state = defaultdict(dict, before)
            raise
        finally:
            for (_, params, _), g in zip(stacks, grads, strict=True):
                for p, grad in zip(params, g, strict=True):
                    p.grad = grad
        for tensors, values in (pair for pairs in moved for pair in pairs):
            write(tensors, values)

    def _moved(self, M: Manifold, params: list[Tensor], x: Tensor) -> list[tuple[list[Any], Tensor]]:
        """What to write where, once the base step has left its displacement in ``params``."""
        d = widen(stack(params))
        if self._options["frame"] == "ambient":
            return [(params, M.move(x, M.rgrad(x, d))[0])]
        names = [k for k in self._options["tangent_state"] if isinstance(self.state[params[0]].get(k), Tensor)]
        buffers = [[self.state[p][k] for p in params] for k in names]
        y, *carried = M.move(x, M.project(x, d), *(M.project(x, widen(stack(b))) for b in buffers))
        return [(params, y), *zip(buffers, carried, strict=True)]

    def add_param_group(self, param_group: Group) -> None:
        group = as_groups([param_group])[0] if "manifold" in param_group else param_group
        refuse_group(self._base.__name__, self._options["frame"], {**self.defaults, **group})
        super().add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        return with_manifold_names(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        entrywise = (*self._options["tangent_state"], *SECOND_MOMENTS)
        super().load_state_dict(
            with_live_manifolds(
                state_dict, self.param_groups, lambda name, t, p, _: name not in entrywise or t.shape == p.shape
            )
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (self._base, self._options), self.__getstate__()


@functools.cache
def _wrapped(base: type[torch.optim.Optimizer]) -> type[_Riemannian]:
    return type(f"riemannian({base.__name__})", (_Riemannian, base), {"_base": base, "__doc__": base.__doc__})


def _revive(base: type[torch.optim.Optimizer], options: dict[str, Any]) -> _Riemannian:
    optimizer = object.__new__(_wrapped(base))  # type: ignore[arg-type]
    optimizer._options = options
    return optimizer
