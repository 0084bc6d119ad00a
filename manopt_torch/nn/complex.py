"""Modules with complex parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound="ComplexModule")


class ComplexModule(nn.Module):
    """A module with complex parameters, which ``.double()``, ``.float()`` and ``.to(dtype)`` convert too.

    torch's own conversions skip complex tensors, or drop their imaginary parts.

    Raises:
        TypeError: for a conversion to bfloat16, of which there are no complex numbers.
    """

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        def convert(t: Tensor) -> Tensor:
            out = fn(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)
            out = out.real if out.is_complex() else out  # .to(complex128)
            if t.is_complex() and out.dtype == torch.bfloat16:
                raise TypeError(
                    f"{type(self).__name__} cannot be bfloat16, as there are no such complex numbers; its parameters "
                    "may be complex64 or complex128, that is .float() or .double()"
                )
            return torch.view_as_complex(out.contiguous()) if t.is_complex() else out

        return super()._apply(convert, recurse)
