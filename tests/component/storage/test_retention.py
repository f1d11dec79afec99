"""The size of the database: ended requests are deleted after their time, in small steps, and their space is
returned."""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects import postgresql

from skyrl.storage.db import futures as rows
from skyrl.storage.db import retention
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.migrate import migrate
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.sessions import Continuity
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_SQLITE

pytestmark = ON_SQLITE

RETENTION_S = 100.0
LONG_AGO, JUST_NOW = 1_000.0, 0.0
"""Seconds since the end of a sample: beyond its retention, or within it."""
ROUND = 1_000
PAGE = 4096
BODY, RESULT = b"b" * 2900, Outcome(b"r" * 600, "protobuf")
"""Sizes as for a prompt of 512 tokens and 64 sampled tokens."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "skyrl.db"


@pytest.fixture
def database(file: Path):
    database = Database(f"sqlite:///{file}")
    migrate(database)
    database.empty_log()
    yield database
    database.close()


def record(database: Database, count: int, ended_s_ago: float | None) -> None:
    """Record `count` forwarded samples; with `ended_s_ago` None they are pending."""
    now = time.time()
    ids = [str(uuid.uuid4()) for _ in range(count)]
    new = dict.fromkeys(rows.RECORD.parameters) | {
        "kind": "EXTERNAL",
        "tenant": "t" * 32,
        "session_id": "s" * 36,
        "digest": b"d" * 16,
        "body": BODY,
        "body_format": "json",
        "status": "pending",
        "created_at": now,
    }

    def change(connection: Connection) -> None:
        rows.RECORD.execute(connection, [new | {"id": request_id} for request_id in ids])
        if ended_s_ago is not None:
            ended = [rows.settlement(request_id, RESULT, now - ended_s_ago) for request_id in ids]
            rows.SETTLE_SAMPLE.execute(connection, ended)

    database.write(change)


def count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(rows.futures)).scalar_one()


def size(database: Database, file: Path) -> int:
    """Bytes on disk after a checkpoint, when all commits are in the file."""
    assert database.empty_log()
    return file.stat().st_size


def file_bytes(file: Path) -> int:
    """Bytes of the database file without the log."""
    return file.stat().st_size


def size_after_sweep(database: Database, file: Path) -> int:
    """Bytes on disk after a sweep that has emptied the log."""
    assert database.log_bytes() == 0
    return file.stat().st_size


async def test_the_file_is_as_small_after_a_round_of_samples_as_before(
    database: Database, writer: GroupCommitWriter, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SPARE_PAGES", 16)
    sweeper = Retention(database, writer, RETENTION_S)
    start = size(database, file)
    peaks = []
    for _ in range(4):
        record(database, ROUND, LONG_AGO)
        peaks.append(size(database, file))
        await sweeper.sweep()
        assert database.read(count) == 0
        assert size_after_sweep(database, file) <= start * 2 + 16 * PAGE
    assert peaks[0] > start + ROUND * len(RESULT.result)
    assert max(peaks) <= peaks[0] + 32 * PAGE


async def test_the_space_of_deleted_rows_is_used_again(
    database: Database, writer: GroupCommitWriter, file: Path
) -> None:
    sweeper = Retention(database, writer, RETENTION_S)
    sizes = []
    for _ in range(6):
        record(database, ROUND // 4, LONG_AGO)
        sizes.append(size(database, file))
        await sweeper.sweep()
    assert max(sizes) <= sizes[0] + 32 * PAGE


async def test_the_growth_of_the_file_per_sample_is_bounded(database: Database, file: Path) -> None:
    start = size(database, file)
    record(database, ROUND, JUST_NOW)
    assert (size(database, file) - start) / ROUND <= 6_000


async def test_results_stay_for_a_while_after_a_gap(
    database: Database, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients fetch now what ended before it."""
    record(database, 3, LONG_AGO)
    continuity = Continuity()
    sweeper = Retention(database, writer, RETENTION_S, continuity=continuity)
    await sweeper.sweep()
    assert database.read(count) == 3
    monkeypatch.setattr(Continuity, "seconds", retention.AFTER_GAP_S)
    await sweeper.sweep()
    assert database.read(count) == 0


async def test_young_and_pending_requests_are_kept(database: Database, writer: GroupCommitWriter) -> None:
    record(database, 3, LONG_AGO)
    record(database, 5, JUST_NOW)
    record(database, 7, None)
    await Retention(database, writer, RETENTION_S).sweep()
    assert database.read(count) == 5 + 7


