"""How passes become rows: cut a pass into slices, lay sequences end to end, group sequences for attention.

Cutting and grouping depend on one pass alone, so that its results do not depend on other passes. Knows lengths and
token ids. Knows nothing of adapters or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl.backends.base import Datum
from skyrl.backends.torch_lora.routed_experts import experts_of_rows

_SHORTEST_IN_GROUP = 0.75
"""A sequence joins an attention group if it has at least this share of the length of the group's longest sequence. So
padding is at most a third of the real tokens."""


@dataclass(frozen=True)
class AttentionGroup:
    """`count` sequences of similar length that attend together, right-padded to `longest`.

    rows: int64 [tokens], the tokens' places in the micro-batch; cells: int64 [tokens], the tokens' places in a
    flattened [count, longest] grid. Both are None when the rows [first, first + count * longest) fill the grid exactly.
    """

    count: int
    longest: int
    first: int
    rows: Tensor | None
    cells: Tensor | None


@dataclass(frozen=True)
class PackedSlice:
    """Rows [start, stop) of a micro-batch, which hold one slice. tokens, positions: int64 [stop - start]. experts:
    int32 [stop - start, at least layers * k], the experts that each row must use (-1: any); None if no sequence names
    any."""

    start: int
    stop: int
    tokens: Tensor
    positions: Tensor
    groups: tuple[AttentionGroup, ...]
    experts: Tensor | None = None


def cut(lengths: Sequence[int], budget: int) -> list[range]:
    """Consecutive ranges of items with at most `budget` tokens each. A longer item has its own range."""
    runs: list[range] = []
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > budget:
            runs.append(range(first, index))
            first, total = index, 0
        total += length
    return [*runs, range(first, len(lengths))] if lengths else []


def pack(data: Sequence[Datum], start: int, device: torch.device) -> PackedSlice:
    """Lay the sequences of one slice end to end from row `start`; positions restart with every sequence."""
    lengths = [len(datum.tokens) for datum in data]
    tokens = np.concatenate([datum.tokens for datum in data])
    positions = np.concatenate([np.arange(length) for length in lengths])
    experts = experts_of_rows(data)
    return PackedSlice(
        start=start,
        stop=start + len(tokens),
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        groups=tuple(_groups(lengths, start, device)),
        experts=None if experts is None else torch.from_numpy(experts).to(device),
    )


def _groups(lengths: Sequence[int], start: int, device: torch.device) -> Iterator[AttentionGroup]:
    starts = start + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    group: list[int] = []
    for index in longest_first:
        if group and lengths[index] < _SHORTEST_IN_GROUP * lengths[group[0]]:
            yield _group(group, starts, lengths, device)
            group = []
        group.append(index)
    yield _group(group, starts, lengths, device)


def _group(members: list[int], starts: np.ndarray, lengths: Sequence[int], device: torch.device) -> AttentionGroup:
    longest = lengths[members[0]]
    rows = np.concatenate([starts[index] + np.arange(lengths[index]) for index in members])
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(members) * longest)):
        return AttentionGroup(len(members), longest, first, None, None)
    cells = np.concatenate([place * longest + np.arange(lengths[index]) for place, index in enumerate(members)])
    return AttentionGroup(
        len(members), longest, first, torch.from_numpy(rows).to(device), torch.from_numpy(cells).to(device)
    )
