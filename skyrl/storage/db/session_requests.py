"""The recorded requests of one session, without bodies and results, for a trace."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from skyrl.storage.db.futures import futures


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a session. `status` is pending, done or failed. Times are in seconds since the epoch;
    `completed_at` is None while the request is pending."""

    id: str
    kind: str
    model_id: str | None
    seq_id: int | None
    sampling_session_id: str | None
    sample_seq_id: int | None
    status: str
    error: str | None
    created_at: float
    completed_at: float | None


_COLUMNS = (
    futures.c.id,
    futures.c.kind,
    futures.c.model_id,
    futures.c.seq_id,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.status,
    futures.c.error,
    futures.c.created_at,
    futures.c.completed_at,
)


def requests_of_session(connection: Connection, session_id: str, newest: int) -> list[RecordedRequest]:
    """A session's `newest` requests, in order of arrival."""
    query = select(*_COLUMNS).where(futures.c.session_id == session_id).order_by(futures.c.n.desc()).limit(newest)
    return [RecordedRequest(*row) for row in reversed(connection.execute(query).all())]
