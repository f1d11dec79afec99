"""Samples of one sampling client: which are pending, which have ended, in which order."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, select

from skyrl.db.futures import futures


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
    since: float,
    limit: int | None = None,
) -> list[Any]:
    """A sampling client's samples that ended after `since`, in the order of their ends, the first `limit`, with the
    `size` of their results."""
    size = func.length(futures.c.result).label("size")
    query = select(futures.c.id, futures.c.status, futures.c.completed_at, size)
    mine = _of_sampler(sampling_session_id, first_seq, end_seq)
    query = query.where(mine, futures.c.completed_at > since).order_by(futures.c.completed_at, futures.c.n)
    return list(connection.execute(query if limit is None else query.limit(limit)))


def pending_of_sampler(
    connection: Connection, sampling_session_id: str, first_seq: int | None, end_seq: int
) -> list[Any]:
    """A sampling client's samples that have not ended, without their bodies."""
    columns = (
        futures.c.id,
        futures.c.kind,
        futures.c.tenant,
        futures.c.session_id,
        futures.c.digest,
        futures.c.sampling_session_id,
        futures.c.sample_seq_id,
    )
    mine = _of_sampler(sampling_session_id, first_seq, end_seq)
    return list(connection.execute(select(*columns).where(mine, futures.c.status == "pending")))
