"""Which elements of each tensor a rank holds: a block of rows of every parameter, as FSDP2 divides them.

Knows shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


def rows_of(rows: int, rank: int, ranks: int) -> range:
    """The rows of a tensor that a rank holds: ceil(rows / ranks) of them. The last ranks have fewer, perhaps none."""
    share = -(-rows // ranks)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


@dataclass(frozen=True)
class Span:
    """`count` elements of the tensor `name`, from its element `begin` on. `place`: where they are in a rank's shard."""

    name: str
    begin: int
    place: int
    count: int


class ShardLayout:
    """How tensors are divided over ranks. A rank's shard is flat: its rows of the first tensor, then of the next."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> None:
        self.ranks = ranks
        self._spans = [list(_spans(shapes, rank, ranks)) for rank in range(ranks)]

    @property
    def longest(self) -> int:
        """The number of elements of the largest shard."""
        return max(sum(span.count for span in spans) for spans in self._spans)

    def spans(self, rank: int, start: int, stop: int) -> Iterator[Span]:
        """The spans that lie in [start, stop) of a rank's shard, in order; the first and the last one may be cut."""
        for span in self._spans[rank]:
            low, high = max(start, span.place), min(stop, span.place + span.count)
            if low < high:
                yield Span(span.name, span.begin + low - span.place, low, high - low)


def _spans(shapes: Mapping[str, tuple[int, ...]], rank: int, ranks: int) -> Iterator[Span]:
    place = 0
    for name, shape in shapes.items():
        rows, width = rows_of(shape[0], rank, ranks), math.prod(shape[1:])
        yield Span(name, rows.start * width, place, len(rows) * width)
        place += len(rows) * width
