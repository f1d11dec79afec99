"""Commits groups of row statements on a connection of SQLite's own driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Executable

from skyrl.storage.db.database import Database
from skyrl.storage.db.row_statement import RowStatement

logger = logging.getLogger(__name__)


class Write:
    """One write of a group: a statement with its parameters, or a change."""

    __slots__ = ("change", "parameters", "result", "statement", "waiter")

    def __init__(
        self,
        waiter: asyncio.Future[object],
        statement: Executable | RowStatement | None,
        parameters: dict[str, Any] | None,
        change: Callable[[Connection], object] | None,
    ) -> None:
        self.statement = statement
        self.parameters = parameters or {}
        self.change = change
        self.result: object = None
        self.waiter = waiter

    @property
    def bytes(self) -> int:
        """The size of the row of a row statement."""
        assert isinstance(self.statement, RowStatement)
        return self.statement.bytes_of(self.parameters)


class RowConnection:
    """One connection, which is used by one thread at a time. `settings` are pragmas that differ from those of the
    database's other connections."""

    def __init__(self, database: Database, *settings: str) -> None:
        self._database = database
        self._settings = settings
        self._driver: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        return self._driver is not None

    def open(self) -> sqlite3.Connection:
        """The connection, opened if it is not. Raises sqlite3.Error or SQLAlchemy's errors."""
        if self._driver is None:
            driver = self._database.connect_driver()
            for setting in self._settings:
                driver.execute(f"PRAGMA {setting}")
            self._driver = driver
        return self._driver

    def begin(self) -> None:
        """Begin a transaction with the write lock, on an open or a new connection. Raises as `open`."""
        self.open().execute("BEGIN IMMEDIATE")

    def commit(self, writes: Sequence[Write]) -> None:
        """Run the writes, which are row statements, and commit. Sets their results. Raises sqlite3.Error; then the
        caller must roll back."""
        driver = self.open()
        by_statement: dict[RowStatement, list[Write]] = {}
        for write in writes:
            assert isinstance(write.statement, RowStatement)
            by_statement.setdefault(write.statement, []).append(write)
        for statement, same in by_statement.items():
            changed = statement.run(driver, [write.parameters for write in same])
            for write in same:
                write.result = changed == len(same)
        driver.execute("COMMIT")

    def roll_back(self) -> None:
        """Roll back the transaction if there is one. Closes a connection that cannot roll back."""
        if self._driver is None or not self._driver.in_transaction:
            return
        try:
            self._driver.rollback()
        except sqlite3.Error:
            logger.exception("a failed transaction cannot be rolled back; its connection is given up")
            self.close()

    def close(self) -> None:
        if self._driver is not None:
            with contextlib.suppress(sqlite3.Error):
                self._driver.close()
            self._driver = None
