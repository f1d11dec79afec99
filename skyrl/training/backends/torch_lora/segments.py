"""Segments of rows: which ones attend together, and how many copies of a shared prefix that takes.

Knows numbers of rows. Knows nothing of torch, tokens or adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORTEST_IN_GROUP = 0.75
"""A segment joins an attention group if it has at least this share of the rows of the group's longest segment. So
padding is at most a third of the real rows."""
_BUNDLE = 3 / 8
"""Segments after a shared prefix are bundled up to this share of the prefix's rows."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows [first, first + rows) of a layout. `parent`: the segment before them in every sequence that has
    them, -1 for none. `start`: the position of the first row in its sequences."""

    first: int
    rows: int
    parent: int
    start: int


def similar(segments: Sequence[Segment]) -> Iterator[list[int]]:
    """Consecutive segments with one parent and similar lengths, the longest first: the attention groups."""
    group: list[int] = []
    for number, segment in enumerate(segments):
        longest = segments[group[0]] if group else segment
        if segment.parent != longest.parent or segment.rows < SHORTEST_IN_GROUP * longest.rows:
            yield group
            group = []
        group.append(number)
    yield group


def bundled(count: int, longest: int, before: int) -> int:
    """How many of a group's `count` segments form a bundle, behind a prefix of `before` rows. Each bundle has a copy of
    the keys and values of the prefix, and its segments' rows are masked from each other: more segments need less memory
    for copies and more products for nothing."""
    bundles = -(-count // max(1, round(_BUNDLE * before / longest)))
    return -(-count // bundles)


def copied_rows(segments: Sequence[Segment]) -> int:
    """How many rows of keys and values each layer copies: the prefix of each bundle. A sliding window copies fewer."""
    copies = 0
    for members in similar(segments):
        first = segments[members[0]]
        if first.start:
            copies += -(-len(members) // bundled(len(members), first.rows, first.start)) * first.start
    return copies
