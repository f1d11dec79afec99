"""What is needed no longer leaves the database: finished requests and closed sampling sessions after their time, then
the space that they took.

Works in steps that each hold the write lock for some milliseconds, and lets other writers in between. Knows the tables
and SQLite's file; does not know what a request asked for.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sqlalchemy import Connection, delete, func, select

from skyrl.db.adapter_versions import forget_closed
from skyrl.db.database import Database
from skyrl.db.futures import futures
from skyrl.db.tables import ModelRow
from skyrl.db.writer import GroupCommitWriter

FORGET_ROWS, FORGET_BYTES = 250, 4 * 2**20
VACUUM_PAGES = 250
"""What one step deletes, or gives back."""

PAUSE_S = 0.01
"""Between two steps: who waits for the lock in another process asks for it every few milliseconds."""

SAMPLING_SESSIONS_S = 24 * 3600.0
"""How long a sampling session is listed after its session has ended. It can be asked for nothing any more."""

SPARE_PAGES = 512
SPARE_SHARE = 4
"""Free pages that stay for what comes next: so many, or this part of the used ones if that is more."""

LONG_LOG_BYTES = 64 * 2**20
"""A write-ahead log that has grown beyond is copied into the file and emptied."""

INCREMENTAL = 2
"""What `PRAGMA auto_vacuum` says of a file that gives pages back."""

_models: Any = ModelRow.__table__  # type: ignore[attr-defined]


def forget(connection: Connection, completed_before: float, limit: int = FORGET_ROWS) -> int:
    """Delete requests that ended before `completed_before` (seconds since the epoch), oldest first: at most `limit`
    rows, holding about FORGET_BYTES. Returns the number of deleted rows; 0 when none is left.

    Commands of living models that are in no snapshot yet are kept, because recovery repeats them.
    """
    replayable = select(_models.c.id).where(
        _models.c.id == futures.c.model_id,
        _models.c.status.in_(("ready", "creating")),
        _models.c.next_seq <= futures.c.seq_id,
    )
    # The database knows the length of a body without reading it. Columns behind the body, `status` among them, cost
    # reading all of it.
    size = func.coalesce(func.length(futures.c.body), func.length(futures.c.result), 0)
    old = select(futures.c.n, size).where(futures.c.completed_at < completed_before, ~replayable.exists())
    old = old.order_by(futures.c.completed_at).limit(limit)
    numbers: list[int] = []
    held = 0
    for number, held_by_it in connection.execute(old).all():
        numbers.append(number)
        held += held_by_it
        if held >= FORGET_BYTES:
            break
    if numbers:
        connection.execute(delete(futures).where(futures.c.n.in_(numbers)))
    return len(numbers)


def spare_pages(connection: Connection) -> int:
    """Free pages of a SQLite file that it should give back; 0 for one that cannot."""
    pages, free, mode = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
        for name in ("page_count", "freelist_count", "auto_vacuum")
    )
    return 0 if mode != INCREMENTAL else max(0, free - max(SPARE_PAGES, (pages - free) // SPARE_SHARE))


def give_back(connection: Connection, pages: int) -> None:
    """Move so many free pages of a SQLite file to its end and cut them off; the file is shorter after a checkpoint."""
    driver: Any = connection.connection.driver_connection
    for _ in range(pages):  # Python's driver takes one step of this statement, which is one page, whatever the number
        driver.execute("PRAGMA incremental_vacuum(1)")


class Retention:
    """Keeps one database's size in proportion to what it has to remember. `retention_s` counts from a request's end."""

    def __init__(self, database: Database, writer: GroupCommitWriter, retention_s: float) -> None:
        self._database = database
        self._writer = writer
        self._retention_s = retention_s
        self._log_limit = LONG_LOG_BYTES

    async def sweep(self) -> None:
        """Forget what is old, then give back what is free."""
        await self._forget()
        if self._database.is_sqlite and await self._give_back():
            await asyncio.to_thread(self._database.empty_log)

    async def shorten_log(self) -> None:
        """Empty SQLite's log when it is long. Commits do not, for copying it waits for the disk: on a busy one they
        would come to a stand. With a reader in the way for long, tried again when it is as much longer."""
        length = self._database.log_bytes()
        if length > self._log_limit:
            emptied = await asyncio.to_thread(self._database.empty_log)
            self._log_limit = LONG_LOG_BYTES + (0 if emptied else length)

    async def _forget(self) -> None:
        before = time.time() - self._retention_s
        while True:
            gone = await self._writer.transact(lambda c: forget(c, before, FORGET_ROWS))
            if gone == 0:
                break
            await asyncio.sleep(PAUSE_S)
        closed_before = time.time() - SAMPLING_SESSIONS_S
        while True:
            gone = await self._writer.transact(lambda c: forget_closed(c, closed_before, FORGET_ROWS))
            if gone < FORGET_ROWS:
                return
            await asyncio.sleep(PAUSE_S)

    async def _give_back(self) -> bool:
        """Whether there was something to give back."""
        shrunk = False
        while (spare := await self._database.read_async(spare_pages)) > 0:
            step = min(spare, VACUUM_PAGES)
            await self._writer.transact(lambda c, pages=step: give_back(c, pages))
            shrunk = True
            await asyncio.sleep(PAUSE_S)
        return shrunk
