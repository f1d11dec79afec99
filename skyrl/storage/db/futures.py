"""Statements on the futures table: record, find, list and settle requests. One row is one request.

To settle a request is to store its outcome. The first outcome of a request stays. A request ends later than all stored
ends, so that readers can continue from an end: a poll reads the samples of its client in the order of their ends.
`skyrl.storage.db.models` has the statements by which the engine reads its commands from the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    func,
    select,
    update,
)

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import EVERYTHING, Scope
from skyrl.base.wire.errors import ErrorCategory
from skyrl.storage.db.database import in_groups
from skyrl.storage.db.row_statements import RowStatement, marks
from skyrl.storage.db.scopes import model_in_scope
from skyrl.storage.db.tables import FutureRow

ENDED_AT_ON_SQLITE = "max({}, (SELECT coalesce(max(completed_at), 0) + 2e-6 FROM futures))"
ENDED_AT_ON_POSTGRES = (
    "greatest(CAST(%(new_completed_at)s AS double precision), (SELECT max(completed_at) FROM futures) + 2e-6)"
)
"""When a request has ended, in seconds since the epoch: the time of the writing process, or 2 µs after the latest
stored end, whichever is later.

Several processes write ends, and their clocks differ. Write transactions run one at a time, so later commits have later
ends. A reader that has read all ends up to some time therefore misses none, and two ends never have the same cursor.
SQLite reads the latest stored end once, before a statement changes any row. Its rows come in rising order of their
times, and their places keep their ends apart."""

futures = FutureRow.__table__  # type: ignore[attr-defined]

_RECORDED = (
    "id",
    "kind",
    "tenant",
    "session_id",
    "model_id",
    "seq_id",
    "sampling_session_id",
    "sample_seq_id",
    "digest",
    "body",
    "body_format",
    "status",
    "created_at",
    "owner",
    "not_before",
    "trace",
)
_NAMES = ", ".join(_RECORDED)
RECORD = RowStatement(
    _RECORDED,
    sqlite=f"INSERT INTO futures ({_NAMES}) SELECT {_NAMES} FROM given WHERE id IS NOT NULL",
    sqlite_one=f"INSERT INTO futures ({_NAMES}) VALUES ({', '.join('?' * len(_RECORDED))})",
    postgres=f"INSERT INTO futures ({_NAMES}) VALUES ({marks(_RECORDED)})",
    long=("body",),
    key=("sampling_session_id", "sample_seq_id"),
)
"""Adds one row. The parameters are the columns of a request that is not settled."""


def _settling(also: str = "") -> RowStatement:
    outcome = ("status", "result", "result_format", "error", "error_category")
    given = ", ".join(f"{name} = new_{name}" for name in outcome)
    alone = ", ".join(f"{name} = ?" for name in outcome)
    marked = ", ".join(f"{name} = %(new_{name})s" for name in outcome)
    return RowStatement(
        [*(f"new_{name}" for name in outcome), "new_completed_at", "request_id"],
        sqlite=f"UPDATE futures SET {also}{given}, completed_at = {ENDED_AT_ON_SQLITE.format('new_completed_at')} "
        "+ 2e-6 * (place - 1) FROM given WHERE futures.id = request_id AND +futures.status = 'pending'",
        sqlite_one=f"UPDATE futures SET {also}{alone}, completed_at = {ENDED_AT_ON_SQLITE.format('?')} "
        "WHERE id = ? AND +status = 'pending'",
        postgres=f"UPDATE futures SET {also}{marked}, completed_at = {ENDED_AT_ON_POSTGRES} "
        "WHERE id = %(request_id)s AND status = 'pending'",
        rising="new_completed_at",
        first_of="request_id",
        long=("new_result", "new_error"),
    )


SETTLE = _settling()
"""Stores one outcome. `settlement` makes the parameters. Does nothing if the row is deleted or settled already. (The
plus keeps SQLite from looking for pending rows by their status: it shall look for each given row by its id.)"""

SETTLE_SAMPLE = _settling("body = NULL, ")
"""SETTLE for a forwarded sample. Deletes the body, too, which is not needed any more."""


# Every sample makes one. As a frozen dataclass that would take three times as long.
class Outcome(msgspec.Struct, frozen=True):
    """How a request ended: a result with its format, or an error with its category. In an error the character U+0000 is
    replaced by `\\0`, because PostgreSQL stores no text that contains it."""

    result: bytes = b""
    result_format: str = "json"
    error: str | None = None
    error_category: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None and "\0" in self.error:
            msgspec.structs.force_setattr(self, "error", self.error.replace("\0", "\\0"))


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


REQUEST = (
    futures.c.id,
    futures.c.kind,
    futures.c.tenant,
    futures.c.session_id,
    futures.c.digest,
    futures.c.sampling_session_id,
    futures.c.sample_seq_id,
    futures.c.owner,
)
"""What a `StoredFuture` has of its request."""
_STORED = (
    *REQUEST,
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
    """The requests among `request_ids` that have an outcome."""
    return _find(connection, and_(futures.c.id.in_(request_ids), futures.c.status != "pending"))


def ended_among(connection: Connection, request_ids: Sequence[str]) -> list[str]:
    """The ids among `request_ids` of stored requests that have an outcome. Reads indexes only: in the row, the status
    comes after the body, and to read it SQLite would read the whole body."""
    pending = select(futures.c.n).where(futures.c.status == "pending")
    ended: list[str] = []
    for some in in_groups(request_ids):
        named = futures.c.id.in_(some)
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
    RECORD.execute(connection, [parameters])


def settled_as(connection: Connection, outcomes: Sequence[tuple[str, Outcome]]) -> bool:
    """Whether any of these requests, given by id, has ended as its outcome here says: well, or with the same error."""
    given = dict(outcomes)
    query = select(futures.c.id, futures.c.error).where(futures.c.id.in_(given), futures.c.status != "pending")
    return any(given[row.id].error == row.error for row in connection.execute(query))


def rewrite_body(connection: Connection, request_id: str, body: bytes) -> None:
    """Store another body of a request. Its digest stays: that of the body as it came."""
    connection.execute(update(futures).where(futures.c.id == request_id).values(body=body))


def settle(connection: Connection, outcomes: Iterable[tuple[str, Outcome]], now: float) -> None:
    """Store the outcomes of requests, given by id. Requests that are settled already do not change."""
    parameters = [settlement(request_id, outcome, now) for request_id, outcome in outcomes]
    if parameters:
        SETTLE.execute(connection, parameters)


def settle_pending(connection: Connection, request_id: str, outcome: Outcome, now: float) -> bool:
    """Store the outcome of one request. False if the request was not pending."""
    return bool(_settle_where(connection, futures.c.id == request_id, outcome, now))


def end_requests_of_sessions(
    connection: Connection,
    session_ids: Sequence[str],
    now: float,
    kind: Kind | None = None,
    scope: Scope = EVERYTHING,
) -> list[str]:
    """Settle all pending requests of ended sessions, or those of one kind, with SESSION_ENDED. Commands of models that
    are not in the scope stay. Returns the ids of the settled requests."""
    where = futures.c.session_id.in_(session_ids)
    if kind is not None:
        where &= futures.c.kind == kind
    if not scope.is_everything:
        where &= futures.c.model_id.is_(None) | model_in_scope(futures.c.model_id, scope)
    return _settle_where(connection, where, SESSION_ENDED, now)


def _settle_where(connection: Connection, where: ColumnElement[bool], outcome: Outcome, now: float) -> list[str]:
    ids = [row.id for row in connection.execute(select(futures.c.id).where(where, futures.c.status == "pending"))]
    settle(connection, [(request_id, outcome) for request_id in ids], now)
    return ids


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
