"""Connections: one engine for reads, one for writes, with SQLite set up for several processes on one file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from skyrl.config import ConfigError

T = TypeVar("T")

BUSY_TIMEOUT_MS = 30_000


class Database:
    """Engines on one database. Writes take the lock at BEGIN, so that two processes queue instead of failing.

    On SQLite a commit survives the death of any process. A `power_safe` one also syncs the log to disk (about 5 ms),
    which makes everything committed before, by any process, survive a loss of power too.

    Raises ConfigError for a URL that cannot be read, or whose driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            parsed = make_url(url)
            self.is_sqlite = parsed.get_backend_name() == "sqlite"
            self.reader = self._engine("BEGIN")
            self.writer = self._engine("BEGIN IMMEDIATE")
            self._syncing_writer = self._engine("BEGIN IMMEDIATE", "FULL") if self.is_sqlite else self.writer
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ConfigError(f"database_url: {error}") from error
        if self.is_sqlite and parsed.database and parsed.database != ":memory:":
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)

    def _engine(self, begin: str, synchronous: str = "NORMAL") -> Engine:
        if not self.is_sqlite:
            return create_engine(self.url, pool_pre_ping=True)
        engine = create_engine(self.url, connect_args={"check_same_thread": False})

        @event.listens_for(engine, "connect")
        def _connect(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # BEGIN is ours, below; the driver's own comes too late
            for pragma in (
                f"busy_timeout={BUSY_TIMEOUT_MS}",
                "journal_mode=WAL",
                f"synchronous={synchronous}",
                "foreign_keys=ON",
                "temp_store=MEMORY",
            ):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` in one read transaction on the calling thread."""
        with self.reader.connect() as connection:
            return query(connection)

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        """Run `change` in one write transaction on the calling thread; commits, or rolls back and raises."""
        with (self._syncing_writer if power_safe else self.writer).begin() as connection:
            return change(connection)

    async def read_async(self, query: Callable[[Connection], T]) -> T:
        """`read` on a worker thread."""
        return await asyncio.to_thread(self.read, query)

    def close(self) -> None:
        self.reader.dispose()
        self.writer.dispose()
        self._syncing_writer.dispose()
