"""How a slice becomes rows: its sequences one after the other, common prefixes once, grouped for attention.

Laying out and grouping depend on one pass alone, so that its results do not depend on other passes. Knows lengths and
token ids. Knows nothing of adapters or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl.backends.base import Datum
from skyrl.backends.torch_lora.prefixes import Layout, lay_out, prefix_tree

_SHORTEST_IN_GROUP = 0.75
"""A segment joins an attention group if it has at least this share of the rows of the group's longest segment. So
padding is at most a third of the real rows."""


@dataclass(frozen=True)
class Prefix:
    """The rows before the segments of a group, in order: [first, first + length), or `rows`, int64 [length]."""

    length: int
    first: int
    rows: Tensor | None

    def last(self, count: int) -> Prefix | None:
        """The last `count` of them, all if there are fewer; None for no rows."""
        if count <= 0:
            return None
        skipped = max(0, self.length - count)
        rows = None if self.rows is None else self.rows[skipped:]
        return Prefix(self.length - skipped, self.first + skipped, rows)


@dataclass(frozen=True)
class AttentionGroup:
    """`count` segments of similar length that attend together, right-padded to `longest`. They attend to `prefix`, too.

    rows: int64 [segments' rows], their places in the micro-batch; cells: int64, the places of these rows in a flattened
    [count, longest] grid. Both are None when the rows [first, first + count * longest) fill the grid exactly.
    """

    count: int
    longest: int
    first: int
    rows: Tensor | None
    cells: Tensor | None
    prefix: Prefix | None


@dataclass(frozen=True)
class PackedSlice:
    """Rows [start, stop) of a micro-batch, which hold one slice. tokens, positions: int64 [stop - start]. `layout`: the
    rows of each sequence, counted from `start`."""

    start: int
    stop: int
    tokens: Tensor
    positions: Tensor
    groups: tuple[AttentionGroup, ...]
    layout: Layout


def cut(lengths: Sequence[int], budget: int) -> list[range]:
    """Consecutive ranges of items with at most `budget` rows each. A longer item has its own range."""
    runs: list[range] = []
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > budget:
            runs.append(range(first, index))
            first, total = index, 0
        total += length
    return [*runs, range(first, len(lengths))] if lengths else []


def pack_alone(data: Sequence[Datum], device: torch.device) -> PackedSlice:
    """Pack sequences that are no slice of a pass, from row 0."""
    return pack(data, lay_out(prefix_tree(data), range(len(data))), 0, device)


def pack(data: Sequence[Datum], layout: Layout, start: int, device: torch.device) -> PackedSlice:
    """The rows of one slice from row `start`. layout: of `data`."""
    tokens = layout.of_rows([datum.tokens for datum in data])
    positions = np.concatenate([segment.start + np.arange(segment.rows) for segment in layout.segments])
    return PackedSlice(
        start=start,
        stop=start + len(tokens),
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        groups=tuple(_groups(layout, start, device)),
        layout=layout,
    )


def _groups(layout: Layout, start: int, device: torch.device) -> Iterator[AttentionGroup]:
    segments = layout.segments
    of_parent: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        of_parent.setdefault(segment.parent, []).append(number)
    for siblings in of_parent.values():
        prefix = _prefix(layout, siblings[0], start, device)
        group: list[int] = []
        for number in sorted(siblings, key=lambda number: -segments[number].rows):
            if group and segments[number].rows < _SHORTEST_IN_GROUP * segments[group[0]].rows:
                yield _group(group, layout, prefix, start, device)
                group = []
            group.append(number)
        yield _group(group, layout, prefix, start, device)


def _prefix(layout: Layout, segment: int, start: int, device: torch.device) -> Prefix | None:
    rows = start + layout.path(segment)
    if not len(rows):
        return None
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return Prefix(len(rows), first, None)
    return Prefix(len(rows), first, torch.from_numpy(rows).to(device))


def _group(
    members: list[int], layout: Layout, prefix: Prefix | None, start: int, device: torch.device
) -> AttentionGroup:
    segments = [layout.segments[number] for number in members]
    longest = segments[0].rows
    rows = np.concatenate([start + segment.first + np.arange(segment.rows) for segment in segments])
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(members) * longest)):
        return AttentionGroup(len(members), longest, first, None, None, prefix)
    cells = np.concatenate([place * longest + np.arange(segment.rows) for place, segment in enumerate(segments)])
    return AttentionGroup(
        len(members),
        longest,
        first,
        torch.from_numpy(rows).to(device),
        torch.from_numpy(cells).to(device),
        prefix,
    )
