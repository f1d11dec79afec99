"""Deletes old rows (finished requests, pictures, closed sampling sessions, custom losses, agent sessions, steps of
runs), then gives their space back to the disk.

Works in steps. Each step holds the write lock for some milliseconds, and other writers run between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, delete, func, select

from skyrl.storage.db import agents, custom_losses, pictures, run_steps
from skyrl.storage.db.adapter_versions import forget_closed
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.sessions import Continuity
from skyrl.storage.db.tables import ModelRow
from skyrl.storage.db.writer import GroupCommitWriter

FORGET_ROWS, FORGET_BYTES = 250, 4 * 2**20
VACUUM_PAGES = 250
"""The most rows and bytes that one step deletes, and the most pages that one step gives back."""

PAUSE_S = 0.01
"""The pause between two steps. A process that waits for the lock asks for it every few milliseconds."""

SAMPLING_SESSIONS_S = 24 * 3600.0
"""How long a closed sampling session is still listed. Nobody can sample from it any more. Custom losses of an ended
session are kept as long."""

AGENT_SESSIONS_S = 7 * 24 * 3600.0
"""How long an agent session is kept after its end, unless the configuration says otherwise."""

HISTORY_S = 90 * 24 * 3600.0
"""How long a step of a run's history is kept after its last change."""

AFTER_GAP_S = 300.0
"""After a gap (see `Continuity`) results are kept this long, or `retention_s` if that is less: clients fetch now what
ended before it."""

SPARE_PAGES = 512
SPARE_SHARE = 4
"""Free pages that stay in the file for new rows: SPARE_PAGES, or one in SPARE_SHARE used pages if that is more."""

LONG_LOG_BYTES = 64 * 2**20
"""A longer write-ahead log is copied into the file and emptied."""

INCREMENTAL = 2
"""The value of `PRAGMA auto_vacuum` for a file that can give pages back."""

_models: Any = ModelRow.__table__  # type: ignore[attr-defined]


def forget(connection: Connection, completed_before: float, limit: int = FORGET_ROWS) -> int:
    """Delete requests that ended before `completed_before` (seconds since the epoch), oldest first: at most `limit`
    rows of about FORGET_BYTES together. Returns the number of deleted rows; 0 when none is left.

    Keeps the commands of living models that are in no snapshot yet, because recovery repeats them.
    """
    replayable = select(_models.c.id).where(
        _models.c.id == futures.c.model_id,
        _models.c.status.in_(("ready", "creating")),
        _models.c.next_seq <= futures.c.seq_id,
    )
    # Neither database reads the body to get its length. But to read a column after the body, such as `status`, SQLite
    # reads the whole body.
    size = func.coalesce(func.length(futures.c.body), func.length(futures.c.result), 0)
    old = select(futures.c.n, size).where(futures.c.completed_at < completed_before, ~replayable.exists())
    old = old.order_by(futures.c.completed_at).limit(limit)
    numbers: list[int] = []
    total_bytes = 0
    for number, row_bytes in connection.execute(old).all():
        numbers.append(number)
        total_bytes += row_bytes
        if total_bytes >= FORGET_BYTES:
            break
    if numbers:
        connection.execute(delete(futures).where(futures.c.n.in_(numbers)))
    return len(numbers)


def spare_pages(connection: Connection) -> int:
    """The number of free pages that a SQLite file should give back; 0 for a file that cannot."""
    pages, free, mode = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
        for name in ("page_count", "freelist_count", "auto_vacuum")
    )
    return 0 if mode != INCREMENTAL else max(0, free - max(SPARE_PAGES, (pages - free) // SPARE_SHARE))


def give_back(connection: Connection, pages: int) -> None:
    """Move free pages of a SQLite file to its end and cut them off. The next checkpoint shortens the file."""
    driver: Any = connection.connection.driver_connection
    for _ in range(pages):  # Python's driver gives back one page with each execute, even if the statement names more
        driver.execute("PRAGMA incremental_vacuum(1)")


class Retention:
    """Keeps the size of one database in proportion to its rows. A request is kept for `retention_s` after its end, an
    agent session for `agent_retention_s`."""

    def __init__(
        self,
        database: Database,
        writer: GroupCommitWriter,
        retention_s: float,
        agent_retention_s: float = AGENT_SESSIONS_S,
        continuity: Continuity | None = None,
    ) -> None:
        """Without `continuity` nothing waits after a gap."""
        self._database = database
        self._writer = writer
        self._retention_s = retention_s
        self._agent_retention_s = agent_retention_s
        self._continuity = continuity
        self._log_limit = LONG_LOG_BYTES

    async def sweep(self) -> None:
        """Delete old rows, then give back free space."""
        await self._forget()
        if self._database.is_sqlite and await self._give_back():
            await asyncio.to_thread(self._database.empty_log)

    async def shorten_log(self) -> None:
        """Empty SQLite's log when it is long. Commits do not do that themselves, because on a busy disk they would take
        long. If a reader prevents it, the next try comes when the log has grown by LONG_LOG_BYTES."""
        length = self._database.log_bytes()
        if length > self._log_limit:
            emptied = await asyncio.to_thread(self._database.empty_log)
            self._log_limit = LONG_LOG_BYTES + (0 if emptied else length)

    async def _forget(self) -> None:
        now = time.time()
        if self._continuity is None or self._continuity.seconds >= min(self._retention_s, AFTER_GAP_S):
            await self._in_steps(lambda c: forget(c, now - self._retention_s, FORGET_ROWS), 1)
        await self._in_steps(lambda c: forget_closed(c, now - SAMPLING_SESSIONS_S, FORGET_ROWS), FORGET_ROWS)
        ended = now - SAMPLING_SESSIONS_S
        await self._in_steps(lambda c: custom_losses.forget(c, ended, FORGET_ROWS), FORGET_ROWS)
        await self._in_steps(lambda c: pictures.forget(c, now), 1)
        await self._in_steps(lambda c: agents.forget(c, now - self._agent_retention_s), 1)
        await self._in_steps(lambda c: run_steps.forget(c, now - HISTORY_S), run_steps.FORGET_STEPS)

    async def _in_steps(self, forget_some: Callable[[Connection], int], full_step: int) -> None:
        """Call `forget_some`, each time in a transaction of its own, until it deletes fewer than `full_step` rows."""
        while True:
            if await self._writer.transact(forget_some) < full_step:
                return
            await asyncio.sleep(PAUSE_S)

    async def _give_back(self) -> bool:
        shrunk = False
        while (spare := await self._database.read_async(spare_pages)) > 0:
            step = min(spare, VACUUM_PAGES)
            await self._writer.transact(lambda c, pages=step: give_back(c, pages))
            shrunk = True
            await asyncio.sleep(PAUSE_S)
        return shrunk
