"""Rows in the memory of an API process: read by id, many with one query, and dropped together with their session.

Knows neither tables nor statements. Each query begins after all its ids were asked for, so it finds what was committed
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from skyrl.storage.db.database import MAX_NAMED

Row = TypeVar("Row")


class BatchedRows(Generic[Row]):
    """`read` returns the rows of at most MAX_NAMED ids, by id, without those that do not exist. One query runs at a
    time. After a start, the first requests of thousands of sessions come at once; a query and a thread for each cost
    more than all else that these requests do."""

    def __init__(self, read: Callable[[list[str]], Awaitable[dict[str, Row]]]) -> None:
        self._read = read
        self._open: dict[str, None] | None = None
        """The ids of the next query; None if nobody waits for it."""
        self._newest: asyncio.Task[dict[str, Row]] | None = None
        """The query of `_open`, or else the last one that has begun; None if that has ended."""

    async def get(self, row_id: str) -> Row | None:
        """The row; None if there is none. Raises what `read` raises for the query with this id."""
        if self._open is None or len(self._open) >= MAX_NAMED:
            self._open = {row_id: None}
            self._newest = asyncio.create_task(self._run(self._open, self._newest))
            self._newest.add_done_callback(self._ended)
        else:
            self._open[row_id] = None
        assert self._newest is not None
        rows = await asyncio.shield(self._newest)  # the caller may go away while others wait for the same query
        return rows.get(row_id)

    async def _run(self, ids: dict[str, None], before: asyncio.Task[Any] | None) -> dict[str, Row]:
        if before is not None:
            await asyncio.wait([before])
        if self._open is ids:
            self._open = None
        return await self._read(list(ids))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self._newest is task:
            self._newest = None
        if not task.cancelled():
            task.exception()  # if all waiters have gone, nobody else reads it, and asyncio would log that


class _OfSession(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def session_id(self) -> str: ...


T = TypeVar("T", bound=_OfSession)


class SessionCache(Generic[T]):
    """To drop a session's objects takes time for these objects alone: 100,000 sessions may end within a minute, and a
    search among 100,000 objects for each would keep the event loop busy for minutes."""

    def __init__(self) -> None:
        self._by_id: dict[str, T] = {}
        self._ids_of: dict[str, set[str]] = {}
        """The ids of objects by session."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, object_id: str) -> T | None:
        return self._by_id.get(object_id)

    def keep(self, each: T) -> None:
        self._by_id[each.id] = each
        self._ids_of.setdefault(each.session_id, set()).add(each.id)

    def drop(self, object_id: str) -> None:
        """Drop an object, if it is there."""
        if (each := self._by_id.pop(object_id, None)) is None:
            return
        ids = self._ids_of[each.session_id]
        ids.remove(object_id)
        if not ids:
            del self._ids_of[each.session_id]

    def drop_session(self, session_id: str) -> None:
        for object_id in self._ids_of.pop(session_id, ()):
            del self._by_id[object_id]
