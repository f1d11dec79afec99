"""What the long poll for all samples of a sampling client is about: whose samples, and what is told of an end."""

from __future__ import annotations

from dataclasses import dataclass

CLONE_BLOCK = 1_000_000_000
"""Copies of a sampling client number their samples in blocks of this size; the block says which copy."""


@dataclass(frozen=True, slots=True)
class Target:
    """One sampling client: its sampling session, and which copy of the client it is (0: the first)."""

    session_id: str
    sampling_session_id: str
    clone: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended. `size` is that of its result in bytes, None for a sample that failed; `ended_at` is in
    seconds since the epoch, as the database has it."""

    request_id: str
    size: int | None
    ended_at: float

    @property
    def cursor(self) -> int:
        """Where a client reads on that was told this: the moment of the end in microseconds since the epoch. The
        database keeps two ends 2 µs apart, so no two have the same cursor."""
        return round(self.ended_at * 1e6)


class TargetGone(Exception):
    """The session has ended, and its samples with it."""


def clone_of(seq_id: int | None) -> int:
    """Which copy of a sampling client a sample's number belongs to."""
    return 0 if seq_id is None else seq_id // CLONE_BLOCK


def block_of(clone: int) -> tuple[int | None, int]:
    """The numbers [first, end) of one copy's samples; the first copy's begin with None, for those without a number."""
    return (None if clone == 0 else clone * CLONE_BLOCK), (clone + 1) * CLONE_BLOCK
