"""Modules with complex parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from manopt_torch.precision import WIDER

Module = TypeVar("Module", bound="ComplexModule")


class ComplexModule(nn.Module):
    """A module with complex parameters, which ``.double()``, ``.float()`` and ``.to(dtype)`` convert too.

    torch's own conversions skip complex tensors, or drop their imaginary parts.

    Raises:
        TypeError: for a conversion to half precision, of whose complex numbers torch has too little.
    """

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        def convert(t: Tensor) -> Tensor:
            out = fn(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)
            out = out.real if out.is_complex() else out  # .to(complex128)
            return torch.view_as_complex(out.contiguous()) if t.is_complex() else out

        found = next((p for p in self.parameters() if p.is_complex()), None)
        if found is not None and (dtype := fn(torch.view_as_real(found.detach()[:0].resolve_conj())).dtype) in WIDER:
            raise TypeError(
                f"{type(self).__name__} cannot be {dtype}, as torch lacks such complex numbers, or most of their "
                "operations; its parameters may be complex64 or complex128, that is .float() or .double()"
            )
        return super()._apply(convert, recurse)
