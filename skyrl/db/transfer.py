"""Carries a server's rows from SQLite to PostgreSQL: all rows in one transaction, compared before they are committed.

Knows the tables as they are declared. Does not know what their rows mean, and touches no file that rows name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import JSON, Column, Connection, Row, Select, Table, Text, bindparam, cast, func, insert, select, text
from sqlmodel import SQLModel

from skyrl.db import tables  # noqa: F401  (registers the tables)
from skyrl.db.database import Database
from skyrl.db.migrate import SchemaError, migrate, newest_revision, revision_of

ROWS = 50
"""Rows that are read and inserted at once. A row may hold the body of a request, which may be megabytes."""

Value = str | int | float | bool | bytes | None


@dataclass
class Content:
    """What a table holds, whatever the order of its rows: their number, and the sum of their digests."""

    rows: int = 0
    digests: int = 0

    def add(self, row: Row[tuple[Value, ...]]) -> None:
        self.rows += 1
        self.digests += int.from_bytes(hashlib.sha256(repr(tuple(row)).encode()).digest(), "big")


def carry_over(source: Database, target: Database) -> dict[str, int]:
    """Copy all rows of a SQLite database into an empty PostgreSQL database; returns the number of rows of each table.

    Makes the tables in `target` if there are none. Nobody may write to either database meanwhile. Raises SchemaError:
    `source` is not at this version's schema, `target` holds rows, a text holds U+0000, or what was written differs from
    what was read. Then `target` has its tables and no rows.
    """
    revision, newest = revision_of(source), newest_revision()
    if revision != newest:
        raise SchemaError(f"{source.file} is at revision {revision or 'none'}, not {newest}: run `skyrl db upgrade`")
    migrate(target)
    ordered = SQLModel.metadata.sorted_tables  # a table that others refer to comes before them

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
    """JSON goes over as the text that it is, so that null, the order of keys and every digit stay."""
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
    """PostgreSQL counts new rows from the highest number that was copied."""
    counted = table.autoincrement_column
    if counted is None:
        return
    sequence = connection.execute(
        text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table.name, "column": counted.name}
    ).scalar_one()
    highest = connection.execute(select(func.max(counted))).scalar_one()
    if sequence is not None and highest is not None:
        connection.execute(text("SELECT setval(:sequence, :highest)"), {"sequence": sequence, "highest": highest})
