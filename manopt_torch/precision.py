"""Half precision is stored as it is, and computed one step up; autocast does not reach geometry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: what a half-precision dtype is computed in
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def widen(t: Tensor) -> Tensor:
    """``t`` in the dtype it is computed in."""
    return t.to(WIDER.get(t.dtype, t.dtype))


def full_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``method(self, *tensors)`` see at least float32 and no autocast; round its result to the dtype that came in.

    That dtype is the promoted one of the arguments; the result is a tensor or a tuple of them.
    """

    @functools.wraps(method)
    def call(self: Any, *tensors: Tensor) -> Any:
        device, dtype = tensors[0].device.type, tensors[0].dtype
        mixed = False
        for t in tensors[1:]:
            if t.dtype != dtype:
                mixed, dtype = True, torch.promote_types(dtype, t.dtype)
        if not mixed and dtype not in WIDER and not torch.is_autocast_enabled(device):
            return method(self, *tensors)
        wide = WIDER.get(dtype, dtype)
        with torch.autocast(device, enabled=False):
            out = method(self, *(t.to(wide) for t in tensors))
        if dtype == wide:
            return out
        results = [
            t.to(dtype if t.is_complex() else dtype.to_real()) for t in (out if isinstance(out, tuple) else (out,))
        ]
        return tuple(results) if isinstance(out, tuple) else results[0]

    return call
