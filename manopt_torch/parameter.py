"""Declaring which parameters of a module live on a manifold.

A declaration is a *slot*: ``{"weight": Stiefel()}``, kept in the dictionary of the module that owns the
parameter. It outlives the tensor, which torch replaces on many occasions (``.to()``, ``to_empty``,
``load_state_dict(assign=True)``, ``fully_shard``), and goes wherever the module goes (deepcopy, pickle,
``AveragedModel``, ``torch.compile``). The slot is the only source of truth. :func:`constrain` writes it, and so does
assigning a :class:`ManifoldParameter` to any module; :func:`release` removes it.

A module with a slot checks what ``load_state_dict`` brings before anything is overwritten, and its
``reset_parameters`` ends on the manifold.

When is a tensor *on* its manifold? When its largest residual over the batch is at most
``TOLERANCE[dtype] · size^¼``, with ``size`` the number of entries of one point: ‖XᴴX − I‖_F after rounding the n²
entries of an orthogonal X grows like √n. NaN and inf are off. A tensor that a narrower dtype holds exactly (after
``module.double()``, or ``.float()`` of a bfloat16 model) is judged as what it is, a value of that dtype;
``p.copy_(manifold.nearest(p))`` under ``torch.no_grad()`` repairs its last digits.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args, overload
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _WrappedHook,  # a function bound to a module by weak reference, which copies and pickles with it
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from manopt_torch import manifolds
from manopt_torch.manifolds.base import Manifold
from manopt_torch.manifolds.blocks import Blocks
from manopt_torch.manifolds.euclidean import Euclidean
from manopt_torch.manifolds.view import View, view_for

__all__ = [
    "ManifoldParameter",
    "assert_on_manifold",
    "constrain",
    "max_residual",
    "named_manifolds",
    "param_groups",
    "release",
    "report",
]

#: Residual / size^¼ up to which a value is on its manifold. Half precision: twice the machine epsilon, as these
#: values are rounded once. float32 and float64: room for rounding errors that add up over many steps (in float32,
#: 10⁴ unpolished Cayley steps at 128×128 end at 2e-5 = 1.8e-6 · 128^½).
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}

Init = Literal["keep", "nearest", "random"]
OnLoad = Literal["error", "project"]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class _Slot(NamedTuple):
    manifold: Manifold
    on_load: OnLoad


# ------------------------------------------------------------------ values: on the manifold, or not
def _dense(x: Tensor) -> Tensor:
    """All of ``x``, also when it is a DTensor (a collective call then)."""
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _distributed_as(x: Tensor, value: Tensor) -> Tensor:
    """``value`` laid out over the ranks as ``x`` is; rank 0's counts."""
    if not hasattr(x, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, x.device_mesh, x.placements)  # type: ignore[attr-defined]


def _check_dtype(dtype: torch.dtype, what: str) -> None:
    if (dtype.to_real() if dtype.is_complex else dtype) not in TOLERANCE:
        expected = ", ".join(str(d).removeprefix("torch.") for d in TOLERANCE)
        raise TypeError(
            f"{what} has dtype {dtype}; a point of a manifold has one of {expected}, or their complex ones: "
            "convert it first, as in .to(torch.get_default_dtype())"
        )


def _residual(x: Tensor, manifold: Manifold) -> float:
    """Largest residual over the batch; NaN if an entry is not finite."""
    x = _dense(x)
    if not torch.isfinite(x).all():
        return math.nan
    return manifold.residual(x).max().item() if x.numel() else 0.0


def _tolerance(x: Tensor, manifold: Manifold) -> float:
    """The largest residual that rounding explains, by dtype and size of one point."""
    entries = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    bits = torch.finfo(entries.dtype).bits
    narrower = (d for d in TOLERANCE if torch.finfo(d).bits < bits and torch.equal(entries.to(d).to(entries), entries))
    dtype = next(narrower, entries.dtype)
    size = math.prod(x.shape[x.dim() - manifold.event_dim :])
    return TOLERANCE[dtype] * max(size, 1) ** 0.25


