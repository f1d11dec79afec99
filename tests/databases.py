"""Chooses the database of a test's server: a SQLite file in the state directory or, if SKYRL_TEST_DATABASE is
postgres, one PostgreSQL database for each state directory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from skyrl.base.config.server import ServerConfig
from skyrl.cli.demo.server import DemoServer
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate
from tests.postgres_server import PostgresServer


def hold_records(connection: Connection) -> None:
    """With the write lock held by the same transaction: nothing at all is committed until it ends. On PostgreSQL
    forwarded samples are recorded without that lock."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("LOCK TABLE futures IN EXCLUSIVE MODE")


class StateDatabases:
    """One PostgreSQL database per state directory. The first request for a database makes it, with its tables."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._names: dict[Path, str] = {}
        self._template = server.new_database()
        with closing(Database(server.url(self._template))) as database:
            migrate(database)

    def url_of(self, state_dir: Path) -> str:
        if state_dir not in self._names:
            self._names[state_dir] = self._server.new_database(self._template)
        return self._server.url(self._names[state_dir])

    def drop_below(self, directory: Path) -> None:
        """Drop the databases of all state directories that are `directory` or lie in it."""
        for state_dir in [name for name in self._names if name.is_relative_to(directory)]:
            self._server.drop_database(self._names.pop(state_dir))


@cache
def _migrated_file() -> bytes:
    """A SQLite file with tables and no rows."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "skyrl.db"
        with closing(Database(f"sqlite:///{path}")) as database:
            migrate(database)
        return path.read_bytes()


def make_tables(database: Database) -> None:
    """Give a database this version's tables, as `migrate` does. A new SQLite file is a copy of a migrated one, because
    the migrations take longer than most tests."""
    if database.file is None or database.file.exists():
        migrate(database)
    else:
        database.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database.file.write_bytes(_migrated_file())


_databases: StateDatabases | None = None


def url_of(state_dir: Path) -> str:
    """The database of a server that has this state directory and no `database_url`."""
    return f"sqlite:///{state_dir / 'skyrl.db'}" if _databases is None else _databases.url_of(state_dir)


@contextmanager
def used_by_every_server(databases: StateDatabases) -> Iterator[None]:
    """Inside the block every server uses one of `databases`, whether it runs in this process or in its own."""
    init = DemoServer.__init__

    def init_with_url(self: DemoServer, state_dir: Path, *flags: str, **options: Any) -> None:
        added_flags = () if "--database-url" in flags else ("--database-url", url_of(state_dir))
        init(self, state_dir, *flags, *added_flags, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}._databases", databases)
        patch.setattr(ServerConfig, "database", property(lambda c: c.database_url or url_of(c.state_dir)))
        patch.setattr(DemoServer, "__init__", init_with_url)
        yield


def rows_in(url: str, query: str, **values: Any) -> list[tuple[Any, ...]]:
    """The rows that a query returns; the query names its parameters as `:name`."""
    with closing(Database(url)) as database:
        return database.read(lambda c: [tuple(row) for row in c.execute(text(query), values)])
