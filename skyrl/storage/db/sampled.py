"""The samples of sampling clients: those that are pending, and those that have ended in the order of their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, func, select

from skyrl.storage.db.futures import REQUEST, StoredFuture, futures


@dataclass(frozen=True, slots=True)
class EndedSample:
    """A sample that has ended. `size` is the size of its result in bytes, None for a sample that failed. `ended_at` is
    in seconds since the epoch, and later than the end of every earlier sample."""

    request_id: str
    session_id: str
    sampling_session_id: str
    sample_seq_id: int | None
    size: int | None
    ended_at: float


_ENDED = (
    futures.c.id,
    futures.c.session_id,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.status,
    futures.c.completed_at,
    func.length(futures.c.result).label("size"),
)
_ENDS_AFTER = (
    select(*_ENDED)
    .where(futures.c.completed_at > bindparam("after"), futures.c.sampling_session_id.is_not(None))
    .order_by(futures.c.completed_at)
    .limit(bindparam("most"))
)
_LAST_END = select(func.max(futures.c.completed_at))


def _ended(row: Any) -> EndedSample:
    size = None if row.status == "failed" else row.size or 0
    return EndedSample(row.id, row.session_id, row.sampling_session_id, row.sample_seq_id, size, row.completed_at)


def last_end(connection: Connection) -> float:
    """The end of the stored request that ended last, in seconds since the epoch; 0 if none has ended."""
    return connection.execute(_LAST_END).scalar() or 0.0


def ends_after(connection: Connection, after: float, most: int) -> list[EndedSample]:
    """The first `most` samples of all clients that ended after `after`, in the order of their ends."""
    return [_ended(row) for row in connection.execute(_ENDS_AFTER, {"after": after, "most": most})]


def _of_sampler(sampling_session_id: str, first_seq: int | None, end_seq: int) -> ColumnElement[bool]:
    """The condition that a sample belongs to this sampling session and has a number in [first_seq, end_seq). If
    `first_seq` is None: in [0, end_seq), or no number."""
    number = futures.c.sample_seq_id
    in_block = number < end_seq
    in_block &= number >= first_seq if first_seq is not None else number >= 0
    if first_seq is None:
        in_block |= number.is_(None)
    return and_(futures.c.sampling_session_id == sampling_session_id, in_block)


def ended_of_sampler(
    connection: Connection,
    sampling_session_id: str,
    first_seq: int | None,
    end_seq: int,
    after: float,
    most: int,
) -> list[EndedSample]:
    """The first `most` samples of one sampling client that ended after `after`, in the order of their ends."""
    of_client = _of_sampler(sampling_session_id, first_seq, end_seq)
    query = select(*_ENDED).where(of_client, futures.c.completed_at > after)
    query = query.order_by(futures.c.completed_at, futures.c.n).limit(most)
    return [_ended(row) for row in connection.execute(query)]


def pending_of_sampler(
    connection: Connection, sampling_session_id: str, first_seq: int | None, end_seq: int
) -> list[StoredFuture]:
    """A sampling client's samples that have not ended."""
    of_client = _of_sampler(sampling_session_id, first_seq, end_seq)
    rows = connection.execute(select(*REQUEST).where(of_client, futures.c.status == "pending"))
    return [StoredFuture(*row, outcome=None) for row in rows]
