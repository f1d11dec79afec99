"""On SQLite the event loop commits rows itself, and the thread takes what the event loop cannot commit at once."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, OperationalError
from things import ROW, ids, things

from skyrl.storage.db import writer as writer_module
from skyrl.storage.db.database import Database
from skyrl.storage.db.row_statements import RowConnection, Write
from skyrl.storage.db.writer import LOOP_BYTES, LOOP_ROWS, GroupCommitWriter


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'w.db'}")
    database.write(lambda c: things.create(c))
    yield database
    database.close()


@pytest.fixture
async def writer(database: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GroupCommitWriter]:
    """A writer whose event loop may commit: the thread has committed the first row, and opened the connections. No
    commit counts as slow."""
    monkeypatch.setattr(writer_module, "SLOW_S", 60.0)
    writer = GroupCommitWriter(database)
    await add(writer, 0)
    yield writer
    await writer.close()


@pytest.fixture
def committed(writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The thread and the number of rows of each try to commit rows from now on."""
    found: list[tuple[str, int]] = []
    commit = RowConnection.commit

    def noted(self: RowConnection, writes: Sequence[Write]) -> None:
        on_loop = threading.current_thread() is threading.main_thread()
        found.append(("loop" if on_loop else "thread", len(writes)))
        commit(self, writes)

    monkeypatch.setattr(RowConnection, "commit", noted)
    return found


def add(writer: GroupCommitWriter, number: int, name: str | None = "x") -> asyncio.Future[bool]:
    return writer.execute(ROW, {"id": number, "name": name})


async def test_rows_are_committed_by_the_event_loop_when_they_are_acknowledged(
    database: Database, writer: GroupCommitWriter, committed: list[tuple[str, int]]
) -> None:
    assert await add(writer, 1)
    assert ids(database) == [0, 1]
    assert committed == [("loop", 1)]


async def test_rows_of_several_turns_share_a_commit(
    writer: GroupCommitWriter, committed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "GATHER_S", 60.0)
    writes: list[asyncio.Future[bool]] = []
    for number in range(1, 11):
        writes.append(add(writer, number))
        await asyncio.sleep(0)
    await asyncio.gather(*writes)
    assert committed == [("loop", 10)]


async def test_rows_do_not_wait_for_others_for_ever(
    writer: GroupCommitWriter, committed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "GATHER_S", 0.0)
    first = add(writer, 1)
    for number in range(2, 100):
        await asyncio.sleep(0)
        if first.done():
            break
        add(writer, number)
    assert first.done()
    assert committed[0][1] <= 3


async def test_many_rows_are_committed_in_parts(
    database: Database, writer: GroupCommitWriter, committed: list[tuple[str, int]]
) -> None:
    await asyncio.gather(*(add(writer, number) for number in range(1, 2 * LOOP_ROWS + 11)))
    assert committed[0] == ("loop", LOOP_ROWS)
    assert [size for _, size in committed] == [LOOP_ROWS, LOOP_ROWS, 10], (
        "after a slow commit the thread takes the rest"
    )
    assert ids(database) == list(range(2 * LOOP_ROWS + 11))


async def test_the_thread_finds_the_bad_row_of_a_group(
    writer: GroupCommitWriter, committed: list[tuple[str, int]]
) -> None:
    good, again = await asyncio.gather(add(writer, 1), add(writer, 1), return_exceptions=True)
    assert good is True
    assert isinstance(again, IntegrityError)
    await add(writer, 4)
    assert committed == [("loop", 2), ("thread", 2), ("thread", 1), ("thread", 1), ("loop", 1)]


async def test_the_event_loop_goes_on_while_another_process_has_the_write_lock(
    database: Database, writer: GroupCommitWriter, committed: list[tuple[str, int]]
) -> None:
    other = Database(database.url)
    with other.writer.begin():
        writes = [add(writer, 1), add(writer, 2)]
        await asyncio.sleep(0.1)
        assert writer._on_thread == 2
        writes.append(add(writer, 3))
        assert not any(write.done() for write in writes)
    await asyncio.gather(*writes)
    other.close()
    assert ids(database) == [0, 1, 2, 3]
    assert committed == [("loop", 2), ("thread", 2), ("loop", 1)]


