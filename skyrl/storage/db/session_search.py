"""Searches a tenant's sessions: newest first, page by page, with the number and size of their checkpoints.

Words in names and pairs of metadata are compared in Python, because SQLite ignores the case of ASCII letters only, and
because SQLite and PostgreSQL read JSON in different ways. SQL compares all other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, and_, false, func, or_, select

from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.columns import record_of
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.scopes import live
from skyrl.storage.db.sessions import NEWEST_FIRST, in_project, sessions

T = TypeVar("T")

_MICROSECOND = 1e-6
MOST_COMPARED = 10_000
"""Sessions that one search compares with words and metadata, in Python and with up to 16 KiB of metadata each."""
READ_TOGETHER = 100
Place = tuple[int, str]
"""A session's place in the order of the search: its creation in microseconds since the epoch, and its id."""


@dataclass(frozen=True, slots=True)
class Status:
    """A session status as it is stored. `reasons`: the finish reasons that match; None: all."""

    status: str
    reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """The conditions on a session. A field that is None or empty is no condition, except that empty `project_ids` or
    `statuses` match no session. With both `session_id` and `words`, one of them is enough.

    All `words` must appear in the display name, in upper or lower case. `after` is the last session of the previous
    page: its creation in microseconds since the epoch, and its id.
    """

    session_id: str | None = None
    words: tuple[str, ...] = ()
    project_ids: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    statuses: tuple[Status, ...] | None = None
    after: Place | None = None


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session, with the number and the size of its models' live checkpoints. `created_us` is in microseconds since
    the epoch, the resolution of times on the wire."""

    id: str
    tenant: str
    status: str
    created_us: int
    finish_reason: str | None
    finish_detail: str | None
    project_id: str | None
    display_name: str | None
    user_metadata: dict[str, Any] | None
    checkpoints: int
    checkpoint_bytes: int


def microseconds(row: Any) -> int:
    return round(row.created_at * 1e6)


def page_of(rows: Iterable[T], matches: Callable[[T], bool], limit: int) -> tuple[list[T], T | None]:
    """Up to `limit` of the rows that match, and the row after which the next page begins; None if there are no more. At
    most MOST_COMPARED rows are compared, so a page with fewer rows, or none, may not be the last one."""
    found: list[T] = []
    last: T | None = None
    for number, row in enumerate(rows):
        if number == MOST_COMPARED:
            return found, last
        last = row
        if matches(row):
            if len(found) == limit:
                return found, found[-1]
            found.append(row)
    return found, None


class SessionSearch:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, tenant: str, query: SessionQuery, limit: int) -> tuple[list[FoundSession], Place | None]:
        """Up to `limit` sessions, newest first, and after which session the next page begins; None if there are no
        more. See `page_of`."""

        def read(connection: Connection) -> tuple[list[FoundSession], Place | None]:
            rows, last = page_of(_candidates(connection, tenant, query), lambda row: _matches(row, query), limit)
            return _with_checkpoints(connection, rows), None if last is None else (microseconds(last), last.id)

        return await self._database.read_async(read)


def _candidates(connection: Connection, tenant: str, query: SessionQuery) -> Iterator[Any]:
    wanted = [sessions.c.tenant == tenant]
    if query.project_ids is not None:
        wanted.append(or_(false(), *(in_project(project_id) for project_id in query.project_ids)))
    if query.statuses is not None:
        wanted.append(or_(false(), *(_has(status) for status in query.statuses)))
    if query.session_id is not None and not query.words:
        wanted.append(sessions.c.id == query.session_id)
    if query.after is not None:
        wanted.append(sessions.c.created_at <= query.after[0] / 1e6 + _MICROSECOND)
    # Without their metadata: if the database sorts after all, 100,000 sessions may have 1.6 GB of it.
    statement = select(sessions.c.id, sessions.c.created_at).where(*wanted).order_by(*NEWEST_FIRST)
    with connection.execute(statement, execution_options={"yield_per": READ_TOGETHER}) as keys:
        for some in keys.partitions():
            ids = [key.id for key in some if query.after is None or (microseconds(key), key.id) < query.after]
            rows = {row.id: row for row in connection.execute(select(sessions).where(sessions.c.id.in_(ids)))}
            yield from (rows[session_id] for session_id in ids)


def _has(status: Status) -> ColumnElement[bool]:
    same_status = sessions.c.status == status.status
    if status.reasons is not None:
        return and_(same_status, sessions.c.finish_reason.in_(status.reasons))
    # A session that ended without a reason from its client has no status on the wire.
    return same_status if status.status == "active" else and_(same_status, sessions.c.finish_reason.is_not(None))


def _matches(row: Any, query: SessionQuery) -> bool:
    if query.words:
        name = (row.display_name or "").casefold()
        named = bool(name) and all(word.casefold() in name for word in query.words)
        if not named and row.id != query.session_id:
            return False
    metadata = row.user_metadata or {}
    return all(key in metadata and str(metadata[key]) == value for key, value in query.user_metadata.items())


def _with_checkpoints(connection: Connection, rows: list[Any]) -> list[FoundSession]:
    if not rows:
        return []
    counts = (
        select(models.c.session_id, func.count().label("n"), func.sum(checkpoints.c.size_bytes).label("size"))
        .join(checkpoints, checkpoints.c.model_id == models.c.id)
        .where(models.c.session_id.in_([row.id for row in rows]), live())
        .group_by(models.c.session_id)
    )
    held = {row.session_id: (row.n, int(row.size)) for row in connection.execute(counts)}
    found: list[FoundSession] = []
    for row in rows:
        number, size = held.get(row.id, (0, 0))
        more = {"created_us": microseconds(row), "checkpoints": number, "checkpoint_bytes": size}
        found.append(record_of(FoundSession, row, **more))
    return found
