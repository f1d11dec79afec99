"""The group-commit writer: one thread has the write connection, and commits all waiting writes in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError

from skyrl.db.database import Database
from skyrl.db.faults import is_transient
from skyrl.db.row_statement import RowStatement
from skyrl.metrics.database import CommitMetrics

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BATCH = 1_000
"""The most writes in one transaction. The engine waits for the write lock as long as a transaction runs."""


class _Write:
    __slots__ = ("change", "parameters", "result", "statement", "waiter")

    def __init__(
        self,
        waiter: asyncio.Future[Any],
        statement: Executable | RowStatement | None,
        parameters: dict[str, Any] | None,
        change: Callable[[Connection], Any] | None,
    ) -> None:
        self.statement = statement
        self.parameters = parameters
        self.change = change
        self.result: Any = None
        self.waiter = waiter


class GroupCommitWriter:
    """Commits the writes of one event loop in groups, on one thread.

    When the database is away or full, a whole group fails and none of its writes is committed. But when the connection
    breaks during the commit, they may all be committed although they fail.

    All writes of one turn of the event loop are given to the thread together, because waking the thread costs more than
    a row. Writes of one group with the same statement object run together. So the writes of a group do not run in their
    order, and a write that depends on another one must wait until that one is committed.

    The thread starts with the first write.
    """

    def __init__(self, database: Database, metrics: CommitMetrics | None = None) -> None:
        self._database = database
        self._metrics = metrics or CommitMetrics()
        self._turn: list[_Write] = []
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._driver: sqlite3.Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
        self._begun = self._closed = False
        self.commits = 0

    def execute(self, statement: Executable | RowStatement, parameters: dict[str, Any]) -> asyncio.Future[bool]:
        """Run one statement. The future is done when it is committed: True if the statement has surely changed its row,
        and False if that is not known, because only the sum of the changed rows of a group is known; or the database's
        error."""
        return self._put(statement, parameters, None)

    def transact(self, change: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run `change` in the transaction of a group. The future has its value when the group is committed."""
        return self._put(None, None, change)

    def _put(
        self,
        statement: Executable | RowStatement | None,
        parameters: dict[str, Any] | None,
        change: Callable[[Connection], Any] | None,
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise RuntimeError("the writer is closed; nothing would commit this write")
        loop = self._loop = self._loop or asyncio.get_running_loop()
        waiter = loop.create_future()
        if not self._turn:
            loop.call_soon(self._hand_over)
        self._turn.append(_Write(waiter, statement, parameters, change))
        return waiter

    def _hand_over(self) -> None:
        if self._turn:
            turn, self._turn = self._turn, []
            self._queue.put(turn)
            if not self._begun:
                self._begun = True
                self._thread.start()

    async def close(self) -> None:
        """Commit the waiting writes, then end the thread. Later writes raise RuntimeError."""
        self._closed = True
        self._hand_over()
        self._queue.put(None)
        if self._begun:
            await asyncio.to_thread(self._thread.join)

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
                group = waiting[start : start + MAX_BATCH]
                try:
                    self._commit(group)
                except Exception as error:  # the thread must go on: without it every write would wait for ever
                    logger.exception("%d writes failed in an unforeseen way", len(group))
                    self._resolve(group, error)
        if self._driver is not None:
            self._driver.close()

    def _commit(self, batch: list[_Write]) -> None:
        begun, started = False, time.perf_counter()
        try:
            if self._database.is_sqlite and all(isinstance(write.statement, RowStatement) for write in batch):
                self._driver = self._driver or self._database.connect_driver()
                self._driver.execute("BEGIN IMMEDIATE")
                begun = True
                self._apply_rows(self._driver, batch)
            else:
                with self._database.writer.begin() as connection:
                    begun = True
                    self._apply(connection, batch)
        except Exception as error:
            self._roll_back()
            error = _as_sqlalchemy(error)
            # After a transient error, and after an error at BEGIN, each write alone would fail in the same way.
            if len(batch) == 1 or not begun or is_transient(error):
                self._resolve(batch, error)
                return
            # One bad write must not fail the others. The group was rolled back, so run each write alone.
            for write in batch:
                self._commit([write])
            return
        self.commits += 1
        self._metrics.committed(len(batch), time.perf_counter() - started)
        self._resolve(batch, None)

    def _roll_back(self) -> None:
        """Roll back the transaction of the driver's connection, or close the connection if it cannot roll back."""
        if self._driver is None or not self._driver.in_transaction:
            return
        try:
            self._driver.rollback()
        except sqlite3.Error:
            logger.exception("a failed transaction cannot be rolled back; its connection is given up")
            with contextlib.suppress(sqlite3.Error):
                self._driver.close()
            self._driver = None

    @staticmethod
    def _apply_rows(driver: sqlite3.Connection, batch: list[_Write]) -> None:
        by_statement: dict[RowStatement, list[_Write]] = {}
        for write in batch:
            assert isinstance(write.statement, RowStatement)
            by_statement.setdefault(write.statement, []).append(write)
        for statement, writes in by_statement.items():
            changed = statement.run(driver, [write.parameters or {} for write in writes])
            for write in writes:
                write.result = changed == len(writes)
        driver.execute("COMMIT")

    @staticmethod
    def _apply(connection: Connection, batch: list[_Write]) -> None:
        grouped: dict[int, list[_Write]] = {}
        for write in batch:
            key = id(write.statement) if write.statement is not None else id(write)
            grouped.setdefault(key, []).append(write)
        for writes in grouped.values():
            first = writes[0]
            if first.change is not None:
                first.result = first.change(connection)
            elif first.statement is not None:
                statement = first.statement.statement if isinstance(first.statement, RowStatement) else first.statement
                changed = connection.execute(statement, [write.parameters or {} for write in writes]).rowcount
                for write in writes:
                    write.result = changed == len(writes)

    @staticmethod
    def _resolve(batch: list[_Write], error: Exception | None) -> None:
        def settle(writes: list[_Write]) -> None:
            for write in writes:
                if write.waiter.done():
                    continue
                if error is not None:
                    write.waiter.set_exception(error)
                else:
                    write.waiter.set_result(write.result)

        try:
            batch[0].waiter.get_loop().call_soon_threadsafe(settle, batch)
        except RuntimeError:
            logger.warning("%d writes were committed after their event loop had closed", len(batch))


def _as_sqlalchemy(error: Exception) -> Exception:
    """The driver's own error as SQLAlchemy would raise it. Other errors are returned unchanged."""
    if not isinstance(error, sqlite3.Error):
        return error
    return DBAPIError.instance(None, None, error, sqlite3.Error, dialect=sqlite.dialect())  # type: ignore[return-value]
