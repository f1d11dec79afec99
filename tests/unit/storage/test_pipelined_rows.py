"""Rows on PostgreSQL: a group is committed in one round trip, and a connection that broke meanwhile is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError
from things import ROW, ids, things

from skyrl.storage.db import row_statements
from skyrl.storage.db.database import TAKE_WRITE_LOCK, Database
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_POSTGRES

pytestmark = ON_POSTGRES


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    database = Database(empty_url)
    database.write(lambda c: things.create(c))
    yield database
    database.close()


@pytest.fixture
async def writer(database: Database) -> AsyncIterator[GroupCommitWriter]:
    writer = GroupCommitWriter(database)
    await writer.execute(ROW, {"id": 1, "name": "x"})
    yield writer
    await writer.close()


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_group_of_rows_is_one_round_trip(database: Database, tmp_path: Path, ordered: bool) -> None:
    writer = GroupCommitWriter(database, ordered=ordered)
    await writer.execute(ROW, {"id": 1, "name": "x"})
    trace = tmp_path / "trace"
    with trace.open("w") as file:
        writer._thread_rows._driver.pgconn.trace(file.fileno())
        added = await asyncio.gather(*(writer.execute(ROW, {"id": n, "name": "x"}) for n in (2, 3, 4)))
        writer._thread_rows._driver.pgconn.untrace()
    await writer.close()
    assert all(added)
    assert ids(database) == [1, 2, 3, 4]
    messages = trace.read_text()
    assert messages.count("ReadyForQuery") == 1, "after each round trip PostgreSQL says that it is ready"
    assert (TAKE_WRITE_LOCK in messages) == ordered


async def test_a_repeated_row_logs_nothing(writer: GroupCommitWriter, caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends a sample again is no trouble, and psycopg's warning names the host, the user and the
    database. Whether the error comes before the end of the pipeline depends on the time."""
    for begin in range(1_000, 11_000, 1_000):
        rows = ({"id": number, "name": "x"} for number in (1, *range(begin, begin + 500)))
        repeated, *added = await asyncio.gather(*(writer.execute(ROW, row) for row in rows), return_exceptions=True)
        assert isinstance(repeated, IntegrityError)
        assert all(added)
    assert not caplog.messages


async def test_a_broken_connection_fails_one_group_and_is_replaced(
    database: Database, writer: GroupCommitWriter
) -> None:
    _break_connection(database, writer)
    with pytest.raises(OperationalError):
        await writer.execute(ROW, {"id": 2, "name": "x"})
    assert await writer.execute(ROW, {"id": 3, "name": "x"})
    assert ids(database) == [1, 3]


async def test_a_connection_that_broke_while_it_rested_fails_nothing(
    database: Database, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_statements, "PING_AFTER_S", 0.0)
    _break_connection(database, writer)
    assert await writer.execute(ROW, {"id": 2, "name": "x"})
    assert ids(database) == [1, 2]


def _break_connection(database: Database, writer: GroupCommitWriter) -> None:
    process = writer._thread_rows._driver.info.backend_pid
    database.read(lambda c: c.exec_driver_sql(f"SELECT pg_terminate_backend({process}, 10000)").scalar_one())
