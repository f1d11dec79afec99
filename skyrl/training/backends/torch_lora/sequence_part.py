"""The part of one long sequence that a rank computes: consecutive rows, about as many on every rank.

Knows numbers of rows and ranks. Knows nothing of tokens, adapters or what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass


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
