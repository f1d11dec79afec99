"""Slices whose adapters are updated together: side by side in a micro-batch, with their matrices in stacks.

Knows adapters and rows. Knows nothing of layers, losses or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch

from skyrl.training.backends.torch_lora.adapter_stack import AdapterStack, grouped_rank
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.packing import PackedSlice
from skyrl.training.backends.torch_lora.running import Slice

_MOST_PADDING = 4
"""Adapters are updated together if none is padded to more than so many times its rank. The products of a padded
adapter then take no more than this many times the operations that they need, and its matrices as much more memory."""

Group = tuple[int, tuple[str, ...]]
"""The lowest rank and the layers of adapters that are updated together."""


def _groups(slices: Sequence[Slice]) -> list[Group | None]:
    """Of each slice's adapter; None for one that trains experts: it is updated alone."""
    adapters = [piece.running.adapter for piece in slices]
    lowest: dict[int, int] = {}
    first = 0
    for rank in sorted({grouped_rank(adapter.spec.rank) for adapter in adapters}):
        if rank > _MOST_PADDING * first:
            first = rank
        lowest[rank] = first
    return [
        None
        if any(target.experts is not None for target in adapter.targets)
        else (lowest[grouped_rank(adapter.spec.rank)], tuple(target.name for target in adapter.targets))
        for adapter in adapters
    ]


def side_by_side(slices: Sequence[Slice]) -> list[Slice]:
    """The slices, those of one group next to each other. Slices of one adapter stay in their order."""
    first: dict[Group | None, int] = {}
    groups = _groups(slices)
    for number, group in enumerate(groups):
        first.setdefault(group, number)
    return [slices[number] for number in sorted(range(len(slices)), key=lambda number: first[groups[number]])]


def together(slices: Sequence[Slice]) -> list[range]:
    """Consecutive slices whose adapters are updated together."""
    found: list[range] = []
    for group, numbered in groupby(enumerate(_groups(slices)), lambda each: each[1]):
        numbers = [number for number, _ in numbered]
        found += (
            [range(number, number + 1) for number in numbers] if group is None else [range(numbers[0], numbers[-1] + 1)]
        )
    return found


def segment_of(
    slices: Sequence[Slice], packed: Sequence[PackedSlice], dtype: torch.dtype, *, backward: bool
) -> LoraSegment:
    """The rows of consecutive slices whose adapters are updated together, with leaves of `dtype` that the backward
    reaches."""
    adapters = [piece.running.adapter for piece in slices]
    start, stop = packed[0].start, packed[-1].stop
    if len(slices) == 1:
        return LoraSegment(start, stop, adapters[0].scale, adapters[0].leaves(backward, dtype))
    ends = torch.tensor([*accumulate(each.stop - each.start for each in packed)], dtype=torch.int32)
    stack = AdapterStack(adapters)
    return LoraSegment(start, stop, 1.0, stack.leaves(backward, dtype), ends.to(adapters[0].device), stack)
