"""Connections: one engine for reads, one for writes, with SQLite set up for several processes on one file."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from skyrl.config import ConfigError

T = TypeVar("T")

BUSY_TIMEOUT_MS = 30_000

EMPTY_LOG_WAIT_S = 0.25
"""How long emptying the log may wait for readers, and writers for it."""

QUICK_COPY_S = 0.05
COPY_ROUNDS = 5
"""Copying the log is repeated, so often at most, until it takes no longer than this: what is left is copied with the
write lock held."""

LOG_PAGES = 2**15
"""At 128 MiB of log a commit copies it itself. It should not come to that: who commits would wait for the disk."""


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
        self._file: Path | None = None
        if self.is_sqlite and parsed.database and parsed.database != ":memory:":
            self._file = Path(parsed.database)
            self._file.parent.mkdir(parents=True, exist_ok=True)

    def _engine(self, begin: str, synchronous: str = "NORMAL") -> Engine:
        if not self.is_sqlite:
            return create_engine(self.url, pool_pre_ping=True)
        engine = create_engine(self.url, connect_args={"check_same_thread": False})

        @event.listens_for(engine, "connect")
        def _connect(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # BEGIN is ours, below; the driver's own comes too late
            if connection.execute("PRAGMA page_count").fetchone() == (0,):
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # a file that has tables would be locked for it
            for pragma in (
                f"busy_timeout={BUSY_TIMEOUT_MS}",
                "journal_mode=WAL",
                f"wal_autocheckpoint={LOG_PAGES}",
                f"synchronous={synchronous}",
                "secure_delete=FAST",  # free pages need not be overwritten: that would write each of them once more
                "foreign_keys=ON",
                "temp_store=MEMORY",
            ):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine

    def connect_driver(self) -> sqlite3.Connection:
        """A connection of SQLite's driver itself, set up as the others are; the caller begins, commits and closes."""
        pooled = self.writer.raw_connection()
        driver = cast(sqlite3.Connection, pooled.driver_connection)
        pooled.detach()
        return driver

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

    def log_bytes(self) -> int:
        """Size of SQLite's write-ahead log; 0 without one."""
        log = None if self._file is None else self._file.with_name(f"{self._file.name}-wal")
        return log.stat().st_size if log is not None and log.exists() else 0

    def empty_log(self) -> bool:
        """Copy SQLite's log into the file and cut both to what they hold. False if a reader is in the way for long."""
        if self._file is None:
            return True
        with closing(sqlite3.connect(self._file, EMPTY_LOG_WAIT_S, isolation_level=None)) as connection:
            try:
                for _ in range(COPY_ROUNDS):  # nearly all of it, while nobody waits
                    began = time.monotonic()
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    if time.monotonic() - began < QUICK_COPY_S:
                        break
                busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError:  # another one is at it
                return False
        return not busy

    def make_reclaimable(self) -> None:
        """Rewrite a SQLite file that cannot give free pages back, once; needs twice its size meanwhile.

        Raises sqlite3.Error when that fails, and leaves it as it was.
        """
        if self._file is None:
            return
        with closing(sqlite3.connect(self._file, BUSY_TIMEOUT_MS / 1000, isolation_level=None)) as connection:
            if connection.execute("PRAGMA auto_vacuum").fetchone() == (0,):
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        self.reader.dispose()
        self.writer.dispose()
        self._syncing_writer.dispose()
