"""Searches the checkpoints that a tenant may read: newest first, page by page.

Pairs of metadata are compared in Python, because SQLite and PostgreSQL read JSON in different ways. SQL compares all
other values. Projects are a tenant's own names, so a search by project finds the tenant's own checkpoints alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import merge
from typing import Any

from sqlalchemy import ColumnElement, Connection, false, or_, select

from skyrl.storage.db.checkpoints import NEWEST_FIRST, Checkpoint, Seen, checkpoint_of, checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.session_search import microseconds, page_of
from skyrl.storage.db.sessions import in_project, sessions

_MICROSECOND = 1e-6
Place = tuple[int, int]
"""A checkpoint's place in the order of the search: its creation in microseconds since the epoch, and its row's number.
"""


@dataclass(frozen=True, slots=True)
class CheckpointQuery:
    """The conditions on a checkpoint. `owners`: tenants; None: those that `seen` shows. A field that is None or empty
    is no condition, except that empty `owners`, `project_ids` or `base_models` match no checkpoint. `after` is the last
    checkpoint of the previous page: its creation in microseconds since the epoch, and the number of its row."""

    seen: Seen
    owners: tuple[str, ...] | None = None
    project_ids: tuple[str, ...] | None = None
    base_models: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    after: Place | None = None


class CheckpointSearch:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, tenant: str, query: CheckpointQuery, limit: int) -> tuple[list[Checkpoint], Place | None]:
        """Up to `limit` checkpoints, newest first, and after which one the next page begins; None if there are no more.
        See `page_of`."""

        def read(connection: Connection) -> tuple[list[Checkpoint], Place | None]:
            rows, last = page_of(_candidates(connection, tenant, query), lambda row: _matches(row, query), limit)
            place = None if last is None else (microseconds(last), last.id)
            return [checkpoint_of(each) for each in rows], place

        return await self._database.read_async(read)


def _candidates(connection: Connection, tenant: str, query: CheckpointQuery) -> Iterator[Any]:
    wanted: list[ColumnElement[bool]] = []
    if query.owners is not None:
        wanted.append(checkpoints.c.tenant.in_(query.owners))
    if query.base_models is not None:
        wanted.append(checkpoints.c.base_model.in_(query.base_models))
    if query.project_ids is not None:
        in_one = or_(false(), *(in_project(project_id) for project_id in query.project_ids))
        of_project = select(models.c.id).join(sessions, sessions.c.id == models.c.session_id)
        wanted.append(checkpoints.c.model_id.in_(of_project.where(sessions.c.tenant == tenant, in_one)))
    if query.after is not None:
        wanted.append(checkpoints.c.created_at <= query.after[0] / 1e6 + _MICROSECOND)
    statement = select(checkpoints).where(*wanted).order_by(*NEWEST_FIRST)
    with ExitStack() as opened:
        parts = [
            opened.enter_context(connection.execute(statement.where(part), execution_options={"yield_per": 500}))
            for part in query.seen.parts(tenant)
        ]
        for row in merge(*parts, key=lambda row: (row.created_at, row.id), reverse=True):
            if query.after is None or (microseconds(row), row.id) < query.after:
                yield row


def _matches(row: Any, query: CheckpointQuery) -> bool:
    metadata = row.user_metadata or {}
    return all(key in metadata and str(metadata[key]) == value for key, value in query.user_metadata.items())
