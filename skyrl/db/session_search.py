"""Searching a tenant's sessions: newest first, page by page, with what each one's checkpoints take.

What SQL compares alike everywhere is left to it; words in names and pairs of metadata are compared here, because
SQLite folds ASCII letters only and the two databases read JSON in different ways.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, false, func, or_, select

from skyrl.db.database import Database
from skyrl.db.sessions import in_project, sessions
from skyrl.db.tables import CheckpointRow, ModelRow

_models = ModelRow.__table__  # type: ignore[attr-defined]
_checkpoints = CheckpointRow.__table__  # type: ignore[attr-defined]

_MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True)
class Status:
    """`status` as it is stored, and of finished sessions the reasons that match (None: all)."""

    status: str
    reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """What must hold of a session; None and empty ask for nothing. With both `session_id` and `words` one is enough.

    `words` must all appear in the display name, whatever their case. `statuses` empty matches no session. `after` is
    the place of the last session of the page before: its creation in microseconds since the epoch, and its id.
    """

    session_id: str | None = None
    words: tuple[str, ...] = ()
    project_ids: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    statuses: tuple[Status, ...] | None = None
    after: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A sessions row, and how many checkpoints of how many bytes its models have."""

    row: Any
    checkpoints: int
    checkpoint_bytes: int


def microseconds(row: Any) -> int:
    """When a session was made, in the resolution in which times travel."""
    return round(row.created_at * 1e6)


class SessionSearch:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, tenant: str, query: Query, limit: int) -> tuple[list[Found], bool]:
        """Up to `limit` sessions, newest first, and whether there are more."""

        def read(connection: Connection) -> tuple[list[Found], bool]:
            rows: list[Any] = []
            for row in _candidates(connection, tenant, query):
                if len(rows) == limit:
                    return _with_checkpoints(connection, rows), True
                rows.append(row)
            return _with_checkpoints(connection, rows), False

        return await self._database.read_async(read)


def _candidates(connection: Connection, tenant: str, query: Query) -> Iterator[Any]:
    wanted = [sessions.c.tenant == tenant]
    if query.project_ids is not None:
        wanted.append(or_(false(), *(in_project(project_id) for project_id in query.project_ids)))
    if query.statuses is not None:
        wanted.append(or_(false(), *(_has(status) for status in query.statuses)))
    if query.session_id is not None and not query.words:
        wanted.append(sessions.c.id == query.session_id)
    if query.after is not None:
        wanted.append(sessions.c.created_at <= query.after[0] / 1e6 + _MICROSECOND)
    statement = select(sessions).where(*wanted).order_by(sessions.c.created_at.desc(), sessions.c.id.desc())
    with connection.execute(statement, execution_options={"yield_per": 500}) as rows:
        for row in rows:
            if query.after is not None and (microseconds(row), row.id) >= query.after:
                continue
            if _matches(row, query):
                yield row


def _has(status: Status) -> Any:
    same = sessions.c.status == status.status
    if status.reasons is not None:
        return and_(same, sessions.c.finish_reason.in_(status.reasons))
    # A session that ended without its client saying how has no status to tell.
    return same if status.status == "active" else and_(same, sessions.c.finish_reason.is_not(None))


def _matches(row: Any, query: Query) -> bool:
    if query.words:
        name = (row.display_name or "").casefold()
        named = bool(name) and all(word.casefold() in name for word in query.words)
        if not named and row.id != query.session_id:
            return False
    metadata = row.user_metadata or {}
    return all(key in metadata and str(metadata[key]) == value for key, value in query.user_metadata.items())


def _with_checkpoints(connection: Connection, rows: list[Any]) -> list[Found]:
    if not rows:
        return []
    live = or_(_checkpoints.c.expires_at.is_(None), _checkpoints.c.expires_at > time.time())
    counts = (
        select(_models.c.session_id, func.count().label("n"), func.sum(_checkpoints.c.size_bytes).label("size"))
        .join(_checkpoints, _checkpoints.c.model_id == _models.c.id)
        .where(_models.c.session_id.in_([row.id for row in rows]), live)
        .group_by(_models.c.session_id)
    )
    held = {row.session_id: (row.n, int(row.size)) for row in connection.execute(counts)}
    return [Found(row, *held.get(row.id, (0, 0))) for row in rows]
