"""Reads rows by id, many with one query: the ids that are asked for while a query runs go into the next query.

Knows neither tables nor what is cached. Each query begins after all its ids were asked for, so it finds what was
committed before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from skyrl.storage.db.futures import MAX_NAMED

T = TypeVar("T")


class BatchedRows(Generic[T]):
    """`read` returns the rows of at most MAX_NAMED ids, by id, without those that do not exist. One query runs at a
    time. After a start, the first requests of thousands of sessions come at once; a query and a thread for each cost
    more than all else that these requests do."""

    def __init__(self, read: Callable[[list[str]], Awaitable[dict[str, T]]]) -> None:
        self._read = read
        self._open: dict[str, None] | None = None
        """The ids of the next query; None if nobody waits for it."""
        self._newest: asyncio.Task[dict[str, T]] | None = None
        """The query of `_open`, or else the last one that has begun; None if that has ended."""

    async def get(self, row_id: str) -> T | None:
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

    async def _run(self, ids: dict[str, None], before: asyncio.Task[Any] | None) -> dict[str, T]:
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
