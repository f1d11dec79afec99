"""The samples of one sampling client: those that are pending, and those that have ended in the order of their ends."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, select

from skyrl.db.futures import StoredFuture, futures


@dataclass(frozen=True, slots=True)
class EndedSample:
    """A sample that has ended, at `completed_at` (seconds since the epoch). `size` is the length of its result in
    bytes; None for a sample that failed."""

    id: str
    size: int | None
    completed_at: float


def _of_client(sampling_session_id: str, first_seq: int | None, end_seq: int) -> ColumnElement[bool]:
    """Samples of a sampling session with numbers in [first_seq, end_seq). With `first_seq` None: numbers from 0 on, and
    samples without a number."""
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
    since: float,
    limit: int | None = None,
) -> list[EndedSample]:
    """A sampling client's samples that ended after `since`, in the order of their ends: the first `limit`, or all."""
    size = func.length(futures.c.result).label("size")
    query = select(futures.c.id, futures.c.status, futures.c.completed_at, size)
    mine = _of_client(sampling_session_id, first_seq, end_seq)
    query = query.where(mine, futures.c.completed_at > since).order_by(futures.c.completed_at, futures.c.n)
    rows = connection.execute(query if limit is None else query.limit(limit))
    return [EndedSample(row.id, None if row.status == "failed" else row.size or 0, row.completed_at) for row in rows]


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
    mine = _of_client(sampling_session_id, first_seq, end_seq)
    rows = connection.execute(select(*columns).where(mine, futures.c.status == "pending"))
    return [StoredFuture(*row, outcome=None) for row in rows]