async def test_free_pages_are_kept_for_the_next_requests(
    database: Database, writer: GroupCommitWriter, file: Path
) -> None:
    """A sweep under load keeps the space that the next minute will need again."""
    record(database, 4 * ROUND, JUST_NOW)
    record(database, ROUND // 2, LONG_AGO)
    before = size(database, file)
    await Retention(database, writer, RETENTION_S).sweep()
    assert size(database, file) == before


async def test_other_writers_run_between_two_steps(
    database: Database, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FORGET_ROWS", 10)
    record(database, ROUND, LONG_AGO)
    sweep = asyncio.create_task(Retention(database, writer, RETENTION_S).sweep())
    seen = [ROUND]
    while seen[-1] == ROUND:
        seen.append(await writer.transact(count))
    assert 0 < seen[-1] <= ROUND - 10
    await sweep
    assert await writer.transact(count) == 0


def test_steps_get_smaller_as_long_as_they_take_long_and_larger_again() -> None:
    size, numbers = retention.StepSize(250), []
    for seconds in (retention.STEP_S, 2 * retention.STEP_S, 1.0, 0.0, 0.0, 0.0, 0.0):
        numbers.append(size.number)
        size.took(seconds)
    assert numbers == [50, 50, 25, 25, 50, 100, 200]
    assert size.number == 250
    assert retention.StepSize(10).number == 10


async def test_a_step_deletes_few_rows_if_they_are_large(database: Database, writer: GroupCommitWriter) -> None:
    """Training commands keep their bodies, and deleting a long body takes long."""
    commands, bytes_each = 10, retention.FORGET_BYTES // 4
    record(database, commands, None)
    ended = {"status": "done", "completed_at": time.time() - LONG_AGO, "body": b"b" * bytes_each}
    database.write(lambda c: c.execute(update(rows.futures).values(ended)))
    assert database.write(lambda c: retention.forget(c, time.time())) == 4
    await Retention(database, writer, RETENTION_S).sweep()
    assert database.read(count) == 0


async def test_a_long_log_is_emptied_once_no_reader_holds_it(
    database: Database, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LONG_LOG_BYTES", PAGE)
    keeper = Retention(database, writer, RETENTION_S)
    with database.reader.connect() as reader:
        count(reader)
        record(database, 100, JUST_NOW)
        grown = database.log_bytes()
        await keeper.shorten_log()
        assert database.log_bytes() >= grown > PAGE, "the reader still holds the log"
    await keeper.shorten_log()
    assert database.log_bytes() == grown, "the sweep does not retry at once, because writers wait meanwhile"
    while database.log_bytes() <= 2 * grown:
        record(database, 100, JUST_NOW)
    await keeper.shorten_log()
    assert database.log_bytes() == 0
    record(database, 100, JUST_NOW)
    await keeper.shorten_log()
    assert database.log_bytes() == 0, "the log is emptied after the reader has ended"


async def test_commits_do_not_copy_the_log(database: Database, writer: GroupCommitWriter, file: Path) -> None:
    """A commit that copies the log would wait for the disk."""
    copied = file_bytes(file)
    for _ in range(10):
        record(database, ROUND // 4, JUST_NOW)
        sample = dict.fromkeys(rows.RECORD.parameters) | {"tenant": "t", "session_id": "s", "digest": b""}
        sample |= {"created_at": 0.0, "kind": "EXTERNAL", "body_format": "json"}
        sample |= {"id": str(uuid.uuid4()), "body": BODY, "status": "pending"}
        await writer.execute(rows.RECORD, sample)
    assert database.log_bytes() > 4 * 2**20, "the log is larger than SQLite would allow by itself"
    assert file_bytes(file) == copied
    assert size(database, file) > copied


async def test_a_file_that_returns_no_space_is_swept(file: Path) -> None:
    """Such as one that an operator has made from a dump. A sweep that waited for its free pages to go would not end."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE kept (thing INTEGER)")
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    database = Database(f"sqlite:///{file}")
    migrate(database)
    writer = GroupCommitWriter(database)
    record(database, ROUND, LONG_AGO)
    async with asyncio.timeout(60):
        await Retention(database, writer, RETENTION_S).sweep()
    assert database.read(count) == 0
    await writer.close()
    database.close()


def test_postgresql_accepts_the_statements_of_retention() -> None:
    class RecordedStatements(list[str]):
        def execute(self, statement: Any) -> RecordedStatements:
            self.append(str(statement.compile(dialect=postgresql.dialect())))
            return self

        def all(self) -> list[tuple[int, int]]:
            return [(1, 2_900)]

    spoken = RecordedStatements()
    assert retention.forget(spoken, 0.0, 5) == 1  # type: ignore[arg-type]
    found, deleted = spoken
    assert "LIMIT" in found
    assert deleted.startswith("DELETE FROM futures WHERE futures.n IN")
