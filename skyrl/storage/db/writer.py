"""The group-commit writer: commits waiting writes together, on the event loop or on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from sqlalchemy import Connection
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from skyrl.runtime.metrics.tallies import Spreads
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import is_transient
from skyrl.storage.db.row_statements import RowConnection, RowStatement, Write

logger = logging.getLogger(__name__)
T = TypeVar("T")

Outcome = tuple[list[Write], Exception | None]
"""Writes and the error that failed them; None if they are committed."""

MAX_BATCH = 1_000
"""The most writes in one transaction. The engine waits for the write lock as long as a transaction runs."""

LOOP_ROWS, LOOP_BYTES = 256, 2**19
"""The most rows, and bytes, that the event loop commits at once. A larger row goes to the thread."""

GATHER_S = 0.002
"""The event loop waits so long for more rows while each of its turns brings some."""

SLOW_S, SLOW_SHARE = 0.05, 20
"""After a commit on the event loop that took longer than SLOW_S, the thread commits for SLOW_SHARE times as long. So a
slow disk stops the event loop for a twentieth of the time at most."""

LOOP_SETTINGS = ("busy_timeout=0", "wal_autocheckpoint=0")
"""The event loop does not wait for the write lock, and does not copy SQLite's log."""


COMMIT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1, 5)
ROWS_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


