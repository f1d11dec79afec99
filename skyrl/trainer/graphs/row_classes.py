"""Row counts in a few classes: a micro-batch is padded to the smallest class that holds its rows.

A graph has fixed shapes, so there is one for each class. Few classes cost padding; many cost captures. Row counts of
micro-batches cluster: near the budget, and near the size of each tenant's passes. So classes that fit the counts of a
training cost a fraction of those in a geometric sequence. Knows numbers. Knows nothing of tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

MULTIPLE = 64
"""Classes are multiples of this: a matrix product on a GPU computes tiles of at least 64 rows anyhow."""


@dataclass(frozen=True)
class RowClasses:
    """`sizes`: rows of each class, ascending. More rows than the largest have no class."""

    sizes: tuple[int, ...]

    def of(self, rows: int) -> int | None:
        """The rows of the smallest class that holds `rows` rows; None above the largest."""
        place = bisect_left(self.sizes, rows)
        return self.sizes[place] if place < len(self.sizes) else None

    @classmethod
    def fitting(cls, counts: Sequence[int], number: int) -> Self:
        """The at most `number` classes that add the fewest rows to these counts, found by dynamic programming over the
        distinct counts. The largest count has a class."""
        distinct, repeats = np.unique([_up(rows) for rows in counts], return_counts=True)
        up_to = np.cumsum(repeats)
        cost = distinct * up_to  # of one class: all counts up to it have its rows
        chosen: list[np.ndarray] = []
        for _ in range(min(number, len(distinct)) - 1):
            # [last count of the new class, last count of the class below]
            added = distinct[:, None] * (up_to[:, None] - up_to[None]) + cost[None]
            added[np.triu_indices(len(distinct), 0)] = np.iinfo(np.int64).max
            below = added.argmin(axis=1)
            more = added[np.arange(len(distinct)), below]
            chosen.append(np.where(more < cost, below, -1))
            cost = np.minimum(cost, more)
        sizes, last = [int(distinct[-1])], len(distinct) - 1
        for below in reversed(chosen):
            if below[last] >= 0:
                last = int(below[last])
                sizes.append(int(distinct[last]))
        return cls(tuple(sorted(sizes)))


class LearnedClasses:
    """Classes that follow the row counts of the running training.

    The first `LEARNING` counts have no class. Then at most `number` classes fit them. After each `LEARNING` further
    counts the classes are chosen again, if the last `REMEMBERED` counts would lose `WORTH` fewer rows with other
    classes; a count without a class loses all its rows. `generation` counts the choices: with each, graphs of earlier
    classes are of no use."""

    LEARNING, REMEMBERED, WORTH = 32, 256, 0.15

    def __init__(self, most: int, number: int = 6) -> None:
        """`most`: larger micro-batches never get a class; their operations keep the device busy without graphs."""
        self._most, self._number = most, number
        self._counts: deque[int] = deque(maxlen=self.REMEMBERED)
        self._since = 0
        self.classes = RowClasses(())
        self.generation = 0

    def of(self, rows: int) -> int | None:
        """The class of the next micro-batch, which is remembered."""
        if rows > self._most:
            return None
        self._counts.append(rows)
        self._since += 1
        if self._since == self.LEARNING:
            self._since = 0
            self._choose()
        return self.classes.of(rows)

    def _choose(self) -> None:
        fitting = RowClasses.fitting(self._counts, self._number)
        if self._lost(self.classes) > self._lost(fitting) + self.WORTH:
            self.classes, self.generation = fitting, self.generation + 1

    def _lost(self, classes: RowClasses) -> float:
        """The rows that are padded or have no class, divided by all rows."""
        lost = sum(rows if (size := classes.of(rows)) is None else size - rows for rows in self._counts)
        return lost / sum(self._counts)


def _up(rows: float) -> int:
    return max(1, -int(-rows // MULTIPLE)) * MULTIPLE
