"""Samples of sampling clients: which are pending, which have ended, in the order in which they ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, func, select

from skyrl.db.futures import StoredFuture, futures


@dataclass(frozen=True, slots=True)
class EndedSample:
    """A sample that has ended. `size` is that of its result in bytes, None for a sample that failed; `ended_at` is in
    seconds since the epoch, and later than that of every sample that ended before."""

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
    """When the last request that is stored has ended, in seconds since the epoch; 0 if none is stored."""
    return connection.execute(_LAST_END).scalar() or 0.0


def ends_after(connection: Connection, after: float, most: int) -> list[EndedSample]:
    """The samples of all clients that ended after that moment, in the order of their ends, the first `most`."""
    return [_ended(row) for row in connection.execute(_ENDS_AFTER, {"after": after, "most": most})]


def _of_sampler(sampling_session_id: str, first_seq: int | None, end_seq: int) -> ColumnElement[bool]:
    """Samples of a sampling session numbered in [first_seq, end_seq). `first_seq` None: from 0 on, and those without a
    number."""
    number = futures.c.sample_seq_id
    mine = number < end_seq
    mine &= number >= first_seq if first_seq is not None else number >= 0
    if first_seq is None:
        mine |= number.is_(None)
    return and_(futures.c.sampling_session_id == sampling_session_id, mine)


def ended_of_sampler(
    connection: Connection,
    sampling_session_id: str,
    first_seq: int | None,
    end_seq: int,
    after: float,
    most: int,
) -> list[EndedSample]:
    """The samples of one sampling client that ended after that moment, in the order of their ends, the first `most`."""
    mine = _of_sampler(sampling_session_id, first_seq, end_seq)
    query = select(*_ENDED).where(mine, futures.c.completed_at > after)
    query = query.order_by(futures.c.completed_at, futures.c.n).limit(most)
    return [_ended(row) for row in connection.execute(query)]


def pending_of_sampler(
    connection: Connection, sampling_session_id: str, first_seq: int | None, end_seq: int
) -> list[StoredFuture]:
    """A sampling client's samples that have not ended."""
    columns = (
        futures.c.id,
        futures.c.kind,
        futures.c.tenant,
        futures.c.session_id,
        futures.c.digest,
        futures.c.sampling_session_id,
        futures.c.sample_seq_id,
        futures.c.owner,
    )
    mine = _of_sampler(sampling_session_id, first_seq, end_seq)
    rows = connection.execute(select(*columns).where(mine, futures.c.status == "pending"))
    return [StoredFuture(*row, outcome=None) for row in rows]