class CommitMetrics:
    """Group commits of one or several writers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Time of one group commit, from BEGIN to its end."
        self._seconds = Spreads(registry, "skyrl_db_commit_seconds", about, COMMIT_BOUNDS).only
        about = "Writes in one group commit."
        self._rows = Spreads(registry, "skyrl_db_rows_per_commit", about, ROWS_BOUNDS).only
        self._lock = threading.Lock()

    def committed(self, rows: int, seconds: float) -> None:
        with self._lock:
            self._rows.add(rows)
            self._seconds.add(seconds)


class GroupCommitWriter:
    """Commits the writes of one event loop in groups.

    On SQLite the event loop itself commits rows: that takes less time than waking a thread. All else is committed by a
    thread: changes, large rows, every group that the event loop cannot commit at once (another process has the write
    lock, or a row is bad), and for a while all rows after a commit was slow. On PostgreSQL the thread commits
    everything, and rows in one round trip.

    The rows of a group have one commit and its changes another. Rows with the same statement run together. So the
    writes of a group do not run in their order, and a write that depends on another one must wait until that one is
    committed.

    When the database is away or full, all writes of a commit fail and none of them is committed; the group's other
    commit may succeed. When the connection breaks during a commit, its writes may all be committed although they fail.

    The thread starts with the first write. Without `ordered`, transactions on PostgreSQL do not take the write lock.
    """

    def __init__(self, database: Database, metrics: CommitMetrics | None = None, *, ordered: bool = True) -> None:
        self._database = database
        self._engine = database.writer if ordered else database.unordered_writer
        self._metrics = metrics or CommitMetrics()
        self._waiting: list[Write] = []
        self._only_rows = True
        self._gathered, self._gather_until = 0, 0.0
        self._loop_rests_until = 0.0
        self._queue: queue.SimpleQueue[list[Write] | None] = queue.SimpleQueue()
        self._on_thread = 0
        self._thread_rows = RowConnection(database, ordered=ordered)
        self._loop_rows = RowConnection(database, *LOOP_SETTINGS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
        self._begun = self._closed = False
        self.commits = 0

    def execute(self, statement: RowStatement, parameters: dict[str, Any]) -> asyncio.Future[bool]:
        """Change one row. The future is done when it is committed: True if the statement has surely changed its row,
        and False if that is not known, because only the sum of the changed rows of a group is known; or the database's
        error."""
        return self._put(statement, parameters, None)

    def transact(self, change: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run `change` in the transaction of a group's changes. The future has its value when that is committed."""
        return self._put(None, None, change)

    def _put(
        self,
        statement: RowStatement | None,
        parameters: dict[str, Any] | None,
        change: Callable[[Connection], Any] | None,
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise RuntimeError("the writer is closed; nothing would commit this write")
        loop = self._loop = self._loop or asyncio.get_running_loop()
        waiter = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._hand_over)
            self._only_rows = True
        if statement is None:
            self._only_rows = False
        self._waiting.append(Write(waiter, statement, parameters, change))
        return waiter

    def _hand_over(self) -> None:
        """Commit what waits, or give it to the thread, or leave it for a later call."""
        if not self._waiting:
            return
        if self._loop_may_commit():
            if self._on_thread:
                return  # `_settle` calls again
            if self._more_is_coming():
                self._call_again()
                return
            if self._commit_on_loop():
                if self._waiting:
                    self._call_again()
                return
        self._give_to_thread()

    def _call_again(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._hand_over)

    def _loop_may_commit(self) -> bool:
        return (
            self._only_rows
            and self._loop_rows.is_open
            and not self._closed
            and time.perf_counter() >= self._loop_rests_until
        )

    def _more_is_coming(self) -> bool:
        """Whether the last turn of the event loop has brought rows, and there is time and room for more."""
        waiting, now = len(self._waiting), time.perf_counter()
        if not self._gathered:
            self._gather_until = now + GATHER_S
        grown, self._gathered = waiting > self._gathered, waiting
        if grown and waiting < LOOP_ROWS and now < self._gather_until:
            return True
        self._gathered = 0
        return False

    def _commit_on_loop(self) -> bool:
        """Commit the first LOOP_ROWS of the rows that wait. False if they are not committed; then the thread has to
        try, which also knows what to do with an error."""
        rows = self._waiting[:LOOP_ROWS]
        if sum([row.bytes for row in rows]) > LOOP_BYTES:
            return False
        started = time.perf_counter()
        try:
            self._loop_rows.commit(rows)
        except Exception:  # of any kind: the thread meets it again, and reports it
            return False
        del self._waiting[: len(rows)]
        seconds = time.perf_counter() - started
        if seconds > SLOW_S:
            self._loop_rests_until = started + seconds * (1 + SLOW_SHARE)
        self._count(rows, seconds)
        self._resolve(rows, None)
        return True

    def _give_to_thread(self) -> None:
        writes, self._waiting = self._waiting, []
        self._gathered = 0
        if not self._begun:
            try:
                self._thread.start()
            except RuntimeError as error:  # the machine or the container has no thread to give now
                self._resolve(writes, NoConnectionFree(str(error)))
                return
            self._begun = True
        self._on_thread += len(writes)
        self._queue.put(writes)

    async def close(self) -> None:
        """Commit the waiting writes, then end the thread. Later writes raise RuntimeError."""
        self._closed = True
        self._hand_over()
        self._queue.put(None)
        if self._begun:
            await asyncio.to_thread(self._thread.join)
        self._loop_rows.close()

    def _run(self) -> None:
        last = False
        while not last and (waiting := self._queue.get()) is not None:
            while len(waiting) < MAX_BATCH:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    last = True
                    break
                waiting += more
            for start in range(0, len(waiting), MAX_BATCH):
                self._commit_on_thread(waiting[start : start + MAX_BATCH])
        self._thread_rows.close()

    def _commit_on_thread(self, group: list[Write]) -> None:
        try:
            rows = [write for write in group if write.statement is not None]
            changes = [write for write in group if write.statement is None]
            outcomes = [outcome for writes in (rows, changes) if writes for outcome in self._commit(writes)]
        except Exception as error:  # the thread must go on: without it every write would wait for ever
            logger.exception("%d writes failed in an unforeseen way", len(group))
            outcomes = list[Outcome]([(group, error)])
        if self._database.is_sqlite and not self._loop_rows.is_open:
            with contextlib.suppress(Exception):  # of any kind: without it the thread goes on committing
                self._loop_rows.open()  # here, because opening takes too long for the event loop
        try:
            group[0].waiter.get_loop().call_soon_threadsafe(self._settle, len(group), outcomes)
        except RuntimeError:
            logger.warning("%d writes were committed after their event loop had closed", len(group))

    def _commit(self, writes: list[Write]) -> list[Outcome]:
        """Commit rows, or changes."""
        started = time.perf_counter()
        try:
            if writes[0].statement is not None:
                self._thread_rows.commit(writes)
            else:
                with self._engine.begin() as connection:
                    for write in writes:
                        assert write.change is not None
                        write.result = write.change(connection)
        except Exception as error:  # whoever waits for a write gets its error
            if len(writes) == 1 or is_transient(error):  # after a transient error each write would fail in the same way
                return [(writes, error)]
            # One bad write must not fail the others. All were rolled back, so run each alone.
            return [outcome for write in writes for outcome in self._commit([write])]
        self._count(writes, time.perf_counter() - started)
        return [(writes, None)]

    def _count(self, writes: list[Write], seconds: float) -> None:
        """Called by the event loop only while the thread has no writes, so never by both at once."""
        self.commits += 1
        self._metrics.committed(len(writes), seconds)

    def _settle(self, count: int, outcomes: list[Outcome]) -> None:
        self._on_thread -= count
        for writes, error in outcomes:
            self._resolve(writes, error)
        if not self._on_thread:
            self._hand_over()

    @staticmethod
    def _resolve(writes: list[Write], error: Exception | None) -> None:
        for write in writes:
            if write.waiter.done():
                continue
            if error is not None:
                write.waiter.set_exception(error)
            else:
                write.waiter.set_result(write.result)
