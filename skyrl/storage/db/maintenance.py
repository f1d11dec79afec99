"""Copies, checks and vacuums a database, for an operator.

On SQLite all of this works while a server runs. PostgreSQL has its own tools to copy a database and to check its files.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection
from sqlmodel import SQLModel

from skyrl.storage.db import tables  # noqa: F401  (registers the tables)
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.storage.db.migrate import SchemaError, newest_revision, revision_of

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
        _sync(partial)
        os.link(partial, to)  # unlike a rename, this never replaces a file
        _sync(to.parent)
    finally:
        partial.unlink()
    return to.stat().st_size


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    database.make_reclaimable()
    with closing(database.connect_driver()) as connection:
        connection.execute("VACUUM")
    database.empty_log()
