"""The group-commit writer: one thread owns the write connection and commits whatever is waiting in one transaction.

Knows statements and parameters; does not know what a future or a session is. A write is acknowledged (its awaitable
resolves) only after the commit that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError

from skyrl.db.database import Database
from skyrl.db.faults import is_transient

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BATCH = 1_000
"""Writes per transaction; keeps the lock's hold time, and so the engine's wait for it, short."""


class RowStatement:
    """A statement that is run very often, on one row each time. On SQLite it goes straight to the driver: SQLAlchemy's
    way there costs more than the row. Every parameter is a bindparam, of a type that the driver takes as it is."""

    def __init__(self, statement: Any) -> None:
        self.statement: Executable = statement
        compiled = statement.compile(dialect=sqlite.dialect())
        self.sql = str(compiled)
        self.parameters: tuple[str, ...] = tuple(compiled.positiontup)

    def row(self, values: dict[str, Any]) -> list[Any]:
        return [values[name] for name in self.parameters]


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
    """Writes from one event loop, committed in groups by one thread. When the database is away or full, a group fails
    as a whole: none of it is committed, or, where a connection broke at the commit, all of it may be.

    What one turn of the loop asks for goes to the thread together: to wake it costs more than a row. Statements of one
    group that are the same object run as one executemany, in order of their first appearance; so a write that depends
    on another must wait for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._turn: list[_Write] = []
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._driver: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._run, name="group-commit", daemon=True)
        self._closed = False
        self.commits = 0
        self._thread.start()

    async def execute(self, statement: Executable | RowStatement, parameters: dict[str, Any]) -> bool:
        """Run one prepared statement; returns when it is committed, with whether it is known to have changed its row:
        a group tells of all its rows together. Raises what the database raised."""
        return await self._put(statement, parameters, None)

    async def transact(self, change: Callable[[Connection], T]) -> T:
        """Run `change(connection)` inside a transaction of its own group; returns its value once committed."""
        return await self._put(None, None, change)

    def _put(
        self,
        statement: Executable | RowStatement | None,
        parameters: dict[str, Any] | None,
        change: Callable[[Connection], Any] | None,
    ) -> asyncio.Future[Any]:
        if self._closed:
            raise RuntimeError("the writer is closed; nothing would commit this write")
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        if not self._turn:
            loop.call_soon(self._hand_over)
        self._turn.append(_Write(waiter, statement, parameters, change))
        return waiter

    def _hand_over(self) -> None:
        if self._turn:
            turn, self._turn = self._turn, []
            self._queue.put(turn)

    async def close(self) -> None:
        """Commit what is waiting, then end the thread. Later writes raise RuntimeError."""
        self._closed = True
        self._hand_over()
        self._queue.put(None)
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
                except Exception as error:  # without this thread every write would wait for ever
                    logger.exception("%d writes failed in an unforeseen way", len(group))
                    self._resolve(group, error)
        if self._driver is not None:
            self._driver.close()

    def _commit(self, batch: list[_Write]) -> None:
        begun = False
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
            if len(batch) == 1 or not begun or is_transient(error):  # each alone would only wait, and fail, like all
                self._resolve(batch, error)
                return
            # One bad write must not fail its neighbours: the group was rolled back, so run each alone.
            for write in batch:
                self._commit([write])
            return
        self.commits += 1
        self._resolve(batch, None)

    def _roll_back(self) -> None:
        """Leaves no transaction of the driver's connection open, if need be without that connection."""
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
        grouped: dict[RowStatement, list[_Write]] = {}
        for write in batch:
            assert isinstance(write.statement, RowStatement)
            grouped.setdefault(write.statement, []).append(write)
        for statement, writes in grouped.items():
            changed = driver.executemany(statement.sql, [statement.row(w.parameters or {}) for w in writes]).rowcount
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
            head = writes[0]
            if head.change is not None:
                head.result = head.change(connection)
            elif head.statement is not None:
                statement = head.statement.statement if isinstance(head.statement, RowStatement) else head.statement
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
    """The driver's own error as SQLAlchemy raises it; others as they are."""
    if not isinstance(error, sqlite3.Error):
        return error
    return DBAPIError.instance(None, None, error, sqlite3.Error, dialect=sqlite.dialect())  # type: ignore[return-value]
