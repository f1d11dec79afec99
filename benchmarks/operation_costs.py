"""The FLOP of an operation, and the bytes that it must read from the device's memory and write to it.

FLOP are those of products and attention, by torch's formulas where it has one; others are limited by their bytes. Each
tensor of an operation is read or written once, also one that a cache may hold (an H100 has 50 MB of it). Knows torch's
operations. Knows nothing of layers or of a GPU's speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks import cuda_attention

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm", "add_grouped"}
"""The last one is the kernel `between.add_grouped`."""
VARLEN = {cuda_attention.VARLEN: 2, cuda_attention.VARLEN_BACKWARD: 5}
"""How many products of queries and keys, or as large ones, each makes."""
ATTENTION = {cuda_attention.FORWARD, cuda_attention.BACKWARD, *VARLEN}
_TAKES_SOME = {"index_select", "embedding", "gather", "index", "take"}
"""They read of their first tensor what they give."""
_CHANGES_SOME = {"index_add_": 3, "index_copy_": 2, "index_put_": 2, "_index_put_impl_": 2, "scatter_add_": 3}
"""They change a part of their first tensor. So often do they read or write as many bytes as they are given."""
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_ASKS_THE_SHAPE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like"}


@dataclass(frozen=True)
class Call:
    """An operation that has started. `func`: torch's operation; None for a kernel that is counted as one, which reads
    all that it is given and writes all that it gives."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any

    @property
    def given(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    @property
    def given_back(self) -> list[Tensor]:
        return _tensors(self.made)

    @property
    def tensors(self) -> list[Tensor]:
        return _once([*self.given, *self.given_back])

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor, in which products are computed."""
        return next((tensor.dtype for tensor in self.tensors), torch.float32)

    def flop(self) -> int:
        """Multiplications and additions; 0 for what is neither a product nor attention."""
        if self.name in ATTENTION:
            return _of_attention(self)
        if self.name == "add_grouped":
            out, x = self.args[:2]
            return 2 * out.numel() * x.shape[-1]
        if self.func is None:
            return 0
        if self.name == "_grouped_mm":
            one, other = self.args[:2]
            groups = len(one) if one.ndim == other.ndim == 3 else 1
            return 2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1]
        formula = flop_registry.get(getattr(torch.ops.aten, self._plain, None))
        return 0 if formula is None else int(formula(*self.args, **self.kwargs, out_val=self.made))

    @property
    def _plain(self) -> str:
        """The name without the mark of an operation in place, for which torch has no formula."""
        return self.name.removesuffix("_")

    def moved(self) -> int:
        """Bytes read plus bytes written."""
        written = [*self.given_back]
        changed = [] if self.func is None else list(self._changed())
        if self.name in _CHANGES_SOME:
            others = [tensor for tensor in self.given if not any(tensor is each for each in changed)]
            return _CHANGES_SOME[self.name] * max((size_of(each) for each in others), default=0)
        read = [] if self.name in _ASKS_THE_SHAPE else self.given
        if self.name in _OVERWRITES or "out" in self.kwargs:
            read = [tensor for tensor in read if not any(tensor is each for each in changed)]
        found = sum(map(size_of, _once([*written, *changed])))
        if self.name in _TAKES_SOME:
            return found + sum(map(size_of, written)) + sum(map(size_of, read[1:]))
        if self.name.startswith("_embedding_bag"):
            table, indices = read[:2]
            return size_of(written[0]) + size_of(indices) + len(indices) * size_of(table) // max(1, len(table))
        return found + sum(map(size_of, _once(read)))

    def _changed(self) -> Iterator[Tensor]:
        """The arguments that it changes in place."""
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[place] if place < len(self.args) else self.kwargs.get(argument.name)
                yield from _tensors(value)

    def sizes(self) -> tuple[int, int, int] | None:
        """(rows, numbers that are summed, columns) of a product; None if it is none."""
        if self._plain not in PRODUCTS:
            return None
        one, other = [tensor for tensor in self.given if tensor.ndim >= 1 and tensor.is_floating_point()][-2:]
        columns = 1 if other.ndim == 1 else other.shape[-1]
        return one.shape[-2], one.shape[-1], columns


def size_of(tensor: Tensor) -> int:
    """Bytes of the numbers that the tensor has in memory: those of an expanded dimension once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size]
    return math.prod(sizes) * tensor.dtype.itemsize


def _of_attention(call: Call) -> int:
    if call.name in VARLEN:
        pairs = next(each.pairs for each in call.args if hasattr(each, "pairs"))
        _, heads, size = call.args[0].shape  # of queries or of the result's gradient
        return 2 * VARLEN[call.name] * pairs * heads * size
    backward = call.name == cuda_attention.BACKWARD
    query, key, value = call.args[1:4] if backward else call.args[:3]
    heads = query.shape[1]
    shapes = [each.shape[:1] + (heads,) + each.shape[2:] for each in (query, key, value)]  # each head reads its keys
    whole = sdpa_backward_flop_count(call.args[0].shape, *shapes) if backward else sdpa_flop_count(*shapes)
    return whole // 2 if call.args[-1] else whole


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
