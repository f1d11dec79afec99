"""Slices whose adapters are updated together: side by side in a micro-batch, with their matrices in stacks.

Knows adapters and rows. Knows nothing of layers, losses or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch

from skyrl.training.backends.torch_lora.adapter import Adapter
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.lora_product import GROUPED_RANKS
from skyrl.training.backends.torch_lora.packing import PackedSlice
from skyrl.training.backends.torch_lora.running import Slice

Kind = tuple[int, float, tuple[str, ...]]
"""Rank, scale and layers: adapters for which these are equal can be updated together."""


def kind_of(adapter: Adapter) -> Kind | None:
    """None for an adapter that is updated alone: grouped products do not take its rank, or it trains experts."""
    if adapter.spec.rank % GROUPED_RANKS or any(target.experts is not None for target in adapter.targets):
        return None
    return adapter.spec.rank, adapter.scale, tuple(target.name for target in adapter.targets)


def side_by_side(slices: Sequence[Slice]) -> list[Slice]:
    """The slices, those of one kind next to each other. Slices of one adapter stay in their order."""
    first: dict[Kind | None, int] = {}
    kinds = [kind_of(piece.running.adapter) for piece in slices]
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    return [slices[number] for number in sorted(range(len(slices)), key=lambda number: first[kinds[number]])]


def together(slices: Sequence[Slice]) -> list[range]:
    """Consecutive slices whose adapters are updated together."""
    found: list[range] = []
    for kind, of_kind in groupby(range(len(slices)), lambda number: kind_of(slices[number].running.adapter)):
        numbers = [*of_kind]
        found += (
            [range(number, number + 1) for number in numbers] if kind is None else [range(numbers[0], numbers[-1] + 1)]
        )
    return found


def segment_of(
    slices: Sequence[Slice], packed: Sequence[PackedSlice], dtype: torch.dtype, *, backward: bool
) -> LoraSegment:
    """The rows of consecutive slices whose adapters are updated together, with leaves of `dtype` that the backward
    reaches."""
    adapters = [piece.running.adapter for piece in slices]
    start, stop, scale = packed[0].start, packed[-1].stop, adapters[0].scale
    if len(slices) == 1:
        return LoraSegment(start, stop, scale, adapters[0].leaves(backward, dtype))
    ends = torch.tensor([*accumulate(each.stop - each.start for each in packed)], dtype=torch.int32)
    pairs = Adapter.stacked_leaves(adapters, backward, dtype)
    return LoraSegment(start, stop, scale, pairs, ends.to(adapters[0].device))
