"""Groups and state in a ``state_dict``: how a manifold is written, and what is checked before anything is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.optim.groups import Group, describe


def with_manifold_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with each manifold written as its ``repr``, so that ``torch.load(weights_only=True)`` reads it."""
    groups = [{**g, "manifold": repr(g["manifold"])} if "manifold" in g else g for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def with_live_manifolds(
    state_dict: dict[str, Any], live: list[Group], fits: Callable[[str, Tensor, Tensor, Manifold | None], bool]
) -> dict[str, Any]:
    """The reverse: saved groups completed by the live ones, whose manifolds hold.

    Raises for another manifold, and for a state entry that does not fit its parameter: ``fits(name, value, p, M)``.
    """
    groups = []
    for own, saved in zip(live, state_dict["param_groups"], strict=False):  # torch says it when the numbers differ
        present, name = own.get("manifold"), saved.get("manifold")
        name = name if isinstance(name, str) else repr(present if name is None else name)
        if name.partition("(")[0] != repr(present).partition("(")[0]:
            raise ValueError(f"this state was saved for {name}, and the optimizer's group is on {present!r}")
        if name != repr(present):
            warnings.warn(f"this state was saved for {name}; {present!r} of the optimizer holds", stacklevel=3)
        for p, key in zip(own["params"], saved["params"], strict=False):
            for entry, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and not fits(entry, value, p, present):
                    raise ValueError(
                        f"{entry!r} of shape {tuple(value.shape)} does not fit {describe(p)}: this state was saved by "
                        "another kind of optimizer, or for another model"
                    )
        settings = {k: v for k, v in own.items() if k != "params"}
        groups.append({**settings, **saved, **({"manifold": present} if present is not None else {})})
    return {**state_dict, "param_groups": groups + state_dict["param_groups"][len(groups) :]}
