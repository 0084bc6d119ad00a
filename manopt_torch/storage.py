"""The one place where many parameters become one stacked tensor, and go back.

An optimizer computes on ``(P, *B, *S)``: P parameters of one manifold, shape, dtype and device, stacked. What is
stored, and how, is decided here and nowhere else: complex numbers of a manifold whose points are numbers are handed
over as pairs of reals, half precision is computed in float32, a ``DTensor`` is gathered whole and written back by
shards, and of a table with a sparse gradient only the touched rows are taken. Everything here runs under
``torch.no_grad()``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from manopt_torch.manifolds import Manifold
from manopt_torch.precision import widen

#: a bucket is computed in chunks of at most this many bytes, so that its temporaries stay small
CHUNK_BYTES = 64 * 2**20


def stack(tensors: Sequence[Any]) -> Tensor:
    """``(P, ...)`` from P tensors of one shape; of a single tensor it is a view, not a copy.

    Raises ``ValueError`` for sparse tensors.
    """
    if tensors[0].layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(tensors[0].shape)} has a gradient of layout {tensors[0].layout}; only dense "
            "gradients are supported, and by some optimizers those of tables whose rows are points: build the layer "
            "with sparse=False, or write p.grad = p.grad.to_dense()"
        )
    if isinstance(tensors[0], DTensor):
        tensors = [t.full_tensor() for t in tensors]
    stacked = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tuple(tensors))
    return stacked.resolve_conj().resolve_neg()


def write(tensors: list[Any], stacked: Tensor) -> None:
    """Copy ``stacked[i]`` into ``tensors[i]``, rounding; each rank of a ``DTensor`` keeps its own shard."""
    parts = list(stacked.resolve_conj().unbind(0))
    if isinstance(tensors[0], DTensor):
        parts = [shard_like(t, part).to_local() for t, part in zip(tensors, parts, strict=True)]
        tensors = [t.to_local() for t in tensors]
    if stacked.is_complex():  # inductor has no complex _foreach_copy_
        tensors = [torch.view_as_real(t) for t in tensors]
        parts = [torch.view_as_real(part) for part in parts]
    torch._foreach_copy_(tensors, parts)


def shard_like(t: Tensor, whole: Tensor) -> Any:
    """``whole`` in the dtype of ``t``, laid out as ``t`` is; every rank holds ``whole``, so that nothing is sent."""
    whole = whole.to(t.dtype)
    if not isinstance(t, DTensor):
        return whole
    return distribute_tensor(whole, t.device_mesh, t.placements, src_data_rank=None)


class Bucket:
    """P parameters of one manifold, shape, dtype and device, with the optimizer state that belongs to them.

    The state of a parameter, ``state[p][name]``, is row i of one persistent stack per name; a row that somebody has
    replaced (``load_state_dict`` does) is noticed and taken over at the next :meth:`gather`.
    """

    def __init__(self, manifold: Manifold, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self.manifold, self.params, self.states = manifold, list(params), list(states)
        self.as_reals = manifold.event_dim == 0 and params[0].is_complex()
        self.stacks: dict[str, Tensor] = {}
        self.rows: dict[str, tuple[Tensor, ...]] = {}
        self.touched: Tensor | None = None

    def gather(self, sparse: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Points x and gradients g, both ``(P, *B, *S)``, and the state, a dict of stacks ``(P, ...)``.

        Of a single parameter they share its memory, and the state is the stored one: compute out of place. With
        ``sparse``, of a table (V, ...) whose gradient is sparse, in rows that are points, only the k rows that it
        touches: ``(1, k, ...)``, and so in the state, except for what is one number.
        """
        params: list[Any] = self.params
        grads: list[Any] = [p.grad for p in params]
        self.touched = None
        if sparse and grads[0].is_sparse and grads[0].sparse_dim() == 1 and params[0].dim() > self.manifold.event_dim:
            (g,) = grads = [grads[0].coalesce()]
            self.touched = g.indices()[0]
            params, grads = [params[0].index_select(0, self.touched)], [g.values()]
        x, g = self._open(stack(params)), self._open(stack(grads))
        for name in self.states[0]:
            present = map(operator.itemgetter(name), self.states)
            if name not in self.rows or not all(map(operator.is_, present, self.rows[name])):
                self._keep(name, stack([s[name] for s in self.states]).to(x.device, copy=True))
        return x, g, {name: self._open(self._part(self.stacks[name])) for name in self.states[0]}

    def scatter(self, y: Tensor, state: dict[str, Tensor]) -> None:
        """Write the new points and the new state into the memory that holds the old ones."""
        points = torch.view_as_complex(y.contiguous()) if self.as_reals else y
        rows = self.touched
        if rows is None:
            write(self.params, points)
        else:
            self.params[0].index_copy_(0, rows, points[0].to(self.params[0].dtype))
        for name, value in state.items():
            if self.as_reals and value.shape == y.shape:
                value = torch.view_as_complex(value.contiguous())
            if rows is not None and value.dim() > 1:
                if name not in self.stacks:
                    self._keep(name, value.new_zeros(1, len(self.params[0]), *value.shape[2:]))
                self.stacks[name].index_copy_(1, rows, value.to(self.stacks[name].dtype))
            elif name in self.stacks:
                self.stacks[name].copy_(value)
            else:
                self._keep(name, value.clone(memory_format=torch.contiguous_format))

    def _part(self, stored: Tensor) -> Tensor:
        return stored if self.touched is None or stored.dim() == 1 else stored.index_select(1, self.touched)

    def _open(self, stored: Tensor) -> Tensor:
        stored = widen(stored)
        return torch.view_as_real(stored) if self.as_reals and stored.is_complex() else stored

    def _keep(self, name: str, own: Tensor) -> None:
        self.stacks[name], self.rows[name] = own, own.unbind(0)
        for s, row in zip(self.states, self.rows[name], strict=True):
            s[name] = row


class Buckets:
    """The parameters of one group that have a gradient, as buckets; planned anew when membership or manifold change."""

    def __init__(self) -> None:
        self.signature: list[Any] = []
        self.buckets: list[Bucket] = []

    def of(self, group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]]) -> list[Bucket]:
        params = [p for p in group["params"] if p.grad is not None]
        states = [state[p] for p in params]
        layouts = [p.grad.layout for p in params]
        signature = [group["manifold"], *layouts, *map(id, params), *map(id, states), *map(len, states)]
        if signature != self.signature:
            self.buckets = [
                Bucket(group["manifold"], chunk, [state[p] for p in chunk])
                for chunk in partition(group["manifold"], params, lambda p: frozenset(state[p]))
            ]
            self.signature = signature
        return self.buckets


def partition(
    manifold: Manifold, params: Sequence[Any], key: Callable[[Any], Any] = lambda p: None
) -> list[list[Tensor]]:
    """``params``, all with gradients, in lists that can be stacked, of at most ``CHUNK_BYTES`` and of one ``key(p)``.

    One whose gradient is sparse is alone, since others touch other rows.

    Raises ``ValueError`` for a shape that the manifold refuses.
    """
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for p in params:
        manifold.check_shape(tuple(p.shape))
        alike.setdefault((p.shape, p.dtype, p.device, type(p.grad), p.grad.layout, key(p)), []).append(p)
    chunks = []
    for members in alike.values():
        size = max(1, CHUNK_BYTES // max(1, members[0].numel() * members[0].element_size()))
        size = 1 if members[0].grad.is_sparse else size
        chunks += [members[start : start + size] for start in range(0, len(members), size)]
    return chunks