async def test_rows_wait_for_the_group_of_the_thread(
    database: Database, writer: GroupCommitWriter, committed: list[tuple[str, int]]
) -> None:
    entered, release = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        entered.set()
        assert release.wait(60)

    held = writer.transact(hold)
    await asyncio.to_thread(entered.wait, 60)
    row = add(writer, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not row.done()
    release.set()
    await asyncio.gather(held, row)
    assert committed == [("loop", 1)]


async def test_after_a_slow_commit_the_thread_commits(
    writer: GroupCommitWriter, committed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SLOW_S", 0.0)
    monkeypatch.setattr(writer_module, "SLOW_SHARE", 10**9)
    await add(writer, 1)
    await add(writer, 2)
    await add(writer, 3)
    assert committed == [("loop", 1), ("thread", 1), ("thread", 1)]
    writer._loop_rests_until = 0.0
    await add(writer, 4)
    assert committed[-1] == ("loop", 1)


async def test_the_thread_commits_large_rows(writer: GroupCommitWriter, committed: list[tuple[str, int]]) -> None:
    await asyncio.gather(*(add(writer, number, "x" * (LOOP_BYTES // 4)) for number in range(1, 5)))
    await asyncio.gather(*(add(writer, number, "x" * (LOOP_BYTES // 4)) for number in range(5, 10)))
    assert committed == [("loop", 4), ("thread", 5)]


class BrokenDriver:
    """A connection that neither runs statements nor rolls back."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self.close = real.close

    def execute(self, *_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def rollback(self) -> None:
        raise sqlite3.OperationalError("disk I/O error")


async def test_the_event_loop_and_the_thread_get_a_new_connection_after_a_rollback_fails(
    database: Database, writer: GroupCommitWriter, committed: list[tuple[str, int]]
) -> None:
    writer._loop_rows._driver = BrokenDriver(writer._loop_rows._driver)
    assert await add(writer, 1)
    assert await add(writer, 2)
    for rows in (writer._loop_rows, writer._thread_rows):
        rows._driver = BrokenDriver(rows._driver)
    with pytest.raises(OperationalError, match="disk I/O error"):
        await add(writer, 3)
    assert await add(writer, 4)
    assert committed == [("loop", 1), ("thread", 1), ("loop", 1), ("loop", 1), ("thread", 1), ("loop", 1)]
    assert ids(database) == [0, 1, 2, 4]


async def test_a_full_disk_fails_the_group_and_nothing_of_it_is_stored(
    database: Database, writer: GroupCommitWriter
) -> None:
    drivers = [writer._loop_rows._driver, writer._thread_rows._driver]
    (pages,) = drivers[0].execute("PRAGMA page_count").fetchone()
    for driver in drivers:
        driver.execute(f"PRAGMA max_page_count={pages}")
    errors = await asyncio.gather(*(add(writer, number, "x" * 4_000) for number in range(1, 9)), return_exceptions=True)
    assert all(isinstance(error, OperationalError) for error in errors), errors
    assert ids(database) == [0]
    for driver in drivers:
        driver.execute("PRAGMA max_page_count=1000000")
    await asyncio.gather(*(add(writer, number, "x" * 4_000) for number in range(1, 9)))
    assert ids(database) == list(range(9))


async def test_the_event_loop_never_copies_the_log_and_never_waits_for_the_lock(writer: GroupCommitWriter) -> None:
    driver = writer._loop_rows._driver
    settings = {name: driver.execute(f"PRAGMA {name}").fetchone()[0] for name in ("wal_autocheckpoint", "busy_timeout")}
    assert settings == {"wal_autocheckpoint": 0, "busy_timeout": 0}
    assert driver.execute("PRAGMA synchronous").fetchone()[0] == 1


async def test_close_commits_the_rows_that_wait(database: Database) -> None:
    writer = GroupCommitWriter(database)
    await add(writer, 1)
    writes = [add(writer, number) for number in range(2, 600)]
    await writer.close()
    await asyncio.gather(*writes)
    assert ids(database) == list(range(1, 600))
    assert not writer._loop_rows.is_open
