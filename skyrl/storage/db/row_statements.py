"""Statements that run very often and change one row each time, and the connection that commits groups of them.

Their texts go to the drivers as they are, because SQLAlchemy's overhead costs more than the row. SQLite changes many
rows with one statement. PostgreSQL gets a whole group in one round trip, with psycopg's pipeline mode: BEGIN, the write
lock, the rows and COMMIT go out together. So the lock is held while PostgreSQL works, and not while messages travel or
while this process waits for a core.

`skyrl.storage.db.writer` makes the groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from skyrl.storage.db.database import TAKE_WRITE_LOCK, Database

SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""How many rows one statement takes. SQLite's driver keeps a compiled statement of each size, with its last values."""

ROW_BYTES = 8 * 2**10
"""Larger rows run one by one: SQLite copies the values of a statement with many rows once more, and that costs more
than the statement saves."""

LEAST_FILLED = 3 / 4
"""A statement whose last rows are empty is used if at least this part of its rows is filled."""


class RowStatement:
    """One statement, in the text of each database. The drivers must accept each parameter without conversion.

    `sqlite` is the text for one or many rows. It reads them with `FROM given`: the column `place` (1, 2, .. within one
    statement) and a column for each of `parameters`. It begins with INSERT or UPDATE, because otherwise the driver does
    not tell how many rows were changed. The last rows of `given` may be empty: all their parameters are NULL, and the
    text must ignore them. The rows come in rising order of the parameter `rising`, if there is one. Of several rows
    with the same value of the parameter `first_of`, only the first one runs. Large rows (see ROW_BYTES) run one by one,
    before the others.

    `sqlite_one` is a plain text for one row, with a `?` for each of `parameters`, in their order. Statements of samples
    have one, because `FROM given` copies a row's values.

    `postgres` is psycopg's text for one row, with named parameters (`marks`). `key` names the parameters of a unique
    key. Processes that write the same keys at the same time must write them in the same order, or each would wait for
    the other.

    `long` names the parameters whose text or bytes may be long; a row has the size of these. A character of text counts
    as a byte.
    """

    def __init__(
        self,
        parameters: Sequence[str],
        *,
        sqlite: str,
        sqlite_one: str | None = None,
        postgres: str,
        rising: str | None = None,
        first_of: str | None = None,
        long: Sequence[str] = (),
        key: Sequence[str] = (),
    ) -> None:
        self.parameters = tuple(parameters)
        self.postgres = postgres
        self._sqlite = sqlite
        self._sqlite_one = sqlite_one
        self._rising = rising
        self._first_of = first_of
        self._long = tuple(long)
        self._key = tuple(key)
        self._values = itemgetter(*self.parameters)
        self.sqlite_for = cache(self._sqlite_for)

    def bytes_of(self, row: dict[str, Any]) -> int:
        """The size of a row."""
        return sum([len(value) for name in self._long if (value := row[name]) is not None])

    def in_order(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows in the order of their unique key, if the statement has one."""
        return sorted(rows, key=lambda row: [(row[name] is not None, row[name]) for name in self._key])

    def execute(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> int:
        """Run it for the parameters of each row, in a transaction of the caller. Returns the number of changed rows.
        Raises SQLAlchemy's errors."""
        if connection.dialect.name == "sqlite":
            return sum(connection.exec_driver_sql(text, values).rowcount for text, values in self.calls(rows))
        return connection.exec_driver_sql(self.postgres, self.in_order(rows)).rowcount

    def calls(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, tuple[object, ...]]]:
        """What SQLite's driver is to execute for the rows: texts with their values."""
        if len(rows) == 1:
            yield self.sqlite_for(1), self._values(rows[0])
            return
        if self._first_of is not None:
            rows = list({row[self._first_of]: row for row in reversed(rows)}.values())[::-1]
        if self._rising is not None:
            rows = sorted(rows, key=itemgetter(self._rising))
        others: list[tuple[Any, ...]] = []
        for row in rows:
            if self.bytes_of(row) > ROW_BYTES:
                yield self.sqlite_for(1), self._values(row)
            else:
                others.append(self._values(row))
        while others:
            size = next(size for size in SIZES if len(others) >= size * LEAST_FILLED)
            some, others = others[:size], others[size:]
            some += [(None,) * len(self.parameters)] * (size - len(some))
            yield self.sqlite_for(size), tuple([value for values in some for value in values])

    def _sqlite_for(self, size: int) -> str:
        """SQLite's text for `size` rows."""
        if size == 1 and self._sqlite_one is not None:
            return self._sqlite_one
        row_marks = ", ".join("?" * len(self.parameters))
        rows = ", ".join(f"({place}, {row_marks})" for place in range(1, size + 1))
        given = f"(WITH given (place, {', '.join(self.parameters)}) AS (VALUES {rows}) SELECT * FROM given)"
        return self._sqlite.replace("FROM given", f"FROM {given}")


