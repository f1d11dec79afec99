"""Copies all rows of a server from SQLite to PostgreSQL in one transaction, and compares them before the commit.

Does not copy the files of the state directory or of the checkpoint store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import JSON, Column, Connection, Row, Select, Table, Text, bindparam, cast, func, insert, select, text
from sqlmodel import SQLModel

from skyrl.storage.db import tables  # noqa: F401  (registers the tables)
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import SchemaError, migrate, newest_revision, revision_of

ROWS = 50
"""How many rows are read and inserted together. A row may contain a body of megabytes."""

Value = str | int | float | bool | bytes | None


@dataclass
class Content:
    """The number of rows of a table, and the sum of their digests. Neither depends on the order of the rows."""

    rows: int = 0
    digests: int = 0

    def add(self, row: Row[tuple[Value, ...]]) -> None:
        self.rows += 1
        self.digests += int.from_bytes(hashlib.sha256(repr(tuple(row)).encode()).digest(), "big")


def carry_over(source: Database, target: Database) -> dict[str, int]:
    """Copy all rows of a SQLite database into an empty PostgreSQL database; returns the number of rows of each table.

    Makes the tables in `target` if they are missing. Nobody may write to either database meanwhile. Raises SchemaError
    when `source` is not at this version's schema, when `target` has rows, when a text contains U+0000, and when the
    written rows differ from the read rows. Then `target` has no new rows.
    """
    revision, newest = revision_of(source), newest_revision()
    if revision != newest:
        raise SchemaError(f"{source.file} is at revision {revision or 'none'}, not {newest}: run `skyrl db upgrade`")
    migrate(target)
    ordered = SQLModel.metadata.sorted_tables  # a table comes after the tables to which it refers

    def copy_all(reading: Connection, writing: Connection) -> dict[str, int]:
        for table in ordered:
            if writing.execute(select(func.count()).select_from(table)).scalar_one():
                raise SchemaError(f"{table.name} in PostgreSQL holds rows: give an empty database")
        return {table.name: _copy(table, reading, writing) for table in ordered}

    return source.read(lambda reading: target.write(lambda writing: copy_all(reading, writing)))


def _copy(table: Table, reading: Connection, writing: Connection) -> int:
    read, written = Content(), Content()
    inserting = insert(table).values({column.name: _parameter(column) for column in table.columns})
    for rows in _batches(table, reading):
        for row in rows:
            _check_text(table, row)
            read.add(row)
        writing.execute(inserting, [dict(zip(_names(table), row, strict=True)) for row in rows])
    for rows in _batches(table, writing):
        for row in rows:
            written.add(row)
    if read != written:
        raise SchemaError(f"the rows of {table.name} differ in PostgreSQL: nothing was kept")
    _raise_counter(table, writing)
    return read.rows


def _names(table: Table) -> list[str]:
    return [f"value_of_{column.name}" for column in table.columns]


def _parameter(column: Column[Value]) -> object:
    """JSON is copied as text, so that null, the order of keys and all digits stay the same."""
    if isinstance(column.type, JSON):
        return cast(bindparam(f"value_of_{column.name}", type_=Text()), JSON)
    return bindparam(f"value_of_{column.name}", type_=column.type)


def _rows_of(table: Table) -> Select[tuple[Value, ...]]:
    return select(*(cast(c, Text) if isinstance(c.type, JSON) else c for c in table.columns))


def _batches(table: Table, connection: Connection) -> Iterator[list[Row[tuple[Value, ...]]]]:
    result = connection.execute(_rows_of(table).execution_options(yield_per=ROWS))
    for rows in result.partitions():
        yield list(rows)


def _check_text(table: Table, row: Row[tuple[Value, ...]]) -> None:
    for column, value in zip(table.columns, row, strict=True):
        if isinstance(value, str) and "\0" in value:
            key = [row[list(table.columns).index(part)] for part in table.primary_key]
            raise SchemaError(
                f"PostgreSQL keeps no character U+0000, which {column.name} of {table.name} {key} holds: change or "
                "delete that row in SQLite"
            )


def _raise_counter(table: Table, connection: Connection) -> None:
    """Let PostgreSQL number new rows from the highest copied number on."""
    number = table.autoincrement_column
    if number is None:
        return
    sequence = connection.execute(
        text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table.name, "column": number.name}
    ).scalar_one()
    highest = connection.execute(select(func.max(number))).scalar_one()
    if sequence is not None and highest is not None:
        connection.execute(text("SELECT setval(:sequence, :highest)"), {"sequence": sequence, "highest": highest})