def fault_of(x: Tensor, manifold: Manifold, tol: float | None = None) -> str | None:
    """What is wrong with the value of ``x``, in words; None when it is on the manifold, or on the meta device."""
    if x.is_meta:
        return None
    x = _dense(x)
    residual = _residual(x, manifold)
    tol = _tolerance(x, manifold) if tol is None else tol
    if residual <= tol:
        return None
    if math.isnan(residual):
        return f"is off {manifold!r}: it holds NaN or inf"
    return f"is off {manifold!r}: residual {residual:.3g}, tolerance {tol:.3g} for {x.dtype}"


def _random(manifold: Manifold, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A random tensor of points with the shape, dtype and device of ``like``; half precision is drawn in float32."""
    if like.is_meta:
        return like
    dtype = torch.promote_types(like.dtype, torch.float32)
    point = manifold.random(*like.shape, dtype=dtype, device=like.device, generator=generator)
    return point.to(like.dtype).contiguous()


def _redrawn(parameter: Tensor, manifold: Manifold) -> Tensor:
    """A random value for a parameter; rows that :class:`Blocks` leaves free keep the value they have."""
    value = _dense(parameter)
    point = _random(manifold, value)
    return manifold.with_free_rows_of(point, value) if isinstance(manifold, Blocks) else point


def _kind(argument: object) -> str:
    return f"the class {argument.__name__}" if isinstance(argument, type) else type(argument).__name__


# ------------------------------------------------------------------ the declaration as a tensor
class ManifoldParameter(nn.Parameter):
    """A parameter that says which manifold it lives on: ``self.W = ManifoldParameter(...)`` writes the module's slot.

    ``ManifoldParameter(data, manifold)`` takes a value that is on the manifold, and shares its memory (of a lazily
    conjugated view, such as ``U.mH``, it is a copy);
    ``ManifoldParameter(manifold, shape, dtype=…, device=…, generator=…)`` draws a random point of shape
    ``(*B, *S)``. On the meta device no value is checked or drawn.

    A deep copy, a pickle and ``torch.save`` keep the manifold; ``torch.load(weights_only=True)`` accepts the manifolds
    of this package, and your own after ``torch.serialization.add_safe_globals([MyManifold])``. Where torch puts a plain
    ``nn.Parameter`` in place of this one, the slot of the module remains.

    Raises:
        ValueError: the value is off the manifold (the residual is given) or not finite; the shape is not ``(*B, *S)``.
        TypeError: an integer dtype, or a tensor that is not a plain one (declare a DTensor by :func:`constrain`).
    """

    manifold: Manifold

    @overload
    def __new__(
        cls, data: Tensor, manifold: Manifold, requires_grad: bool = True
    ) -> ManifoldParameter: ...  # fmt: skip

    @overload
    def __new__(
        cls,
        data: Manifold,
        manifold: Sequence[int],
        requires_grad: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> ManifoldParameter: ...

    def __new__(
        cls,
        data: Tensor | Manifold,
        manifold: Manifold | Sequence[int],
        requires_grad: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> ManifoldParameter:
        if isinstance(data, Tensor) and isinstance(manifold, Manifold):
            if (dtype, device, generator) != (None, None, None):
                raise TypeError(
                    "dtype, device and generator are for a random point; convert the tensor itself: data.to(...)"
                )
            on, value = manifold, data.detach().resolve_conj()
        elif isinstance(data, Manifold) and isinstance(manifold, Sequence):
            on, value = data, torch.empty(tuple(manifold), dtype=dtype, device=device)
        else:
            raise TypeError(
                f"got ({_kind(data)}, {_kind(manifold)}); write ManifoldParameter(tensor, manifold), "
                "or ManifoldParameter(manifold, shape) for a random point"
            )
        _check_dtype(value.dtype, "data")
        on.check_shape(tuple(value.shape))
        if on is data:
            value = _random(on, value, generator)
        if type(value) is not Tensor:
            raise TypeError(
                f"data is a {type(value).__name__}, a ManifoldParameter is a plain tensor: assign nn.Parameter(data) "
                "to the module and declare it by constrain(module, name, manifold)"
            )
        if fault := fault_of(value, on):
            raise ValueError(f"data {fault}; write ManifoldParameter(manifold.nearest(data), manifold)")
        return _rebuild_manifold_parameter(value, requires_grad, {"manifold": on})

    @property
    def rgrad(self) -> Tensor | None:
        """Riemannian gradient at the present value, of what is accumulated in ``.grad``; None when that is None."""
        if self.grad is None:
            return None
        with torch.no_grad():
            return self.manifold.rgrad(self.detach(), self.grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> ManifoldParameter:
        data = self.data.clone(memory_format=torch.preserve_format)
        return _rebuild_manifold_parameter(data, self.requires_grad, {"manifold": self.manifold})

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        return _rebuild_manifold_parameter, (self.data, self.requires_grad, vars(self))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ManifoldParameter on {self.manifold!r} containing:\n{self.data!r}"


def _rebuild_manifold_parameter(data: Tensor, requires_grad: bool, state: dict[str, Any]) -> ManifoldParameter:
    """Without checks, so that any state can be copied and saved."""
    parameter = torch.Tensor._make_subclass(ManifoldParameter, data, requires_grad)
    vars(parameter).update(state)
    return parameter


# ------------------------------------------------------------------ slots
def slots(owner: nn.Module) -> dict[str, _Slot]:
    return vars(owner).get("_slots", {})


def _join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"got {_kind(module)}, expected a module. A bare ManifoldParameter W is stepped by RiemannianAdam([W]) or "
            "in a group {'params': [W], 'manifold': W.manifold}, and measured by W.manifold.residual(W)"
        )


def _constrained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, _Slot]]:
    """(dotted name, parameter, slot), each tensor once."""
    _require_module(module)
    seen: dict[int, tuple[str, Manifold]] = {}
    for path, owner in module.named_modules():
        for leaf, slot in slots(owner).items():
            name, parameter = _join(path, leaf), owner._parameters.get(leaf)
            if parameter is None:
                raise ValueError(
                    f"{name} was declared on {slot.manifold!r} but is no longer a parameter of "
                    f"{type(owner).__name__} (deleted, parametrized, pruned or weight-normed?): undo that, or call "
                    "release() on this module"
                )
            try:
                slot.manifold.check_shape(tuple(parameter.shape))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            first, manifold = seen.setdefault(id(parameter), (name, slot.manifold))
            if manifold != slot.manifold:
                raise ValueError(
                    f"{first} and {name} are the same tensor, declared on {manifold!r} and on "
                    f"{slot.manifold!r}: release one of the two modules"
                )
            if first == name:
                yield name, parameter, slot


#: Modules with a slot, and how many slots were ever written: for optimizers, which hold tensors and know no module.
_owners: WeakSet[nn.Module] = WeakSet()
slots_written = 0


def declared() -> dict[int, Manifold]:
    """id -> manifold of every parameter with a slot, whatever its module; not in copied and unpickled modules."""
    found = ((owner._parameters.get(leaf), slot) for owner in list(_owners) for leaf, slot in slots(owner).items())
    return {id(parameter): slot.manifold for parameter, slot in found if parameter is not None}


def _write_slot(owner: nn.Module, leaf: str, slot: _Slot) -> None:
    global slots_written
    vars(owner).setdefault("_slots", {})[leaf] = slot
    _owners.add(owner)
    slots_written += 1
    if reset := _reset_name(owner):
        vars(owner)[reset] = _WrappedHook(_reset_parameters, owner)


def _reset_name(owner: nn.Module) -> str | None:
    """``reset_parameters``, with an underscore in torch's attention and transformers; None where there is none."""
    return next((n for n in ("reset_parameters", "_reset_parameters") if hasattr(type(owner), n)), None)


def _reset_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """What the class does; then a fresh random point for every slot that this left off its manifold."""
    getattr(type(module), str(_reset_name(module)))(module, *args, **kwargs)
    for leaf, slot in slots(module).items():
        parameter = module.get_parameter(leaf)
        if fault_of(parameter, slot.manifold):
            _assign(parameter, _redrawn(parameter, slot.manifold))


def _assign(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(_distributed_as(parameter, value))


# ------------------------------------------------------------------ loading
#: Who holds a module, as far as torch has registered it. load_state_dict asks one module after another and overwrites
#: as it goes, so only the module that it is called on can refuse in time: every one above a slot has to check.
_parents: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def _guard_loading(module: nn.Module) -> None:
    """Check what is loaded at every module on the way from a slot in ``module`` up to its outermost owner."""
    if _guard_below(module):
        _guard_above(module)


def _guard_below(module: nn.Module) -> bool:
    below = [_guard_below(child) for child in module.children()]
    guarded = bool(slots(module)) or any(below)
    if guarded:
        _guard(module)
    return guarded


def _guard_above(module: nn.Module) -> None:
    for parent in list(_parents.get(module, ())):
        if not _guards(parent) and any(child is module for child in parent.children()):
            _guard(parent)
            _guard_above(parent)


def _guard(module: nn.Module) -> None:
    if not _guards(module):
        module.register_load_state_dict_pre_hook(_check_before_load)


def _guards(module: nn.Module) -> list[int]:
    """Keys of our hooks among the module's."""
    return [k for k, hook in module._load_state_dict_pre_hooks.items() if _is_ours(hook, _check_before_load)]


def _is_ours(bound: Any, function: Callable[..., None]) -> bool:
    return isinstance(bound, _WrappedHook) and bound.hook is function


def _check_before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse or project what is about to be loaded into slots of ``module`` and below; torch's pre-hook signature."""
    on = {id(parameter): slot for _, parameter, slot in _constrained(module)}
    faults, replaced = [], {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key, slot = prefix + name, on.get(id(parameter))
        value = state_dict.get(key)
        if slot is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue  # torch itself reports a wrong shape or type
        if isinstance(value, ManifoldParameter) and value.manifold != slot.manifold:
            value = replaced[key] = value.detach()  # assigning it would overwrite the slot
        if value.is_meta:
            continue
        _check_dtype(value.dtype, key)
        if value.is_complex() and not parameter.is_complex():
            faults.append(
                f"{key} is {value.dtype}, the parameter is {parameter.dtype}: the imaginary part would be lost"
            )
        elif fault := fault_of(value, slot.manifold):
            nearest = None if slot.on_load == "error" else _nearest(value, slot.manifold)
            if nearest is None:
                faults.append(f"{key} {fault}")
            else:
                replaced[key] = _distributed_as(value, nearest)
    if faults:
        raise ValueError(
            f"refused to load into {type(module).__name__}: {'; '.join(faults)}. Load manifold.nearest(value), or "
            'declare with constrain(..., on_load="project")'
        )
    state_dict.update(replaced)


def _nearest(x: Tensor, manifold: Manifold) -> Tensor | None:
    """The nearest point of a finite value; None when there is none."""
    x = _dense(x)
    if not torch.isfinite(x).all():
        return None
    with torch.no_grad():
        y = manifold.nearest(x)
    return None if fault_of(y, manifold) else y


# ------------------------------------------------------------------ torch's registration hooks, the only global state
def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, ManifoldParameter):
        slot = slots(module).get(name)
        if slot is None or slot.manifold != parameter.manifold:
            _write_slot(module, name, _Slot(parameter.manifold, "error"))
            _guard_loading(module)


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is not None:
        _parents.setdefault(child, WeakSet()).add(module)
        if any(slots(m) for m in child.modules()):
            _guard(module)
            _guard_above(module)


for _handle in globals().get("_handles", ()):  # importlib.reload keeps the globals
    _handle.remove()
_handles = (
    register_module_parameter_registration_hook(_on_parameter),
    register_module_module_registration_hook(_on_module),
)
_SAFE: list[Any] = [c for c in vars(manifolds).values() if isinstance(c, type) and issubclass(c, Manifold)]
torch.serialization.add_safe_globals([_rebuild_manifold_parameter, *_SAFE])


# ------------------------------------------------------------------ what a user calls
@overload
def constrain(
    module: AnyModule, name: str, manifold: Manifold, *, init: Init = "nearest", on_load: OnLoad = "error"
) -> AnyModule: ...


@overload
def constrain(
    module: nn.Module,
    name: Mapping[str, Manifold],
    manifold: None = None,
    *,
    init: Init = "nearest",
    on_load: OnLoad = "error",
) -> list[tuple[str, Manifold]]: ...


def constrain(
    module: AnyModule,
    name: str | Mapping[str, Manifold],
    manifold: Manifold | None = None,
    *,
    init: Init = "nearest",
    on_load: OnLoad = "error",
) -> AnyModule | list[tuple[str, Manifold]]:
    """Declare that parameters of a module, of any class, live on a manifold.

    ``constrain(module, "weight", Stiefel())`` returns the module; the name may be dotted, as in ``named_parameters``.
    ``constrain(model, {"*.weight": Stiefel(), ...})`` takes globs (:mod:`fnmatch`) over ``model.named_parameters()``
    and returns (name, manifold) of what was constrained. On an error nothing at all has been changed.

    A tensor that several modules share is declared in each of them, as far as they are parts of ``module``.
    A wide matrix, and the kernel of a convolution module, are constrained through their view (:func:`view_for`);
    elsewhere dimensions in front of a matrix are a batch of matrices. Where torch stacks several matrices in one weight
    each is a point of its own (:class:`Blocks`): the groups of a convolution, the gates of a recurrent module, the
    heads of attention, of whose ``in_proj_weight`` the queries and keys are constrained and the values are free.
    A ``View`` or ``Blocks`` is taken as it is given.

    Args:
        init: ``"nearest"`` moves the value to the nearest point, and keeps one on the manifold bit for bit;
            ``"keep"`` refuses a value off the manifold; ``"random"`` draws a random point. Values on the meta
            device are not looked at.
        on_load: what ``load_state_dict`` does with a value off the manifold, by the tolerance of the loaded dtype:
            ``"error"`` refuses all that is loaded before anything is overwritten, ``"project"`` loads the nearest
            point. All of the model that is loaded takes part, except that a copied or unpickled model of which only
            a part is constrained afterwards, and not ``module`` itself, does so from ``param_groups(model)`` on.

    Raises:
        ValueError: nothing matches, the shape does not fit, the value is off the manifold (with the residual),
            the same tensor is declared on another manifold already, the option is unknown, or it is an embedding with
            ``padding_idx`` or ``max_norm``.
        TypeError: the parameter is of an integer dtype, or arguments of a wrong kind.
        NotImplementedError: ``nearest`` is needed and the manifold has none; ``init="random"`` is always there.
    """
    _require_module(module)
    for option, value, kind in (("init", init, Init), ("on_load", on_load, OnLoad)):
        if value not in get_args(kind):
            raise ValueError(f"{option}={value!r}: expected one of {', '.join(map(repr, get_args(kind)))}")
    if isinstance(name, str) and isinstance(manifold, Manifold):
        _declare(module, {name: manifold}, init, on_load)
        return module
    if not isinstance(name, Mapping) or manifold is not None:
        raise TypeError(
            f"got ({_kind(name)}, {_kind(manifold)}); write constrain(module, 'weight', manifold) or "
            "constrain(model, {glob: manifold, ...})"
        )
    chosen: dict[str, Manifold] = {}
    names = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    for glob, wanted in name.items():
        if not isinstance(wanted, Manifold):
            raise TypeError(f"{glob!r} is given {wanted!r}, expected a manifold such as Stiefel()")
        for match in _matches(glob, names):
            if chosen.setdefault(match, wanted) != wanted:
                raise ValueError(f"{match} is matched by globs of {chosen[match]!r} and of {wanted!r}: tell them apart")
    return _declare(module, {n: chosen[n] for n in names if n in chosen}, init, on_load)


def _matches(glob: str, names: Iterable[str]) -> list[str]:
    found = [n for n in names if fnmatch.fnmatchcase(n, glob)]
    if not found:
        names = list(names)
        near = difflib.get_close_matches(glob, names, n=8, cutoff=0) if len(names) > 8 else names
        rest = f", ... ({len(names)} of them)" if len(names) > len(near) else ""
        raise ValueError(f"{glob!r} matches none of the parameters: {', '.join(near) or 'there are none'}{rest}")
    return found


def _declare(
    root: nn.Module, wanted: Mapping[str, Manifold], init: Init, on_load: OnLoad
) -> list[tuple[str, Manifold]]:
    homes = _homes(root)
    taken = {id(parameter): (name, slot.manifold) for name, parameter, slot in _constrained(root)}
    for owner, leaf, parameter in homes:  # those outside of root too
        if slot := slots(owner).get(leaf):
            taken.setdefault(id(parameter), (f"{leaf} of {type(owner).__name__}", slot.manifold))
    plan: list[tuple[nn.Parameter, Manifold, Tensor | None]] = []
    for name, manifold in wanted.items():
        _, _, parameter, seen = place_of(root, name, manifold)
        other, declared = taken.setdefault(id(parameter), (name, seen))
        if declared != seen:
            raise ValueError(
                f"{name} cannot be declared on {seen!r}: this tensor ({other}) is declared on {declared!r}; "
                "release() its module first"
            )
        plan.append((parameter, seen, initial(name, parameter, seen, init)))
    for parameter, manifold, value in plan:
        if value is not None:
            _assign(parameter, value)
        for owner, leaf, p in homes:
            if p is parameter:  # under every name, so that each of several tied modules knows
                _write_slot(owner, leaf, _Slot(manifold, on_load))
                _guard_loading(owner)
    _guard_loading(root)
    return [(name, manifold) for name, (_, manifold, _) in zip(wanted, plan, strict=True)]


def names_of(module: nn.Module, parameter: Tensor) -> list[str]:
    """The name of a parameter in every module that has it, of ``module`` and of the models that it is part of."""
    return [leaf for _, leaf, p in _homes(module) if p is parameter]


def _homes(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name, parameter) of all that torch has registered in ``module`` and in the models that it is part of."""
    owners = dict.fromkeys(m for top in _outermost(module) for m in top.modules())
    return [(m, leaf, p) for m in owners for leaf, p in m._parameters.items() if p is not None]


def _outermost(module: nn.Module) -> list[nn.Module]:
    above = [p for p in list(_parents.get(module, ())) if any(child is module for child in p.children())]
    return [top for parent in above for top in _outermost(parent)] or [module]


class _Place(NamedTuple):
    owner: nn.Module
    leaf: str
    parameter: nn.Parameter
    manifold: Manifold  # the view that fits


def place_of(root: nn.Module, name: str, manifold: Manifold) -> _Place:
    """The parameter called ``name`` in ``root``, and the view of ``manifold`` for it. Raises as :func:`constrain`."""
    path, _, leaf = name.rpartition(".")
    owner = dict(root.named_modules(remove_duplicate=False)).get(path)
    if owner is None:
        raise ValueError(
            f"{name}: {type(root).__name__} has no part {path!r}; globs are given in a dictionary, as in "
            f"constrain(model, {{{name!r}: {manifold!r}}})"
        )
    parameter = owner._parameters.get(leaf)
    if parameter is None:
        has = ", ".join(n for n, p in owner._parameters.items() if p is not None) or "none"
        raise ValueError(f"{type(owner).__name__} has no parameter {leaf!r}; its parameters: {has}")
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"{name} has no shape yet: run the model once on a batch, then constrain it")
    _check_dtype(parameter.dtype, name)
    embeds = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and not isinstance(manifold, Euclidean)
    if embeds and (owner.padding_idx, owner.max_norm) != (None, None):
        raise ValueError(
            f"{name}: {owner} keeps its row padding_idx at zero and rescales rows to max_norm, which leaves "
            f"{manifold!r}: build it without these, and mask what is padded"
        )
    batch_dims = 0 if isinstance(owner, nn.modules.conv._ConvNd) else max(parameter.dim() - 2, 0)
    blocks, of = (1, 1) if isinstance(manifold, (Blocks, View)) else _stacked(owner, leaf, parameter)
    try:
        seen = view_for(manifold, tuple(parameter.shape), batch_dims=batch_dims, blocks=blocks, of=of)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return _Place(owner, leaf, parameter, seen)


def _stacked(owner: nn.Module, leaf: str, value: Tensor) -> tuple[int, int]:
    """(blocks, of): torch's module stacks ``of`` matrices in this weight, the first ``blocks`` of which are meant."""
    if isinstance(owner, nn.modules.conv._ConvNd):
        return owner.groups, owner.groups
    if isinstance(owner, (nn.RNNBase, nn.RNNCellBase)) and leaf.startswith(("weight_ih", "weight_hh")):
        gates = value.shape[0] // owner.hidden_size
        return gates, gates
    if isinstance(owner, nn.MultiheadAttention) and leaf in ("in_proj_weight", "q_proj_weight", "k_proj_weight"):
        h = owner.num_heads
        return (2 * h, 3 * h) if leaf == "in_proj_weight" else (h, h)
    return 1, 1


def initial(name: str, parameter: nn.Parameter, manifold: Manifold, init: Init) -> Tensor | None:
    """The value that a newly constrained parameter gets; None to keep the one it has."""
    if parameter.is_meta:
        return None
    if init == "random":
        return _redrawn(parameter, manifold)
    fault = fault_of(parameter, manifold)
    value = _nearest(parameter, manifold) if fault and init == "nearest" else None
    if fault and value is None:
        missed = f"its nearest point, rounded to {parameter.dtype}, is off too"
        remedy = 'init="nearest" moves a finite value there' if init == "keep" else missed
        raise ValueError(f'{name} {fault}; {remedy}, init="random" draws a new one')
    return value


def release(module: AnyModule) -> AnyModule:
    """Undo every declaration in ``module`` and below; values, gradients and the tensors themselves stay as they are.

    What is returned, ``module`` itself, is an ordinary torch module, with no trace of this package in its pickles:
    layers of :mod:`manopt_torch.nn` that torch has too become torch's, and weights under
    :func:`manopt_torch.parametrize` become parameters with the value that they have now (and the gradient of the raw
    ones is dropped).
    """
    _require_module(module)
    for owner in list(module.modules()):
        for leaf, _ in charts(owner):
            owner.parametrizations[leaf].original.grad = None  # type: ignore[index, union-attr]
            remove_parametrizations(owner, leaf)
        for leaf in vars(owner).pop("_slots", {}):
            parameter = owner._parameters.get(leaf)
            if isinstance(parameter, ManifoldParameter):
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # in place: ties and optimizers hold on to it
                del parameter.manifold
        for reset in ("reset_parameters", "_reset_parameters"):
            if _is_ours(vars(owner).get(reset), _reset_parameters):
                del vars(owner)[reset]
        for key in _guards(owner):
            del owner._load_state_dict_pre_hooks[key]
        owner.__class__ = vars(type(owner)).get("torch_class", type(owner))
    return module


def charts(owner: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name of the weight, module) of every parametrization onto a manifold that ``owner`` itself has."""
    chains = owner.parametrizations.items() if is_parametrized(owner) else ()  # type: ignore[operator, union-attr]
    return [(name, p) for name, chain in chains for p in chain if isinstance(getattr(p, "manifold", None), Manifold)]


def named_manifolds(module: nn.Module) -> Iterator[tuple[str, Manifold]]:
    """(dotted name, manifold) of every constrained parameter in ``module`` and below, each tensor once.

    Raises ``ValueError`` for a slot whose name is no longer a parameter (parametrized, pruned, weight-normed, deleted)
    or whose shape no longer fits, and for one tensor declared on two manifolds.
    """
    return ((name, slot.manifold) for name, _, slot in _constrained(module))


def param_groups(model: nn.Module, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """All parameters of ``model`` in groups, each with its ``"manifold"``, ``Euclidean()`` for unconstrained ones.

    Groups, and parameters in them, are in the order of ``model.parameters()``, which they cover, tied ones once.

    Args:
        overrides: ``{glob: {option: value}}`` over the names of ``model.named_parameters()``, such as
            ``{"*.bias": {"lr": 0.1}}``. Where several globs match, later ones win.

    Raises:
        ValueError: a glob matches nothing, or an option is ``"manifold"`` or ``"params"``.
    """
    on = {id(parameter): slot.manifold for _, parameter, slot in _constrained(model)}
    _guard_loading(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    options: dict[int, dict[str, Any]] = {}
    for glob, given in (overrides or {}).items():
        if not given.keys().isdisjoint({"manifold", "params"}):
            raise ValueError(f"{glob!r}: 'manifold' is what constrain() declares, 'params' what the glob matches")
        for name in _matches(glob, named):
            options.setdefault(id(named[name]), {}).update(given)
    groups: list[dict[str, Any]] = []
    for parameter in model.parameters():
        head = {"manifold": on.get(id(parameter), Euclidean()), **options.get(id(parameter), {})}
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == head), None)
        if group is None:
            groups.append(group := {"params": [], **head})
        group["params"].append(parameter)
    return groups


def max_residual(model: nn.Module) -> float:
    """The largest residual of any constrained parameter of ``model``; NaN if one holds NaN or inf.

    0 exactly on the manifolds, and where nothing is constrained. With DTensors a collective call.
    """
    residuals = [_residual(parameter, slot.manifold) for _, parameter, slot in _constrained(model)]
    return math.nan if any(map(math.isnan, residuals)) else max(residuals, default=0.0)


def report(model: nn.Module) -> str:
    """A table of what is on a manifold in ``model``, by :func:`constrain` or :func:`manopt_torch.parametrize`: a line
    each with name, shape, manifold and residual, and the number of parameters that are free."""
    rows = [(name, parameter, slot.manifold) for name, parameter, slot in _constrained(model)]
    for path, owner in model.named_modules():
        rows += [(_join(path, leaf), getattr(owner, leaf), cast(Any, chart).manifold) for leaf, chart in charts(owner)]
    cells = [
        (name, "×".join(map(str, value.shape)), repr(on), "meta" if value.is_meta else f"{_residual(value, on):.1e}")
        for name, value, on in rows
    ]
    lines = [("parameter", "shape", "manifold", "residual"), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    free = sum(1 for _ in model.parameters()) - len(rows)
    return "\n".join([*table, f"{len(rows)} on manifolds, {free} free"])


def assert_on_manifold(model: nn.Module, tol: float | None = None) -> None:
    """Raise ``AssertionError``, with names and residuals, if a constrained parameter is off its manifold.

    ``tol`` bounds every residual; without it the tolerance goes by dtype and size, as
    :mod:`manopt_torch.parameter` says. NaN and inf are off. With DTensors a collective call.
    """
    faults = [
        f"{name} {fault}"
        for name, parameter, slot in _constrained(model)
        if (fault := fault_of(parameter, slot.manifold, tol))
    ]
    if faults:
        raise AssertionError(
            "; ".join(faults) + ". Was it stepped by a plain torch optimizer, or written to? Step it with "
            "RiemannianAdam(model) or riemannian(opt); p.copy_(manifold.nearest(p)) under torch.no_grad() repairs it"
        )