def marks(parameters: Sequence[str]) -> str:
    """psycopg's marks for named parameters, with commas between them."""
    return ", ".join(f"%({name})s" for name in parameters)


class Write:
    """One write of a group: a statement with its parameters, or a change."""

    __slots__ = ("change", "parameters", "result", "statement", "waiter")

    def __init__(
        self,
        waiter: asyncio.Future[object],
        statement: RowStatement | None,
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
        assert self.statement is not None
        return self.statement.bytes_of(self.parameters)


Group = list[tuple[RowStatement, list[dict[str, Any]]]]
"""Statements of one transaction, each with its rows."""

PING_AFTER_S = 1.0
"""A connection to PostgreSQL that was not used for this time is tested before its next use, as SQLAlchemy's pool does
each time."""


class RowConnection:
    """A connection that commits rows, kept until `close`, which is used by one thread at a time.

    `settings` are SQLite's pragmas that differ from those of the database's other connections. Without `ordered`,
    transactions on PostgreSQL do not take the write lock."""

    def __init__(self, database: Database, *settings: str, ordered: bool = True) -> None:
        self._database = database
        self._settings = settings
        self._ordered = ordered
        self._driver: Any = None
        self._used_at = 0.0
        logging.getLogger("psycopg").addFilter(_tells_more)

    @property
    def is_open(self) -> bool:
        return self._driver is not None

    def open(self) -> None:
        """Connect if there is no connection, or if the old one does not answer any more. Raises SQLAlchemy's or the
        driver's errors."""
        on_sqlite = self._database.is_sqlite
        if not on_sqlite and self._driver is not None and time.monotonic() - self._used_at > PING_AFTER_S:
            try:
                self._driver.execute("")
            except Exception:  # of any kind: the connection is given up for a new one
                self.close()
        if self._driver is None:
            driver: Any = self._database.connect_driver()
            if not on_sqlite:
                driver.autocommit = True  # BEGIN is sent with the rows: psycopg's own would be a round trip more
            for setting in self._settings:
                driver.execute(f"PRAGMA {setting}")
            self._driver = driver

    def commit(self, writes: Sequence[Write]) -> None:
        """Run the writes, which have row statements, in a transaction of their own. Sets their results. Raises
        SQLAlchemy's errors, and UnicodeEncodeError or OverflowError for a value that cannot be sent. Then nothing is
        committed; but when the connection broke during the commit, the writes may all be."""
        by_statement: dict[RowStatement, list[Write]] = {}
        for write in writes:
            assert write.statement is not None
            by_statement.setdefault(write.statement, []).append(write)
        group = [(statement, [write.parameters for write in same]) for statement, same in by_statement.items()]
        run = self._on_sqlite if self._database.is_sqlite else self._on_postgres
        try:
            self.open()
            changed = run(self._driver, group)
        except Exception as error:
            broken = self._driver is None or getattr(self._driver, "closed", False)
            self._roll_back()
            dialect = self._database.writer.dialect
            driver_error = cast(type[Exception], dialect.loaded_dbapi.Error)
            if not isinstance(error, driver_error):
                raise
            rows = [write.parameters for write in writes]
            raise DBAPIError.instance(
                None, rows, error, driver_error, True, connection_invalidated=broken, dialect=dialect
            ) from error
        for same, count in zip(by_statement.values(), changed, strict=True):
            for write in same:
                write.result = count == len(same)
        self._used_at = time.monotonic()

    @staticmethod
    def _on_sqlite(driver: Any, group: Group) -> list[int]:
        """Returns the number of changed rows of each statement."""
        driver.execute("BEGIN IMMEDIATE")
        changed = [sum([driver.execute(*call).rowcount for call in statement.calls(rows)]) for statement, rows in group]
        driver.execute("COMMIT")
        return changed

    def _on_postgres(self, driver: Any, group: Group) -> list[int]:
        """As `_on_sqlite`."""
        cursors: list[Any] = []
        with driver.pipeline():
            driver.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            if self._ordered:
                driver.execute(TAKE_WRITE_LOCK)
            for statement, rows in group:
                cursors.append(driver.cursor())
                cursors[-1].executemany(statement.postgres, statement.in_order(rows))
            driver.execute("COMMIT")
        return [cursor.rowcount for cursor in cursors]

    def _roll_back(self) -> None:
        """Ends a transaction, which would keep the write lock. Closes a connection that cannot roll back."""
        if self._driver is not None:
            try:
                self._driver.rollback()
            except Exception:  # of any kind: the connection is given up for a new one
                self.close()

    def close(self) -> None:
        if self._driver is not None:
            with contextlib.suppress(Exception):
                self._driver.close()
            self._driver = None


def _tells_more(record: logging.LogRecord) -> bool:
    """False for psycopg's warnings of errors that end a pipeline after another one. It raises that one, and these
    follow from it. They would come with each sample that a client sends again, and name host, user and database."""
    return not str(record.msg).startswith("error ignored terminating")
