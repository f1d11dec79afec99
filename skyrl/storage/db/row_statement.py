"""A statement that runs very often and changes one row each time, and on SQLite many rows of a group at once.

Knows SQL text and parameters. Does not know transactions; `skyrl.storage.db.writer` runs these statements.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Executable, Insert, Update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.sql.compiler import SQLCompiler

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
