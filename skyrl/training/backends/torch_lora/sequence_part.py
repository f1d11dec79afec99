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

    def reach(self, window: int | None) -> int:
        """How many ranks before its own a rank may attend to with a sliding window of so many tokens; the same on
        every rank."""
        if window is None:
            return self.ranks - 1
        fewest = min(self.rows_of(rank) for rank in range(self.ranks))
        return min(self.ranks - 1, -(-(window - 1) // fewest))
