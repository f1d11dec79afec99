"""Statements on the futures table: record, look up, settle, forget. One row is one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from skyrl.db.tables import FutureRow
from skyrl.db.writer import RowStatement
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
"""Parameters: the columns of one new row that are known then."""


class EndedAt(FunctionElement[float]):
    """When a request has ended, in seconds since the epoch: what the clock of the writing process says, or 2 µs after
    the latest end that is stored, whichever is later.

    Several processes write ends, and their clocks differ. Write transactions run one at a time, so the ends have one
    order, in which they were committed, and cursors tell two ends apart. A reader that has read all ends up to a moment
    never misses one that is committed later."""

    inherit_cache = True
    type = Float()


@compiles(EndedAt, "sqlite")
def _ended_at_on_sqlite(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"max({clock}, (SELECT coalesce(max(completed_at), 0) + 2e-6 FROM futures))"


@compiles(EndedAt, "postgresql")
def _ended_at_on_postgresql(element: EndedAt, compiler: Any, **options: Any) -> str:
    clock = compiler.process(element.clauses, **options)
    return f"greatest(CAST({clock} AS double precision), (SELECT max(completed_at) FROM futures) + 2e-6)"


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
"""Parameters: see `settlement`. A row that is gone or settled already is left alone."""


SETTLE_SAMPLE = RowStatement(SETTLE.values(body=null()))
"""SETTLE for a forwarded sample, whose body nobody reads again."""

MAX_NAMED = 500
"""Ids in one query."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: result bytes with their format, or an error with its category. NUL is spelled out."""

    result: bytes = b""
    result_format: str = "json"
    error: str | None = None
    error_category: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None and "\0" in self.error:  # PostgreSQL would not store it, now or ever
            object.__setattr__(self, "error", self.error.replace("\0", "\\0"))


SESSION_ENDED = Outcome(error="the session has ended", error_category=ErrorCategory.USER)
"""How the pending requests of a finished or expired session end."""


@dataclass(frozen=True, slots=True)
class StoredFuture:
    """A row without its bodies, with its outcome once it has one."""

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
    """Parameters of SETTLE."""
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
    """Those of `request_ids` that have an outcome by now."""
    return _find(connection, and_(futures.c.id.in_(request_ids), futures.c.status != "pending"))


def ended_among(connection: Connection, request_ids: Sequence[str]) -> list[str]:
    """Those of `request_ids` that are not pending. Looks at indexes only: a row with a body of megabytes is long, and
    its status comes after the body."""
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


def of_session(connection: Connection, session_id: str, newest: int) -> Iterator[Any]:
    """What is known of a session's `newest` requests, in order of arrival, without bodies and results."""
    columns = (
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
    query = select(*columns).where(futures.c.session_id == session_id).order_by(futures.c.n.desc()).limit(newest)
    yield from reversed(connection.execute(query).all())


def highest_seq(connection: Connection, model_id: str) -> int:
    """The highest seq_id recorded for a model, -1 if there is none."""
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


def pending(connection: Connection, kinds: Sequence[str], after: int = 0) -> list[Any]:
    """Pending rows of these kinds that arrived after row number `after`, in order of arrival: all but the bodies, which
    may be megabytes each, and their `size` in bytes.

    SQLite gives the number of a deleted last row again, so `after` must be a row that is still there, or 0.
    """
    return list(connection.execute(_PENDING, {"kinds": kinds, "after": after}))


def executed(connection: Connection, model_id: str, first_seq: int) -> list[Any]:
    """A model's commands from `first_seq` on that have changed it, in their order: what recovery repeats.

    Those that succeeded, with `status` and `completed_at`; and optimizer steps that failed by the caller's fault: one
    whose gradient is not finite drops it. A failure of ours left the model as it was.
    """
    dropped = and_(
        futures.c.status == "failed",
        futures.c.kind == Kind.OPTIM_STEP,
        futures.c.error_category == ErrorCategory.USER,
    )
    changed = or_(futures.c.status == "done", dropped)
    return list(
        connection.execute(
            select(*_HEADER, futures.c.status, futures.c.completed_at)
            .where(futures.c.model_id == model_id, futures.c.seq_id >= first_seq, changed)
            .order_by(futures.c.seq_id)
        )
    )


def highest_settled_seq(connection: Connection, model_id: str) -> int:
    """The highest seq_id that has an outcome, -1 if there is none."""
    row = connection.execute(
        select(func.max(futures.c.seq_id)).where(futures.c.model_id == model_id, futures.c.status != "pending")
    ).first()
    return -1 if row is None or row[0] is None else int(row[0])


_BODIES = select(futures.c.id, futures.c.body).where(futures.c.id.in_(bindparam("ids", expanding=True)))
_PENDING_BODIES = _BODIES.where(futures.c.status == "pending")


def bodies(connection: Connection, request_ids: Sequence[str], *, pending: bool = False) -> dict[str, bytes]:
    """Bodies by request id; rows that are gone are left out, and with `pending` those that have ended."""
    query = _PENDING_BODIES if pending else _BODIES
    return {row.id: row.body for row in connection.execute(query, {"ids": request_ids})}


def settled_at(connection: Connection, request_ids: Sequence[str], moment: float) -> bool:
    """Whether any of these got its outcome at just this moment (seconds since the epoch)."""
    those = futures.c.id.in_(request_ids), futures.c.completed_at == moment
    return connection.execute(select(futures.c.id).where(*those).limit(1)).first() is not None


def settle_where(connection: Connection, where: ColumnElement[bool], outcome: Outcome, now: float) -> list[str]:
    """Settle all pending rows that match; returns their ids."""
    ids = [row.id for row in connection.execute(select(futures.c.id).where(where, futures.c.status == "pending"))]
    if ids:
        connection.execute(SETTLE, [settlement(request_id, outcome, now) for request_id in ids])
    return ids
