"""The group-commit writer: writes share commits, none is acknowledged before its commit, and a bad one fails alone."""

from __future__ import annotations

import asyncio
import threading

import pytest
from sqlalchemy import Connection, func, insert, select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from things import ROW, ids, things

from skyrl.storage.db import database as database_module
from skyrl.storage.db import writer as writer_module
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import is_transient
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

ADD = insert(things)


@pytest.fixture
def database(empty_url: str):
    database = Database(empty_url)
    database.write(lambda c: things.create(c))
    yield database
    database.close()


class HeldWriter:
    """Holds the writer's thread inside a transaction, so that later writes wait and form one group."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self.entered, self._release = threading.Event(), threading.Event()
        self.write = asyncio.ensure_future(writer.transact(self._hold))

    def _hold(self, _: Connection) -> str:
        self.entered.set()
        assert self._release.wait(60)
        return "held"

    async def wait_until_held(self) -> None:
        await asyncio.to_thread(self.entered.wait, 60)

    def release(self) -> None:
        self._release.set()


async def hold(writer: GroupCommitWriter) -> HeldWriter:
    held = HeldWriter(writer)
    await held.wait_until_held()
    return held


async def put_all(*coroutines: object) -> list[asyncio.Future[object]]:
    """Start the writes, and return once each is in the writer's queue."""
    started = [asyncio.ensure_future(write) for write in coroutines]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return started


async def test_a_group_has_at_most_max_batch_writes(
    database: Database, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_BATCH", 10)
    held = await hold(writer)
    writes = await put_all(*(writer.execute(ROW, {"id": i, "name": "x"}) for i in range(25)))
    held.release()
    await asyncio.gather(held.write, *writes)
    assert writer.commits == 1 + 3
    assert len(ids(database)) == 25


async def test_a_bad_write_fails_and_the_rest_of_its_group_is_committed(
    database: Database, writer: GroupCommitWriter
) -> None:
    def broken(connection: Connection) -> None:
        connection.execute(ADD, {"id": 99, "name": "rolled back"})
        raise ValueError("a bug")

    held = await hold(writer)
    writes = await put_all(
        writer.execute(ROW, {"id": 1, "name": "x"}),
        writer.execute(ROW, {"id": 1, "name": "again"}),
        writer.execute(ROW, {"id": 2, "name": None}),
        writer.execute(ROW, {"id": 3, "name": "half of a surrogate pair: \ud800"}),
        writer.execute(ROW, {"id": 4, "name": "x"}),
        writer.transact(broken),
        writer.transact(lambda c: c.execute(ADD, {"id": 5, "name": "x"}) and "value"),
    )
    held.release()
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    await held.write
    assert [outcome if outcome in (True, "value") else type(outcome) for outcome in outcomes] == [
        True,
        IntegrityError,
        IntegrityError,
        UnicodeEncodeError,
        True,
        ValueError,
        "value",
    ]
    database.write(lambda c: c.execute(ADD, {"id": 6, "name": "no transaction has kept the lock"}))
    assert ids(database) == [1, 4, 5, 6]


async def test_the_rows_of_a_group_share_a_commit_and_its_changes_another_in_their_order(
    database: Database, writer: GroupCommitWriter
) -> None:
    order: list[int] = []
    held = await hold(writer)
    writes = await put_all(
        writer.transact(lambda _: order.append(1)),
        *(writer.execute(ROW, {"id": i, "name": "x"}) for i in range(500)),
        writer.transact(lambda _: order.append(2)),
    )
    held.release()
    await asyncio.gather(held.write, *writes)
    assert ids(database) == list(range(500))
    assert order == [1, 2]
    assert writer.commits == 1 + 2


async def test_a_write_is_acknowledged_only_after_its_commit(database: Database, writer: GroupCommitWriter) -> None:
    ids_at_acknowledgement: list[int] = []
    held = await hold(writer)
    (write,) = await put_all(writer.execute(ROW, {"id": 7, "name": "x"}))
    write.add_done_callback(lambda _: ids_at_acknowledgement.extend(ids(database)))
    assert ids(database) == []
    assert not write.done()
    held.release()
    assert await held.write == "held"
    await write
    await asyncio.sleep(0)
    assert ids_at_acknowledgement == [7], "at the acknowledgement another connection sees the row"


async def test_a_cancelled_caller_does_not_disturb_the_rest_of_its_group(
    database: Database, writer: GroupCommitWriter
) -> None:
    held = await hold(writer)
    cancelled, other = await put_all(
        writer.execute(ROW, {"id": 1, "name": "x"}), writer.execute(ROW, {"id": 2, "name": "x"})
    )
    cancelled.cancel()
    held.release()
    await asyncio.gather(held.write, other)
    assert ids(database) == [1, 2]


async def test_a_lock_timeout_fails_all_rows_at_once_and_none_later(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 50)
    database = Database(empty_url)
    database.write(lambda c: things.create(c))
    writer = GroupCommitWriter(database)
    other = Database(database.url)
    with other.writer.begin():
        writes = await put_all(*(writer.execute(ROW, {"id": i, "name": "x"}) for i in range(200)))
        started = asyncio.get_running_loop().time()
        errors = await asyncio.gather(*writes, return_exceptions=True)
        waited = asyncio.get_running_loop().time() - started
    assert all(isinstance(error, OperationalError) for error in errors)
    assert waited < 200 * 0.05 / 2, "the 200 rows wait for the lock together, not one after the other"
    await writer.execute(ROW, {"id": 1, "name": "x"})
    await writer.close()
    assert ids(database) == [1]
    database.close()
    other.close()


async def test_without_a_free_thread_writes_fail_for_now_and_later_ones_are_committed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = GroupCommitWriter(database)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoConnectionFree, match="can't start new thread") as failed:
            await writer.transact(lambda c: c.execute(ADD, {"id": 1, "name": "a"}).rowcount)
        assert is_transient(failed.value)
    await writer.transact(lambda c: c.execute(ADD, {"id": 2, "name": "b"}).rowcount)
    await writer.close()
    assert ids(database) == [2]


async def test_close_commits_the_waiting_writes_and_refuses_new_ones(database: Database) -> None:
    writer = GroupCommitWriter(database)
    held = await hold(writer)
    writes = await put_all(*(writer.execute(ROW, {"id": i, "name": "x"}) for i in range(50)))
    closing = asyncio.ensure_future(writer.close())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(writer.execute(ROW, {"id": 100, "name": "late"}), 60)
    held.release()
    await asyncio.gather(held.write, closing, *writes)
    assert database.read(lambda c: c.execute(select(func.count()).select_from(things)).scalar()) == 50
