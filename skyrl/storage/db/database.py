"""Connections to the database: one engine for reads and one for writes; and what its URL says.

SQLite and PostgreSQL are set up so that several processes can use the same database. The engine's database waits while
it is away, and refuses writes once another server has the claim to train on it (`FencedDatabase`). Other packages take
`Connection` and `Change` from here, and import no SQLAlchemy. The configuration checks a URL first (`readable_url`),
without SQLAlchemy, so that it loads quickly.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from skyrl.base.config.keys import readable_url
from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.backoff import Backoff
from skyrl.storage.checkpoint_store.directories import sync
from skyrl.storage.db.faults import is_transient, reason

if TYPE_CHECKING:
    import psycopg

logger = logging.getLogger(__name__)
T = TypeVar("T")

Change = Callable[[Connection], object]
"""Work for a write transaction: statements on the transaction's connection."""


def together(*changes: Change | None) -> Change:
    """These changes in this order, in one transaction."""

    def change(connection: Connection) -> None:
        for each in changes:
            if each is not None:
                each(connection)

    return change


BUSY_TIMEOUT_MS = 30_000
"""How long a transaction waits for a lock."""

IDLE_WRITER_MS = 20_000
IDLE_READER_MS = 120_000
"""PostgreSQL: how long a transaction may be without a statement. Then PostgreSQL ends its connection. A writer that
hangs, on any machine, must not hold the write lock for ever; others wait for it longer (BUSY_TIMEOUT_MS). A reader that
hangs keeps deleted rows on the disk."""

SERVER_LINK = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 2}
"""The same of PostgreSQL's side, as LINK: it ends the transaction of a host that is gone amid a statement."""

CONNECT_TIMEOUT_S = 10
"""PostgreSQL: how long a new connection may take, and how long sent bytes may stay without an acknowledgement."""

LINK = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "tcp_user_timeout": 1000 * CONNECT_TIMEOUT_S,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
"""libpq's parameters of a connection, unless the URL has its own: a host or a network link that is gone without a word
is noticed within 20 s, also while an answer is awaited. Linux alone would take two hours."""

WRITE_LOCK = 0x736B79726C
"""PostgreSQL: the number of the advisory lock that every write transaction holds. The bytes spell `skyrl`."""

TAKE_WRITE_LOCK = f"SELECT pg_advisory_xact_lock({WRITE_LOCK})"

UNORDERED = "skyrl_unordered"
"""The execution option of connections whose transactions do not take the write lock."""

MAX_NAMED = 500
"""The most ids in one query."""

EMPTY_LOG_WAIT_S = 0.25
"""How long `empty_log` waits for readers. Writers wait for it meanwhile."""

QUICK_COPY_S = 0.05
COPY_ROUNDS = 5
"""`empty_log` copies the log without a lock until one round takes less than QUICK_COPY_S, in at most COPY_ROUNDS
rounds. Then it copies the rest with the write lock held."""

LOG_PAGES = 2**15
"""When SQLite's log is this long (128 MiB), a commit copies the log and waits for the disk. This should not happen,
because `Retention` empties the log much earlier."""


