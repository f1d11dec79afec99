"""What an operator does with a database: copies, checks and vacuums it, or carries its rows over to PostgreSQL.

Copies, checks and the vacuum work on SQLite while a server runs. PostgreSQL has its own tools to copy a database and to
check its files. `carry_over` copies all rows from SQLite to PostgreSQL in one transaction, and compares them before the
commit; it does not copy the files of the state directory or of the checkpoint store.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import JSON, Column, Connection, Row, Select, Table, Text, bindparam, cast, func, insert, select, text
from sqlmodel import SQLModel

from skyrl.storage.checkpoint_store.directories import sync
from skyrl.storage.db import tables  # noqa: F401  (registers the tables)
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.storage.db.migrate import SchemaError, migrate, newest_revision, revision_of

MOST_LISTED = 20
"""The most problems of one kind that are listed."""


def backup(database: Database, to: Path) -> int:
    """Copy a SQLite database, as it is at one moment, into a new file with mode 0600. Returns the size in bytes.

    Writers do not wait. The file gets its name when it is complete and synced. Raises FileExistsError when the file
    exists, SchemaError on PostgreSQL, and sqlite3.Error or OSError when the copy fails; then no file is left.
    """
    if database.file is None:
        raise SchemaError("skyrl copies only SQLite databases; use pg_dump for this one")
    if to.exists():
        raise FileExistsError(f"{to} exists")
    partial = to.with_name(f"{to.name}.partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    try:
        with closing(sqlite3.connect(database.file)) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        sync(partial)
        os.link(partial, to)  # unlike a rename, this never replaces a file
        sync(to.parent)
    finally:
        partial.unlink()
    return to.stat().st_size


def problems(database: Database) -> list[str]:
    """Problems of the file, of references between rows, and of the schema. Empty if there are none.

    Raises SchemaError as `revision_of` does.
    """
    revision, newest = revision_of(database), newest_revision()
    if revision != newest:
        return [f"schema: at revision {revision or 'none'}, this version's is {newest}: run `skyrl db upgrade`"]
    file_problems = database.read(_file_problems) if database.is_sqlite else []
    return file_problems + database.read(_schema_problems)


def _file_problems(connection: Connection) -> list[str]:
    try:
        lines = connection.exec_driver_sql(f"PRAGMA integrity_check({MOST_LISTED})").scalars().all()
    except DatabaseError as error:
        lines = [reason(error)]
    if lines != ["ok"]:  # references between rows cannot be checked in a damaged file
        return [f"file: {line}" for line in lines]
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(MOST_LISTED)
    return [f"rows: {child} row {row} refers to a missing row of {parent}" for child, row, parent, _ in dangling]


def _schema_problems(connection: Connection) -> list[str]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return [f"schema: differs from this version's: {change}" for change in compare_metadata(context, SQLModel.metadata)]


def vacuum(database: Database) -> None:
    """Remove the free space of the database.

    SQLite rewrites the file: writers wait, and meanwhile this takes twice the size of the file on the disk. On
    PostgreSQL nobody waits; the space is used for new rows, and the files do not become smaller.
    """
    if database.file is None:
        with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM (ANALYZE)")
        return
    with closing(database.connect_driver()) as connection:
        connection.execute("VACUUM")
    database.empty_log()


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
