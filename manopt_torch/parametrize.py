"""Weights on manifolds by a change of variables, for optimizers that must stay as they are.

``constrain`` and a Riemannian optimizer step on the manifold; :func:`parametrize` leaves the optimizer alone and writes
the weight as a function of a free parameter, around a base point b (a dynamic trivialization: Lezcano-Casado 2019,
"Trivializations for gradient-based optimization on manifolds", section 5)::

    W = R_b(P_b(raw)),    P_b the projection on the tangent space, R_b the retraction of the manifold

At raw = 0 the derivative is P_b, so that ``raw.grad`` is the vector with ⟨raw.grad, u⟩ = ⟨rgrad, u⟩_b for every tangent
u: the Riemannian gradient, where the metric is the ambient one. Away from the base it is not, and R_b may be far from
an isometry: :func:`rebase` moves the base to the present weight from time to time.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from manopt_torch.manifolds import Manifold
from manopt_torch.parameter import Init, charts, fault_of, initial, names_of, place_of, slots

__all__ = ["Trivialization", "parametrize", "rebase"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Trivialization(nn.Module):
    """The map raw ↦ R_b(P_b(raw)) onto ``manifold``, a parametrization in the sense of torch.nn.utils.parametrize.

    Its buffer ``base``, b, has the shape (*B, *S) of the weight and is saved and moved with the module.
    """

    base: Tensor

    def __init__(self, manifold: Manifold, point: Tensor) -> None:
        super().__init__()
        self.manifold = manifold
        self.register_buffer("base", point.detach().clone())

    def forward(self, raw: Tensor) -> Tensor:
        return self.manifold.retract(self.base, self.manifold.project(self.base, raw))

    def right_inverse(self, x: Tensor) -> Tensor:
        """What an assignment ``module.weight = x`` does: the base becomes x, and raw zero.

        Raises ``ValueError`` if x is off the manifold.
        """
        if fault := fault_of(x, self.manifold):
            raise ValueError(f"the assigned weight {fault}; assign manifold.nearest(x)")
        with torch.no_grad():
            self.base.copy_(x)
        return torch.zeros_like(self.base)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        base = state_dict.get(prefix + "base")
        if isinstance(base, Tensor) and (fault := fault_of(base, self.manifold)):
            raise ValueError(f"refused to load: {prefix}base {fault}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return repr(self.manifold)


def parametrize(module: AnyModule, name: str, manifold: Manifold, *, init: Init = "nearest") -> AnyModule:
    """Write the weight ``name`` of ``module`` as W = R_b(P_b(raw)), and return ``module``.

    ``module.weight`` is then computed, on the manifold whatever raw is, and the parameter that any torch optimizer
    steps, ``module.parametrizations.weight.original``, is raw, the same tensor object as before. Views of wide weights
    and kernels, dotted names and ``init`` are as in :func:`constrain`; the retraction is an option of the manifold:
    ``Stiefel()`` has the Cayley transform, ``Stiefel(retraction="exp")`` the geodesic. ``release`` undoes it.

    ``module.weight = x`` assigns a point, which becomes the base; ``reset_parameters`` does nothing to it. Weight decay
    pulls raw to zero, the weight to its base. The map is evaluated whenever the weight is read: write
    ``torch.nn.utils.parametrize.cached()`` around a loop over one layer. Torch pickles parametrized modules by their
    state dict only.

    Raises:
        ValueError: as ``constrain``; and if the weight is constrained, parametrized or tied.
    """
    owner, leaf, parameter, seen = place_of(module, name, manifold)
    if leaf in slots(owner):
        raise ValueError(f"{name} is constrained to {slots(owner)[leaf].manifold!r}: release() its module first")
    if len(names_of(module, parameter)) > 1:
        raise ValueError(f"{name} is a tensor that several modules share, and would no longer: constrain() it")
    value = initial(name, parameter, seen, init)
    point = parameter if value is None else value
    chart = Trivialization(seen, point)
    with torch.no_grad():
        parameter.copy_(point)  # what register_parametrization hands to right_inverse
    register_parametrization(owner, leaf, chart)
    parameter.grad = None
    return module


def rebase(model: nn.Module) -> None:
    """Make the present value of every parametrized weight in ``model`` its base, and raw zero; no weight changes.

    Call it between steps, every hundred or so. Momentum that an optimizer keeps of raw then refers to the new base:
    its tangent part counts.

    Raises ``ValueError`` if no weight is parametrized.
    """
    found = [(owner, leaf, chart) for owner in model.modules() for leaf, chart in charts(owner)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no weight under parametrize(module, name, manifold)")
    with torch.no_grad():
        for owner, leaf, chart in found:
            cast(Trivialization, chart).base.copy_(getattr(owner, leaf))
            owner.parametrizations[leaf].original.zero_()  # type: ignore[index, union-attr]