class Database:
    """The engines (in SQLAlchemy's sense) on one database.

    A write transaction takes the write lock at its BEGIN. So two processes that write at the same time wait for each
    other and do not fail, and nothing changes between a read and a write of one transaction. A read transaction sees
    the database as it was at one moment. On PostgreSQL transactions of `unordered_writer` take no lock: they are for
    rows that nobody reads in the order of their commits.

    On SQLite a commit survives the death of any process. A `power_safe` commit also syncs the log to disk (about 5 ms):
    then this commit and all earlier ones, of every process, survive a loss of power.

    Raises ConfigError for a URL that cannot be read, and for one whose driver is not installed. The message does not
    repeat the URL.
    """

    def __init__(self, url: str) -> None:
        self._closed = False
        try:
            self.url = readable_url(url)
            parsed = _supported(make_url(self.url))
            self.is_sqlite = parsed.get_backend_name() == "sqlite"
            if self.is_sqlite:
                self.reader = self._sqlite("BEGIN")
                self.writer = self._sqlite("BEGIN IMMEDIATE")
                self._syncing_writer = self._sqlite("BEGIN IMMEDIATE", "FULL")
                self.unordered_writer = self.writer
            else:
                self.reader = _server(parsed, "REPEATABLE READ", IDLE_READER_MS)
                self.writer = self._syncing_writer = _server(parsed, "READ COMMITTED", IDLE_WRITER_MS)
                event.listen(self.writer, "begin", _lock_writes)
                self.unordered_writer = self.writer.execution_options(**{UNORDERED: True})
                for engine in (self.reader, self.writer):
                    event.listen(engine, "checkin", self._returned)
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
            raise ConfigError(f"database_url: {error}") from error
        self.file: Path | None = None
        if self.is_sqlite and parsed.database and parsed.database != ":memory:":
            self.file = Path(parsed.database)

    def _sqlite(self, begin: str, synchronous: str = "NORMAL") -> Engine:
        engine = create_engine(self.url, hide_parameters=True, connect_args={"check_same_thread": False})

        @event.listens_for(engine, "do_connect")
        def _make_directory(*_: object) -> None:
            if self.file is not None:
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

        @event.listens_for(engine, "connect")
        def _connect(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # the driver's own BEGIN would come too late; `_begin` sends it below
            if connection.execute("PRAGMA page_count").fetchone() == (0,):
                # Only for a new file: in a file with tables this would take a lock.
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            for pragma in (
                f"busy_timeout={BUSY_TIMEOUT_MS}",
                "journal_mode=WAL",
                f"wal_autocheckpoint={LOG_PAGES}",
                f"synchronous={synchronous}",
                "secure_delete=FAST",  # ON would overwrite each free page on the disk
                "foreign_keys=ON",
                "temp_store=MEMORY",
            ):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine

    def connect_driver(self) -> sqlite3.Connection | psycopg.Connection:
        """A connection of the database's own driver (sqlite3 or psycopg) with the same settings. The caller begins,
        commits and closes. Raises SQLAlchemy's or the driver's errors."""
        pooled = self.writer.raw_connection()
        driver = pooled.driver_connection
        pooled.detach()
        return cast("sqlite3.Connection | psycopg.Connection", driver)

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` in one read transaction, on the calling thread."""
        with self.reader.connect() as connection:
            return query(connection)

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        """Run `change` in one write transaction, on the calling thread. Commits, or rolls back and raises."""
        with (self._syncing_writer if power_safe else self.writer).begin() as connection:
            return change(connection)

    async def read_async(self, query: Callable[[Connection], T]) -> T:
        """`read` on a worker thread."""
        return await asyncio.to_thread(self.read, query)

    def sync(self) -> None:
        """After this call all commits so far, of every process, survive a loss of power. Raises OSError."""
        log = None if self.file is None else self.file.with_name(f"{self.file.name}-wal")
        if log is not None and log.exists():
            sync(log)

    def log_bytes(self) -> int:
        """Size of SQLite's write-ahead log; 0 without one."""
        log = None if self.file is None else self.file.with_name(f"{self.file.name}-wal")
        return log.stat().st_size if log is not None and log.exists() else 0

    def size(self) -> int:
        """Bytes of the database on its disk, with SQLite's log."""
        if self.file is not None:
            return self.file.stat().st_size + self.log_bytes()
        return self.read(lambda c: c.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())

    def empty_log(self) -> bool:
        """Copy SQLite's log into the database file, and shorten both. False when a reader prevented it."""
        if self.file is None:
            return True
        with closing(sqlite3.connect(self.file, timeout=EMPTY_LOG_WAIT_S, isolation_level=None)) as connection:
            try:
                for _ in range(COPY_ROUNDS):  # copies most of the log without a lock
                    started_at = time.monotonic()
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    if time.monotonic() - started_at < QUICK_COPY_S:
                        break
                busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError:  # another connection is doing the same
                return False
        return not busy

    def _returned(self, _: object, connection: ConnectionPoolEntry) -> None:
        """Close a connection that is returned to its pool after `close`: a thread may still have used it."""
        if self._closed:
            connection.invalidate()

    def close(self) -> None:
        self._closed = True
        self.reader.dispose()
        self.writer.dispose()
        self._syncing_writer.dispose()


def in_groups(ids: Iterable[str], most: int = MAX_NAMED) -> list[list[str]]:
    """The ids in groups of at most `most`, in their order."""
    named = list(ids)
    return [named[start : start + most] for start in range(0, len(named), most)]


def _supported(url: URL) -> URL:
    """The URL with its driver. Raises ArgumentError for a kind of database that skyrl does not know."""
    kind = url.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise ArgumentError(f"must begin with sqlite:/// or postgresql://, got {kind!r}")
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _server(url: URL, isolation_level: Any, idle_ms: int) -> Engine:
    """An engine on PostgreSQL. It tests a connection before each use, and replaces a broken one."""
    settings = {"lock_timeout": BUSY_TIMEOUT_MS, "idle_in_transaction_session_timeout": idle_ms, **SERVER_LINK}
    given = " ".join(f"-c {name}={value}" for name, value in settings.items())
    arguments = {"options": f"{url.query.get('options', '')} {given}".strip(), **_link(url)}
    return create_engine(
        url, isolation_level=isolation_level, pool_pre_ping=True, hide_parameters=True, connect_args=arguments
    )


def _link(url: URL) -> dict[str, str]:
    """The parameters of LINK that the URL does not have."""
    return {name: str(value) for name, value in LINK.items() if name not in url.query}


def _lock_writes(connection: Connection) -> None:
    if UNORDERED in connection.get_execution_options():
        return
    connection.exec_driver_sql(TAKE_WRITE_LOCK)


_SECRETS = ("password", "sslpassword")
"""Parameters after the `?` that are secrets of PostgreSQL's driver."""


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database. None for another database, and for one in memory."""
    name = make_url(url).database if url.startswith("sqlite:") else None
    return Path(name) if name and name != ":memory:" else None


def shown_url(url: str) -> str:
    """A URL from `readable_url` without its passwords, for messages and logs."""
    parsed = make_url(url)
    query = {name: "hidden" if name in _SECRETS else value for name, value in parsed.query.items()}
    return parsed.set(query=query).render_as_string(hide_password=True)


def postgres_conninfo(url: str) -> str:
    """A PostgreSQL URL as libpq reads it, with its password and LINK: for connections that do not go through
    SQLAlchemy."""
    parsed = make_url(url).set(drivername="postgresql")
    return parsed.update_query_dict(_link(parsed)).render_as_string(hide_password=False)


FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0


class RetryingDatabase(Database):
    """The engine waits for its database, because an engine that ends must recover all its models.

    A write is also repeated when the connection broke during its commit, so it may be applied twice. Therefore every
    write must have the same effect when it is applied twice, or must check first whether it was applied.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._stopped_retrying = threading.Event()

    def stop_retrying(self) -> None:
        """Raise errors at once from now on, also in calls that wait now: the process is about to end."""
        self._stopped_retrying.set()

    def read(self, query: Callable[[Connection], T]) -> T:
        return self._retrying(lambda: super(RetryingDatabase, self).read(query))

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        return self._retrying(lambda: super(RetryingDatabase, self).write(change, power_safe=power_safe))

    def _retrying(self, work: Callable[[], T]) -> T:
        backoff: Backoff | None = None
        while True:
            try:
                return work()
            except SQLAlchemyError as error:
                if not is_transient(error) or self._stopped_retrying.is_set():
                    raise
                backoff = backoff or Backoff(FIRST_RETRY_S, MAX_RETRY_S)
                retry_s = backoff.pause()
                logger.error("the database cannot be used, tried again in %g s: %s", retry_s, reason(error))
            self._stopped_retrying.wait(retry_s)


def claim_owner(connection: Connection) -> str | None:
    """The server that has the claim to train on this database (`claims`); None when no server has it."""
    return connection.exec_driver_sql("SELECT owner FROM training_claim WHERE id = 1").scalar()


class Displaced(RuntimeError):
    """Another server has the claim to the database now, or this server has given it up."""


class Fence:
    """Checks whether `server` has the claim. Safe for threads.

    `on_loss` is called on the checking thread each time the claim is found lost.
    """

    def __init__(self, server: str, on_loss: Callable[[], object] = lambda: None) -> None:
        self._server = server
        self._on_loss = on_loss
        self.lost = False
        """Whether the claim was found lost. The same process never takes it again."""

    def holds(self, connection: Connection) -> bool:
        """Whether this server has the claim. Always False after the claim was lost once."""
        if not self.lost and claim_owner(connection) == self._server:
            return True
        self.lost = True
        self._on_loss()
        return False

    def check(self, connection: Connection) -> None:
        """Raises Displaced unless this server has the claim."""
        if not self.holds(connection):
            raise Displaced(
                f"server {self._server} does not train on this database any more: another server has taken over since"
            )


class FencedDatabase(RetryingDatabase):
    """The engine's database. Once the claim is lost, a write raises Displaced and changes nothing."""

    def __init__(self, url: str, fence: Fence) -> None:
        super().__init__(url)
        self._fence = fence

    def write(self, change: Callable[[Connection], T], *, power_safe: bool = False) -> T:
        def fenced(connection: Connection) -> T:
            self._fence.check(connection)
            return change(connection)

        return super().write(fenced, power_safe=power_safe)

    def confirm_claim(self) -> None:
        """Check the claim before a change outside the database, such as the deletion of a file. Raises Displaced."""
        self.read(self._fence.check)
