"""Deletes old rows (finished requests, pictures, closed sampling sessions, custom losses, agent sessions, steps of
runs), then gives their space back to the disk.

Works in steps. Each step holds the write lock for some milliseconds, and other writers run between two steps. The
number of rows of a step follows from the time that the last one took (`StepSize`), because a sample waits for up to two
steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, func, select

from skyrl.storage.db import adapter_versions, agents, custom_losses, pictures, run_steps
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import futures
from skyrl.storage.db.sessions import Continuity
from skyrl.storage.db.tables import ModelRow
from skyrl.storage.db.writer import GroupCommitWriter

FORGET_ROWS, FORGET_BYTES = 250, 4 * 2**20
VACUUM_PAGES = 250
"""The most rows and bytes that one step deletes, and the most pages that one step gives back."""

STEP_S = 0.004
FIRST_ROWS, LEAST_ROWS = 50, 25
"""How long a step should hold the write lock, and how many rows or pages the first and the smallest steps have."""

LOOK_ROWS = 5_000
"""How many rows are looked for at once, where that is not part of the step."""

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

T = TypeVar("T")

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


class StepSize:
    """How many rows or pages the next step has: as many as fit STEP_S if they take as long as those of the last step,
    at most twice as many, and at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.number = min(most, FIRST_ROWS)

    def took(self, seconds: float) -> None:
        fitting = int(self.number * min(2.0, STEP_S / max(seconds, 1e-6)))
        self.number = min(self._most, max(LEAST_ROWS, fitting))

    def measured(self, change: Callable[[Connection, int], T]) -> Callable[[Connection], T]:
        """The change, with the number of its rows; how long it takes is noted."""
        number = self.number

        def measure(connection: Connection) -> T:
            began = time.perf_counter()
            result = change(connection, number)
            self.took(time.perf_counter() - began)
            return result

        return measure


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
            await self._in_steps(lambda c, limit: forget(c, now - self._retention_s, limit))
        await self._forget_sampling_sessions(now - SAMPLING_SESSIONS_S)
        ended = now - SAMPLING_SESSIONS_S
        await self._in_steps(lambda c, limit: custom_losses.forget(c, ended, limit))
        await self._in_steps(lambda c, _: pictures.forget(c, now))
        await self._in_steps(lambda c, _: agents.forget(c, now - self._agent_retention_s))
        await self._in_steps(lambda c, limit: run_steps.forget(c, now - HISTORY_S, limit))

    async def _forget_sampling_sessions(self, closed_before: float) -> None:
        """They are looked for without the write lock."""
        while True:
            closed = await self._database.read_async(lambda c: adapter_versions.closed(c, closed_before, LOOK_ROWS))
            left, size = closed, StepSize(FORGET_ROWS)
            while left:
                some, left = left[: size.number], left[size.number :]
                await self._writer.transact(size.measured(lambda c, _, some=some: adapter_versions.forget(c, some)))
                await asyncio.sleep(PAUSE_S)
            if len(closed) < LOOK_ROWS:
                return

    async def _in_steps(self, forget_some: Callable[[Connection, int], int]) -> None:
        """Call `forget_some`, each time in a transaction of its own and with the most rows that it may delete, until it
        deletes none."""
        size = StepSize(FORGET_ROWS)
        while True:
            if not await self._writer.transact(size.measured(forget_some)):
                return
            await asyncio.sleep(PAUSE_S)

    async def _give_back(self) -> bool:
        shrunk, size = False, StepSize(VACUUM_PAGES)
        while (spare := await self._database.read_async(spare_pages)) > 0:
            await self._writer.transact(size.measured(lambda c, most, spare=spare: give_back(c, min(spare, most))))
            shrunk = True
            await asyncio.sleep(PAUSE_S)
        return shrunk
