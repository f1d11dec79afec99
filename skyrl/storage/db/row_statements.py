"""Statements that run very often and change one row each time, and connections that commit groups of them.

The drivers execute them directly, because SQLAlchemy's overhead costs more than the row. `RowConnection` commits a
group on a connection of SQLite's own driver, many rows with one statement. `PipelinedRows` commits it on PostgreSQL in
one round trip, with psycopg's pipeline mode: BEGIN, the write lock, the rows and COMMIT go out together. So the lock is
held while PostgreSQL works, and not while messages travel or while this process waits for a core.

`skyrl.storage.db.writer` makes the groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, cast

from sqlalchemy import Connection, Executable, Insert, PoolProxiedConnection, Update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.sql.compiler import SQLCompiler

from skyrl.storage.db.database import TAKE_WRITE_LOCK, Database
from skyrl.storage.db.faults import OPERATIONAL_ERRORS

SIZES = (256, 128, 64, 32, 16, 8, 4, 2)
"""How many rows one statement takes. SQLite's driver keeps a compiled statement of each size, with its last values."""

ROW_BYTES = 8 * 2**10
"""Larger rows run one by one: SQLite copies the values of a statement with many rows once more, and that costs more
than the statement saves."""

STATEMENT_BYTES = 2**20
"""The most bytes in a statement with many rows."""

LEAST_FILLED = 3 / 4
"""A statement whose last rows are empty is used if at least this part of its rows is filled."""


class RowStatement:
    """The driver executes the statement directly, because SQLAlchemy's overhead costs more than the row. Therefore
    every parameter must be a bindparam of a type that the driver accepts without conversion.

    `many` is SQLite's text for the rows of a group. It reads them with `FROM given`: the column `place` (1, 2, ..
    within one statement) and a column for each parameter, with the parameter's name. The last rows of `given` may be
    empty: all their parameters are NULL, and `many` must ignore them. The rows come in rising order of the parameter
    `rising`, if there is one. Of several rows with the same value of the parameter `first_of`, only the first one
    runs. Large rows (see ROW_BYTES) run one by one, before the others. A statement without `many` runs once for each
    row.

    `key` names the parameters of a unique key. Processes that write the same keys at the same time must write them in
    the same order, or each would wait for the other.

    `long` names the parameters whose text or bytes may be long; a row has the size of these. A character of text counts
    as a byte.
    """

    def __init__(
        self,
        statement: Insert | Update,
        many: str | None = None,
        rising: str | None = None,
        first_of: str | None = None,
        long: Sequence[str] = (),
        key: Sequence[str] = (),
    ) -> None:
        self.statement: Executable = statement
        self.postgres = str(statement.inline().compile(dialect=PGDialect_psycopg()))
        """Text for psycopg, with named parameters."""
        compiled = statement.compile(dialect=sqlite.dialect())
        assert isinstance(compiled, SQLCompiler)
        assert compiled.positiontup is not None, "SQLite's parameters have places, not names"
        self.sql = str(compiled)
        self.parameters: tuple[str, ...] = tuple(compiled.positiontup)
        self._many = many
        self._rising = rising
        self._first_of = first_of
        self._long = tuple(long)
        self._key = tuple(key)
        self._values = itemgetter(*self.parameters)
        self.sql_of = cache(self._sql_of)

    def bytes_of(self, row: dict[str, Any]) -> int:
        """The size of a row."""
        return sum([len(value) for name in self._long if (value := row[name]) is not None])

    def in_order(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows in the order of their unique key, if the statement has one."""
        return sorted(rows, key=lambda row: [(row[name] is not None, row[name]) for name in self._key])

    def run(self, driver: sqlite3.Connection, rows: Sequence[dict[str, Any]]) -> int:
        """Run it for the parameters of each row. Returns the number of changed rows. Raises sqlite3.Error; then the
        caller must roll back, because some of the rows may be changed."""
        if len(rows) == 1 or self._many is None:
            return self._run_one_by_one(driver, [self._values(row) for row in rows])
        if self._first_of is not None:
            rows = list({row[self._first_of]: row for row in reversed(rows)}.values())[::-1]
        if self._rising is not None:
            rows = sorted(rows, key=itemgetter(self._rising))
        large: list[tuple[Any, ...]] = []
        others: list[tuple[Any, ...]] = []
        most_bytes = 1
        for row in rows:
            row_bytes = self.bytes_of(row)
            if row_bytes > ROW_BYTES:
                large.append(self._values(row))
            else:
                others.append(self._values(row))
                most_bytes = max(most_bytes, row_bytes)
        changed = self._run_one_by_one(driver, large) if large else 0
        begin, at_most = 0, STATEMENT_BYTES // most_bytes
        while begin < len(others):
            some = others[begin : begin + at_most]
            size = _size_for(len(some))
            changed += self._run_some(driver, some[:size], size)
            begin += size
        return changed

    def _run_one_by_one(self, driver: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        return driver.executemany(self.sql, rows).rowcount

    def _run_some(self, driver: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], size: int) -> int:
        """Run it for `rows` in a statement for `size` rows."""
        if size == 1:
            return driver.execute(self.sql, rows[0]).rowcount
        parameters: list[object] = []
        for values in rows:
            parameters += values
        parameters += [None] * ((size - len(rows)) * len(self.parameters))
        return driver.execute(self.sql_of(size), parameters).rowcount

    def _sql_of(self, size: int) -> str:
        """The text of one statement for `size` rows. It begins with INSERT or UPDATE, because otherwise the driver does
        not tell how many rows were changed."""
        assert self._many is not None
        marks = ", ".join("?" * len(self.parameters))
        rows = ", ".join(f"({place}, {marks})" for place in range(1, size + 1))
        given = f"(WITH given (place, {', '.join(self.parameters)}) AS (VALUES {rows}) SELECT * FROM given)"
        return self._many.replace("FROM given", f"FROM {given}")


def _size_for(rows: int) -> int:
    """The size of the next statement for so many waiting rows: the largest size that these rows fill, or fill nearly;
    1 for a single row."""
    return next((size for size in SIZES if rows >= size * LEAST_FILLED), 1)


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
