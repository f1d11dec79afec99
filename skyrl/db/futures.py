"""Statements on the futures table: record, find and settle requests. One row is one request.

To settle a request is to store its outcome. A row that has an outcome never gets another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    and_,
    bindparam,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)

from skyrl.db.ended_at import EndedAt
from skyrl.db.tables import FutureRow
from skyrl.db.writer import RowStatement
from skyrl.types.command import Command, ExecutedCommand
from skyrl.types.kinds import Kind
from skyrl.wire.errors import ErrorCategory

futures = FutureRow.__table__  # type: ignore[attr-defined]

_RECORDED = (
    futures.c.id,
    futures.c.kind,
    futures.c.tenant,
    futures.c.session_id,
    futures.c.model_id,
    futures.c.seq_id,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.digest,
    futures.c.body,
    futures.c.body_format,
    futures.c.status,
    futures.c.created_at,
    futures.c.owner,
    futures.c.not_before,
)
RECORD = RowStatement(insert(futures).values({column: bindparam(column.key) for column in _RECORDED}))
"""Adds one row. The parameters are the columns of a request that is not settled."""

SETTLE = (
    update(futures)
    .where(futures.c.id == bindparam("request_id"), futures.c.status == literal_column("'pending'"))
    .values(
        status=bindparam("new_status"),
        result=bindparam("new_result"),
        result_format=bindparam("new_result_format"),
        error=bindparam("new_error"),
        error_category=bindparam("new_error_category"),
        completed_at=EndedAt(bindparam("new_completed_at", type_=Float())),
    )
)
"""Stores one outcome. `settlement` makes the parameters. Changes no row that is deleted or settled already."""

SETTLE_SAMPLE = RowStatement(SETTLE.values(body=null()))
"""SETTLE for a forwarded sample. It also deletes the body, which nobody reads again."""

MAX_NAMED = 500
"""The most ids in one query."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: a result with its format, or an error with its category. PostgreSQL stores no text with the
    character U+0000, so an error spells it `\\0`."""

    result: bytes = b""
    result_format: str = "json"
    error: str | None = None
    error_category: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None and "\0" in self.error:
            object.__setattr__(self, "error", self.error.replace("\0", "\\0"))


SESSION_ENDED = Outcome(error="the session has ended", error_category=ErrorCategory.USER)
"""The outcome of requests that are pending when their session finishes or expires."""


@dataclass(frozen=True, slots=True)
class StoredFuture:
    """A recorded request without its body. `outcome` is None while the request is pending."""

    id: str
    kind: str
    tenant: str
    session_id: str
    digest: bytes
    sampling_session_id: str | None
    sample_seq_id: int | None
    owner: str | None
    outcome: Outcome | None


def settlement(request_id: str, outcome: Outcome, now: float) -> dict[str, Any]:
    """The parameters of SETTLE and SETTLE_SAMPLE. `now` is in seconds since the epoch."""
    return {
        "request_id": request_id,
        "new_status": "done" if outcome.error is None else "failed",
        "new_result": outcome.result if outcome.error is None else None,
        "new_result_format": outcome.result_format,
        "new_error": outcome.error,
        "new_error_category": outcome.error_category,
        "new_completed_at": now,
    }


_STORED = (
    futures.c.id,
    futures.c.kind,
    futures.c.tenant,
    futures.c.session_id,
    futures.c.digest,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.owner,
    futures.c.status,
    futures.c.result,
    futures.c.result_format,
    futures.c.error,
    futures.c.error_category,
)


def _stored(row: Any) -> StoredFuture:
    outcome = None
    if row.status != "pending":
        outcome = Outcome(row.result or b"", row.result_format or "json", row.error, row.error_category)
    return StoredFuture(
        row.id,
        row.kind,
        row.tenant,
        row.session_id,
        row.digest,
        row.sampling_session_id,
        row.sample_seq_id,
        row.owner,
        outcome,
    )


def _find(connection: Connection, where: ColumnElement[bool]) -> list[StoredFuture]:
    return [_stored(row) for row in connection.execute(select(*_STORED).where(where))]


def find(connection: Connection, request_id: str) -> StoredFuture | None:
    return next(iter(_find(connection, futures.c.id == request_id)), None)


def find_settled(connection: Connection, request_ids: Sequence[str]) -> list[StoredFuture]:
    """Those of `request_ids` that have an outcome."""
    return _find(connection, and_(futures.c.id.in_(request_ids), futures.c.status != "pending"))


def ended_among(connection: Connection, request_ids: Sequence[str]) -> list[str]:
    """Those of `request_ids` that are stored and not pending. Reads indexes only: the status is stored after the body,
    so reading it from the row would read a body of megabytes."""
    pending = select(futures.c.n).where(futures.c.status == "pending")
    ended: list[str] = []
    for start in range(0, len(request_ids), MAX_NAMED):
        named = futures.c.id.in_(request_ids[start : start + MAX_NAMED])
        ended += connection.execute(select(futures.c.id).where(named, futures.c.n.not_in(pending))).scalars()
    return ended


def find_command(connection: Connection, model_id: str, seq_id: int) -> StoredFuture | None:
    where = and_(futures.c.model_id == model_id, futures.c.seq_id == seq_id)
    return next(iter(_find(connection, where)), None)


def find_sample(connection: Connection, sampling_session_id: str, seq_id: int) -> StoredFuture | None:
    where = and_(futures.c.sampling_session_id == sampling_session_id, futures.c.sample_seq_id == seq_id)
    return next(iter(_find(connection, where)), None)


def record(connection: Connection, parameters: dict[str, Any]) -> None:
    """RECORD in a transaction of the caller."""
    connection.execute(RECORD.statement, parameters)


def highest_seq(connection: Connection, model_id: str) -> int:
    """The highest seq_id that is recorded for a model; -1 if there is none."""
    row = connection.execute(select(func.max(futures.c.seq_id)).where(futures.c.model_id == model_id)).first()
    return -1 if row is None or row[0] is None else int(row[0])


_HEADER = (
    futures.c.n,
    futures.c.id,
    futures.c.kind,
    futures.c.tenant,
    futures.c.session_id,
    futures.c.model_id,
    futures.c.seq_id,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.body_format,
    func.length(futures.c.body).label("size"),
    futures.c.not_before,
)


_PENDING = (
    select(*_HEADER)
    .where(
        futures.c.status == "pending",
        futures.c.n > bindparam("after"),
        futures.c.kind.in_(bindparam("kinds", expanding=True)),
    )
    .order_by(futures.c.n)
)


def _command(row: Any) -> Command:
    return Command(
        row.n,
        row.id,
        Kind(row.kind),
        row.tenant,
        row.session_id,
        row.model_id,
        row.seq_id,
        row.sampling_session_id,
        row.sample_seq_id,
        row.body_format,
        row.size or 0,
        row.not_before,
    )


def pending(connection: Connection, kinds: Sequence[str], after: int = 0) -> list[Command]:
    """Pending requests of these kinds that arrived after row number `after`, in order of arrival, without bodies.

    `after` must be the number of a row that is still stored, or 0: SQLite gives the number of a deleted last row to the
    next one.
    """
    return [_command(row) for row in connection.execute(_PENDING, {"kinds": kinds, "after": after})]


def executed(connection: Connection, model_id: str, first_seq: int) -> list[ExecutedCommand]:
    """A model's commands from number `first_seq` on that have changed the model, in their order. Recovery repeats them.

    These are the commands that succeeded, and optimizer steps that failed by the caller's fault: a step whose gradient
    is not finite drops the gradient. A failure by the server's fault left the model as it was.
    """
    dropped = and_(
        futures.c.status == "failed",
        futures.c.kind == Kind.OPTIM_STEP,
        futures.c.error_category == ErrorCategory.USER,
    )
    changed = or_(futures.c.status == "done", dropped)
    query = (
        select(*_HEADER, futures.c.status, futures.c.completed_at)
        .where(futures.c.model_id == model_id, futures.c.seq_id >= first_seq, changed)
        .order_by(futures.c.seq_id)
    )
    return [ExecutedCommand(_command(row), row.status, row.completed_at) for row in connection.execute(query)]


def highest_settled_seq(connection: Connection, model_id: str) -> int:
    """The highest seq_id of a model that has an outcome; -1 if there is none."""
    row = connection.execute(
        select(func.max(futures.c.seq_id)).where(futures.c.model_id == model_id, futures.c.status != "pending")
    ).first()
    return -1 if row is None or row[0] is None else int(row[0])


_BODIES = select(futures.c.id, futures.c.body).where(futures.c.id.in_(bindparam("ids", expanding=True)))
_PENDING_BODIES = _BODIES.where(futures.c.status == "pending")


def bodies(connection: Connection, request_ids: Sequence[str], *, pending: bool = False) -> dict[str, bytes]:
    """Bodies by request id. Leaves out requests that are deleted, and with `pending` also those that have ended."""
    query = _PENDING_BODIES if pending else _BODIES
    return {row.id: row.body for row in connection.execute(query, {"ids": request_ids})}


def settled_as(connection: Connection, outcomes: Sequence[tuple[str, Outcome]]) -> bool:
    """Whether any of these requests, given by id, has ended as its outcome here says: well, or with the same error."""
    given = dict(outcomes)
    query = select(futures.c.id, futures.c.error).where(futures.c.id.in_(given), futures.c.status != "pending")
    return any(given[row.id].error == row.error for row in connection.execute(query))


def rewrite_body(connection: Connection, request_id: str, body: bytes) -> None:
    """Store another body of a request. Its digest stays: that of the body as it came."""
    connection.execute(update(futures).where(futures.c.id == request_id).values(body=body))


def settle(connection: Connection, outcomes: Iterable[tuple[str, Outcome]], now: float) -> None:
    """Store the outcomes of requests, given by id. Requests that are settled already stay as they are."""
    parameters = [settlement(request_id, outcome, now) for request_id, outcome in outcomes]
    if parameters:
        connection.execute(SETTLE, parameters)


def settle_pending(connection: Connection, request_id: str, outcome: Outcome, now: float) -> bool:
    """Store the outcome of one request. False if the request was not pending."""
    return bool(_settle_where(connection, futures.c.id == request_id, outcome, now))


def end_requests_of_sessions(
    connection: Connection, session_ids: Sequence[str], now: float, kind: Kind | None = None
) -> list[str]:
    """Settle all pending requests of ended sessions, or those of one kind, with SESSION_ENDED. Returns their ids."""
    where = futures.c.session_id.in_(session_ids)
    if kind is not None:
        where &= futures.c.kind == kind
    return _settle_where(connection, where, SESSION_ENDED, now)


def _settle_where(connection: Connection, where: ColumnElement[bool], outcome: Outcome, now: float) -> list[str]:
    ids = [row.id for row in connection.execute(select(futures.c.id).where(where, futures.c.status == "pending"))]
    settle(connection, [(request_id, outcome) for request_id in ids], now)
    return ids
