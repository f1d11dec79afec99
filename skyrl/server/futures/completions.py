"""The types of the long poll for all samples of a sampling client: which client asks, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass

CLONE_BLOCK = 1_000_000_000
"""Each copy of a sampling client numbers its samples in a block of this size. The block tells which copy it is."""


@dataclass(frozen=True, slots=True)
class Target:
    """One sampling client: its sampling session, and the number of its copy (0: the first)."""

    session_id: str
    sampling_session_id: str
    clone: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended. `size` is the size of its result in bytes, None for a sample that failed. `ended_at` is
    the time in its row, in seconds since the epoch."""

    request_id: str
    size: int | None
    ended_at: float

    @property
    def cursor(self) -> int:
        """The cursor of a client that was told of this sample: `ended_at` in microseconds. No two samples have the same
        cursor, because the database keeps their ends at least 2 µs apart."""
        return round(self.ended_at * 1e6)


class TargetGone(Exception):
    """The session of the polling client has ended."""


def clone_of(seq_id: int | None) -> int:
    """The copy of a sampling client whose block contains this number of a sample."""
    return 0 if seq_id is None else seq_id // CLONE_BLOCK


def block_of(clone: int) -> tuple[int | None, int]:
    """The block [first, end) of one copy. In the block of copy 0 `first` is None: samples without a number belong to
    it, too."""
    return (None if clone == 0 else clone * CLONE_BLOCK), (clone + 1) * CLONE_BLOCK
