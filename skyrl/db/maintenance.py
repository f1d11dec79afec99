"""What an operator does to a database beside the server: copy it, check it, make it small.

On SQLite all of it works while a server runs. PostgreSQL brings tools of its own for copies and checks of its files.
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

from skyrl.db import tables  # noqa: F401  (registers the tables)
from skyrl.db.database import Database
from skyrl.db.faults import DatabaseError, reason
from skyrl.db.migrate import SchemaError, newest_revision, revision_of

MOST_TOLD = 20
"""Problems of one kind that are listed."""


def backup(database: Database, to: Path) -> int:
    """Copy a SQLite database, as it is at one moment, into a new file that its owner alone can read; returns its bytes.

    Writers do not wait. The file appears when it is whole and on the disk. Raises FileExistsError; SchemaError on
    PostgreSQL; sqlite3.Error and OSError when the copy fails, and leaves nothing.
    """
    if database.file is None:
        raise SchemaError("only SQLite's databases are copied by skyrl; use pg_dump for this one")
    if to.exists():
        raise FileExistsError(f"{to} exists")
    partial = to.with_name(f"{to.name}.partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    try:
        with closing(sqlite3.connect(database.file)) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, with no log beside it
        _sync(partial)
        os.link(partial, to)  # unlike a rename, it replaces nothing that has come meanwhile
        _sync(to.parent)
    finally:
        partial.unlink()
    return to.stat().st_size


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def problems(database: Database) -> list[str]:
    """What is wrong with the file, with references between rows, and with the schema; empty for a sound database.

    Raises SchemaError as `revision_of` does.
    """
    revision, newest = revision_of(database), newest_revision()
    if revision != newest:
        return [f"schema: at revision {revision or 'none'}, this version's is {newest}: run `skyrl db upgrade`"]
    found = database.read(_of_file) if database.is_sqlite else []
    return found + database.read(_of_schema)


def _of_file(connection: Connection) -> list[str]:
    try:
        said = connection.exec_driver_sql(f"PRAGMA integrity_check({MOST_TOLD})").scalars().all()
    except DatabaseError as error:
        said = [reason(error)]
    if said != ["ok"]:  # what its rows refer to cannot be told then
        return [f"file: {line}" for line in said]
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(MOST_TOLD)
    return [f"rows: {child} row {row} refers to a row of {parent} that is gone" for child, row, parent, _ in dangling]


def _of_schema(connection: Connection) -> list[str]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return [f"schema: differs from this version's: {change}" for change in compare_metadata(context, SQLModel.metadata)]


def vacuum(database: Database) -> None:
    """Rewrite the database without its free space. On SQLite writers wait meanwhile, and it needs its size on the disk
    once more; on PostgreSQL nobody waits, and the space is only free for what comes next."""
    if database.file is None:
        with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM (ANALYZE)")
        return
    database.make_reclaimable()
    with closing(database.connect_driver()) as connection:
        connection.execute("VACUUM")
    database.empty_log()
