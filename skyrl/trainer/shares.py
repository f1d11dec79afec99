"""Which share of the work a rank has: rows of each parameter, experts of each layer, rows of one long sequence.

Of a parameter it is a block of rows, as FSDP2 divides them. Of an adapter with experts, a rank's flat buffers have
everything that is no expert's, and of the experts the rank's own: so they are some parts of the whole adapter's
buffers, one after the other. Of a long sequence it is consecutive rows, about as many on every rank. Knows shapes and
numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


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


EXPERTS_NDIM = 3
"""Matrices of experts, [experts, ...], have a dimension more than others."""


@dataclass(frozen=True)
class ExpertShare:
    """The experts of rank `rank` of `ranks`: a block of each layer's. Blocks differ by one expert at most; with fewer
    experts than ranks some ranks hold none."""

    rank: int
    ranks: int

    def of(self, experts: int) -> range:
        """The numbers of this rank's experts of a layer."""
        return range(experts * self.rank // self.ranks, experts * (self.rank + 1) // self.ranks)

    def of_matrices(self, matrices: Tensor) -> Tensor:
        """A view of what this rank holds of an adapter's matrices."""
        if matrices.ndim != EXPERTS_NDIM:
            return matrices
        held = self.of(len(matrices))
        return matrices[held.start : held.stop]

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of `of_matrices`."""
        return (len(self.of(shape[0])), *shape[1:]) if len(shape) == EXPERTS_NDIM else shape

    def slices(self, shapes: Mapping[str, tuple[int, ...]]) -> list[slice]:
        """The parts of an adapter's whole flat buffer, ascending, that make this rank's buffer. shapes: of the whole
        adapter's matrices, in the order of its buffers."""
        found: list[slice] = []
        offset = 0
        for shape in shapes.values():
            held, width = range(shape[0]), math.prod(shape[1:])
            if len(shape) == EXPERTS_NDIM:
                held = self.of(shape[0])
            found.append(slice(offset + held.start * width, offset + held.stop * width))
            offset += math.prod(shape)
        return found


EVERY_EXPERT = ExpertShare(0, 1)


def common_numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many elements of an adapter belong to no expert. They come first in its buffers."""
    return sum(math.prod(shape) for shape in shapes.values() if len(shape) != EXPERTS_NDIM)


def join_buffers(
    parts: Sequence[npt.NDArray[np.float32]], shapes: Mapping[str, tuple[int, ...]]
) -> npt.NDArray[np.float32]:
    """The whole flat buffer from those of all ranks, by rank. What all ranks hold is rank 0's."""
    whole = np.empty(sum(math.prod(shape) for shape in shapes.values()), np.float32)
    for rank in reversed(range(len(parts))):
        offset = 0
        for place in ExpertShare(rank, len(parts)).slices(shapes):
            count = place.stop - place.start
            whole[place] = parts[rank][offset : offset + count]
            offset += count
    return whole


@dataclass(frozen=True)
class SequencePart:
    """Rank `rank` has the rows [bounds[rank], bounds[rank + 1]) of a sequence of bounds[-1] rows."""

    rank: int
    bounds: tuple[int, ...]

    @staticmethod
    def of(rows: int, rank: int, ranks: int) -> SequencePart:
        return SequencePart(rank, tuple(rows * each // ranks for each in range(ranks + 1)))

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def start(self) -> int:
        return self.bounds[self.rank]

    @property
    def stop(self) -> int:
        return self.bounds[self.rank + 1]

    @property
    def before(self) -> int | None:
        """The rank with the rows before this part; None for the first one."""
        return self.rank - 1 if self.rank else None

    @property
    def after(self) -> int | None:
        """The rank with the rows after this part; None for the last one."""
        return self.rank + 1 if self.rank + 1 < self.ranks else None

    @property
    def most_rows(self) -> int:
        """Of any rank. All ranks must decide alike whether they compute a layer again."""
        return max(self.rows_of(rank) for rank in range(self.ranks))

    def rows_of(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    @property
    def partner(self) -> int:
        """The rank as far from the last one as this rank is from the first: of both together, rows see as many rows
        before them as of any other two."""
        return self.ranks - 1 - self.rank

    def middle_of(self, rank: int) -> int:
        """Where the second half of a rank's rows begins."""
        return (self.bounds[rank] + self.bounds[rank + 1]) // 2
