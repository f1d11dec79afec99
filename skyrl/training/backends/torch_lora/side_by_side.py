"""Slices whose adapters are updated together: side by side in a micro-batch, with their matrices in stacks.

Knows adapters and rows. Knows nothing of layers, losses or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch

from skyrl.training.backends.torch_lora.adapter import Adapter
from skyrl.training.backends.torch_lora.adapter_stack import AdapterStack, grouped_rank
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.packing import PackedSlice
from skyrl.training.backends.torch_lora.running import Slice

MOST_PADDING = 4
"""Padding makes no adapter's matrices more than this many times larger, else it is updated with others or alone. The
low-rank products of its rows grow by the same factor. Ranks below 8 count as 8."""

Kind = tuple[int, tuple[str, ...]]
"""An adapter's rank, rounded up for grouped products, and the names of its layers."""


def _kind_of(adapter: Adapter) -> Kind | None:
    """None for an adapter that trains experts: it is updated alone."""
    if any(target.experts is not None for target in adapter.targets):
        return None
    return grouped_rank(adapter.spec.rank), tuple(target.name for target in adapter.targets)


def groups_of(adapters: Sequence[Adapter]) -> list[int | None]:
    """For each adapter the number of its group, whose adapters are updated together; None for one that is updated
    alone."""
    kinds = [_kind_of(adapter) for adapter in adapters]
    targets = [target for adapter in dict(zip(kinds, adapters, strict=True)).values() for target in adapter.targets]
    widths = {target.name: target.in_features + target.out_features for target in targets}

    def numel(*stacked: Kind) -> int:
        """Elements of one adapter in a stack of adapters of these kinds."""
        layers: set[str] = set().union(*(names for _, names in stacked))
        return max(rank for rank, _ in stacked) * sum(widths[name] for name in layers)

    groups: list[list[Kind]] = []
    for kind in sorted({kind for kind in kinds if kind is not None}, key=lambda kind: (numel(kind), kind)):
        fitting = (group for group in groups if numel(*group, kind) <= MOST_PADDING * numel(group[0]))
        if (group := next(fitting, None)) is None:
            groups.append([kind])
        else:
            group.append(kind)
    number_of = {kind: number for number, group in enumerate(groups) for kind in group}
    return [None if kind is None else number_of[kind] for kind in kinds]


def side_by_side(slices: Sequence[Slice]) -> list[Slice]:
    """The slices, those of one group next to each other, by rank. Slices of one adapter stay in their order."""
    first: dict[int | None, int] = {}
    groups = groups_of([piece.running.adapter for piece in slices])
    for number, group in enumerate(groups):
        first.setdefault(group, number)

    def place(number: int) -> tuple[int, int, int]:
        adapter = slices[number].running.adapter
        return first[groups[number]], adapter.spec.rank, len(adapter.targets)

    return [slices[number] for number in sorted(range(len(slices)), key=place)]


def together(slices: Sequence[Slice]) -> list[range]:
    """Consecutive slices whose adapters are updated together."""
    found: list[range] = []
    groups = groups_of([piece.running.adapter for piece in slices])
    for group, numbered in groupby(enumerate(groups), lambda each: each[1]):
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
