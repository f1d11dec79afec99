"""Commits groups of row statements on PostgreSQL in one round trip, with psycopg's pipeline mode.

BEGIN, the write lock, the rows and COMMIT go out together. So the lock is held while PostgreSQL works, and not while
messages travel or while this process waits for a core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from skyrl.storage.db.database import TAKE_WRITE_LOCK, Database
from skyrl.storage.db.faults import OPERATIONAL_ERRORS
from skyrl.storage.db.row_connection import Write
from skyrl.storage.db.row_statement import RowStatement

PING_AFTER_S = 1.0
"""A connection that was not used for this time is tested before its next use, as SQLAlchemy's pool does each time."""


class PipelinedRows:
    """One connection of the pool for writes, kept until `close`, which is used by one thread at a time. Without
    `ordered`, its transactions do not take the write lock."""

    def __init__(self, database: Database, *, ordered: bool) -> None:
        self._database = database
        self._ordered = ordered
        self._pooled: PoolProxiedConnection | None = None
        self._used_at = 0.0
        logging.getLogger("psycopg").addFilter(_tells_more)

    def commit(self, writes: Sequence[Write]) -> bool:
        """Run the writes, which are row statements, and commit. Sets their results. False if PostgreSQL or the driver
        refused one of them: then nothing is committed, and the caller must run them in another way to find out which.
        Raises SQLAlchemy's errors when the database is away or locked. When the connection broke during the commit,
        the writes may all be committed."""
        dialect = self._database.writer.dialect
        assert dialect.dbapi is not None
        driver_error = cast(type[Exception], dialect.dbapi.Error)
        try:
            self._run(self._open(), writes)
        except Exception as error:
            broken = self._pooled is None or self._driver.closed
            self._roll_back()  # after every error: an open transaction has the write lock
            if isinstance(error, SQLAlchemyError):
                raise  # the pool has no connection
            if not isinstance(error, driver_error):
                return False  # a value that cannot be sent, such as text with half of a surrogate pair
            wrapped = DBAPIError.instance(
                None, None, error, driver_error, connection_invalidated=broken, dialect=dialect
            )
            if broken or isinstance(wrapped, OPERATIONAL_ERRORS):
                raise wrapped from error
            return False
        self._used_at = time.monotonic()
        return True

    def _run(self, driver: Any, writes: Sequence[Write]) -> None:
        by_statement: dict[RowStatement, list[Write]] = {}
        for write in writes:
            assert isinstance(write.statement, RowStatement)
            by_statement.setdefault(write.statement, []).append(write)
        cursors: list[tuple[Any, list[Write]]] = []
        with driver.pipeline():
            driver.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            if self._ordered:
                driver.execute(TAKE_WRITE_LOCK)
            for statement, same in by_statement.items():
                cursor = driver.cursor()
                cursor.executemany(statement.postgres, statement.in_order([write.parameters for write in same]))
                cursors.append((cursor, same))
            driver.execute("COMMIT")
        for cursor, same in cursors:
            for write in same:
                write.result = cursor.rowcount == len(same)

    def _open(self) -> Any:
        """psycopg's connection, a new one if there is none or if the old one does not answer any more."""
        if self._pooled is not None and time.monotonic() - self._used_at > PING_AFTER_S:
            self._test()
        if self._pooled is None:
            self._pooled = self._database.writer.raw_connection()
            self._driver.autocommit = True  # `_run` sends BEGIN itself: psycopg's own would be a round trip more
        return self._driver

    @property
    def _driver(self) -> Any:
        assert self._pooled is not None
        return self._pooled.driver_connection

    def _test(self) -> None:
        try:
            self._driver.execute("")
        except Exception:  # of any kind: the connection is given up for a new one
            self.close()

    def _roll_back(self) -> None:
        """Closes a connection that cannot roll back."""
        if self._pooled is not None:
            try:
                self._driver.rollback()
            except Exception:  # of any kind, as above
                self.close()

    def close(self) -> None:
        if self._pooled is not None:
            self._pooled.invalidate()
            self._pooled = None


def _tells_more(record: logging.LogRecord) -> bool:
    """False for psycopg's warnings of errors that end a pipeline after another one. It raises that one, and these
    follow from it. They would come with each sample that a client sends again, and name host, user and database."""
    return not str(record.msg).startswith("error ignored terminating")
