"""The FutureStore records a request once, lets polls wait for its outcome, and finds it again after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.wire.errors import RequestError
from skyrl.storage.db import futures as rows
from skyrl.storage.db import models, retention
from skyrl.storage.db.database import MAX_NAMED, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.futures import entries
from skyrl.storage.futures import store as futures_store
from skyrl.storage.futures.completion_feed import Target, clone_of
from skyrl.storage.futures.store import LARGE_BODY_BYTES, FutureStore
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

OK = Outcome(b'{"ok":1}')
COMMAND = NewRequest(Kind.OPTIM_STEP, "tenant", "s1", b"{}", model_id="m", seq_id=3)
SAMPLE = NewRequest(Kind.EXTERNAL, "tenant", "s1", b"{}", sampling_session_id="s1:sample:0", sample_seq_id=5)


@pytest.fixture
def store(database: Database, writer: GroupCommitWriter) -> FutureStore:
    return FutureStore(database, writer)


def settle_as_engine(database: Database, request_id: str, outcome: Outcome = OK) -> None:
    database.write(lambda c: rows.SETTLE.execute(c, [rows.settlement(request_id, outcome, time.time())]))


def count(database: Database) -> int:
    return database.read(lambda c: c.execute(select(func.count()).select_from(rows.futures)).scalar_one())


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let other tasks and threads run until the condition holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.001)


async def start_waiting(store: FutureStore, request_id: str) -> asyncio.Task[Outcome | None]:
    """A task that waits for the outcome, and has begun to wait."""
    task = asyncio.create_task(store.wait(request_id, "tenant", 30))
    await asyncio.sleep(0)
    return task


async def test_the_recorded_row_holds_the_bytes_of_the_body(database: Database, store: FutureStore) -> None:
    body = b'{"model_id": "m",  "odd":\xff}'
    request_id, new = await store.record(msgspec.structs.replace(COMMAND, body=body, body_format="proto"))
    assert new
    (row,) = database.read(lambda c: c.execute(select(rows.futures)).all())
    assert (row.id, row.body, row.body_format, row.model_id, row.seq_id) == (request_id, body, "proto", "m", 3)
    assert (row.tenant, row.session_id, row.status) == ("tenant", "s1", "pending")


@pytest.mark.parametrize("request_", [COMMAND, SAMPLE], ids=["command", "sample"])
async def test_a_repeated_request_gets_the_id_of_the_first(
    database: Database, store: FutureStore, request_: NewRequest
) -> None:
    first, _ = await store.record(request_)
    assert await store.record(request_) == (first, False)
    assert count(database) == 1


@pytest.mark.parametrize("request_", [COMMAND, SAMPLE], ids=["command", "sample"])
async def test_concurrent_repeats_are_recorded_once(
    database: Database, store: FutureStore, request_: NewRequest
) -> None:
    answers = await asyncio.gather(*(store.record(request_) for _ in range(20)))
    assert len({request_id for request_id, _ in answers}) == 1
    assert [new for _, new in answers].count(True) == 1
    assert count(database) == 1


@pytest.mark.parametrize("changed", [{"body": b"[]"}, {"kind": Kind.SAVE_WEIGHTS}], ids=["body", "kind"])
async def test_a_number_used_again_for_another_request_is_refused(
    database: Database, store: FutureStore, writer: GroupCommitWriter, changed: dict
) -> None:
    await store.record(COMMAND)
    for any_store in (store, FutureStore(database, writer)):
        with pytest.raises(RequestError, match="seq_id: 3 was used before for m") as raised:
            await any_store.record(msgspec.structs.replace(COMMAND, **changed))
        assert raised.value.status == 400
    assert count(database) == 1


async def test_a_large_body_is_recorded_once_although_it_is_repeated_meanwhile(
    database: Database, store: FutureStore
) -> None:
    large = msgspec.structs.replace(COMMAND, body=b"x" * (LARGE_BODY_BYTES + 1))
    repeats = [msgspec.structs.replace(large, id=f"r{number}") for number in range(3)]
    small = msgspec.structs.replace(COMMAND, id="small", seq_id=4)
    recorded = await asyncio.gather(*(store.record(request) for request in (*repeats, small)))
    ids = [request_id for request_id, _ in recorded]
    assert len(set(ids)) == 2
    assert [new for _, new in recorded].count(True) == 2
    assert database.read(lambda c: models.bodies(c, ids[:1])) == {ids[0]: large.body}
    with pytest.raises(RequestError, match="another body"):
        await store.record(msgspec.structs.replace(large, id="other", body=large.body + b"y"))
    assert count(database) == 2


def test_the_ended_requests_are_found_among_many(database: Database) -> None:
    ids = [f"r{number}" for number in range(MAX_NAMED + 10)]
    row = dict.fromkeys(rows.RECORD.parameters) | {"kind": "OPTIM_STEP", "tenant": "t", "session_id": "s"}
    row |= {"digest": b"", "body": b"{}", "body_format": "json", "status": "pending", "created_at": 0.0}
    added = [row | {"id": request_id} for request_id in ids]
    database.write(lambda c: rows.RECORD.execute(c, added))
    for request_id in (ids[0], ids[-1]):
        settle_as_engine(database, request_id)
    assert database.read(lambda c: rows.ended_among(c, [*ids, "unknown"])) == [ids[0], ids[-1]]


async def test_every_request_without_a_number_is_new(database: Database, store: FutureStore) -> None:
    request = msgspec.structs.replace(SAMPLE, sample_seq_id=None)
    answers = [await store.record(request) for _ in range(3)]
    assert len(set(answers)) == 3
    assert count(database) == 3


async def test_repeats_after_a_restart_find_the_stored_request(
    database: Database, writer: GroupCommitWriter, store: FutureStore
) -> None:
    """Of several concurrent repeats one tries to insert the row and finds the row of the earlier process. The others
    wait for it."""
    first, _ = await store.record(COMMAND)
    restarted = FutureStore(database, writer)
    assert await asyncio.gather(*(restarted.record(COMMAND) for _ in range(5))) == [(first, False)] * 5
    assert restarted.pending == 0, "a repeat leaves no entry in memory"


async def test_a_repeat_is_recorded_although_the_first_is_cancelled(database: Database, store: FutureStore) -> None:
    first = asyncio.create_task(store.record(COMMAND))
    await asyncio.sleep(0)
    repeat = asyncio.create_task(store.record(COMMAND))
    await asyncio.sleep(0)
    first.cancel()
    request_id, _ = await repeat
    (command,) = database.read(lambda c: models.pending(c, [Kind.OPTIM_STEP]))
    assert command.request_id == request_id
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_failed_write_raises_and_leaves_no_entry(database: Database, store: FutureStore) -> None:
    broken = msgspec.structs.replace(COMMAND, tenant=None)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"(?i)not.null"):
        await store.record(broken)
    assert store.pending == 0
    assert (await store.record(COMMAND))[1]


async def test_a_poll_gets_the_result_only_after_it_is_stored(
    database: Database, store: FutureStore, writer: GroupCommitWriter
) -> None:
    """If a poll got the result before, a crash could lead to another result."""
    request_id, _ = await store.record(SAMPLE)
    waiter = await start_waiting(store, request_id)
    other = Database(database.url)
    with other.writer.begin():  # no other connection can commit
        settling = asyncio.create_task(store.settle(request_id, OK))
        assert await store.wait(request_id, "tenant", 0.05) is None
        assert not store.is_pending(request_id), "the sample cannot be cancelled any more"
        assert not await store.end(request_id, Outcome(error="cancelled"))
        assert not waiter.done()
    other.close()
    assert await waiter == OK
    await settling
    stored = database.read(lambda c: rows.find(c, request_id))
    assert stored is not None
    assert stored.outcome == OK
    body = database.read(lambda c: models.bodies(c, [request_id]))[request_id]
    assert body is None, "the body of an ended sample is deleted"


async def test_a_result_is_stored_again_after_the_database_fails(
    store: FutureStore, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures_store, "FIRST_RETRY_S", 0.001)
    request_id, _ = await store.record(SAMPLE)
    failures = 3
    execute = writer.execute

    async def fail(statement: Any, values: dict[str, Any]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OperationalError(None, None, Exception("disk I/O error"))
        await execute(statement, values)

    monkeypatch.setattr(writer, "execute", fail)
    waiter = await start_waiting(store, request_id)
    await store.settle(request_id, OK)
    assert failures == 0
    assert await waiter == OK


async def test_a_result_leaves_memory_once_read_and_stays_readable(store: FutureStore) -> None:
    request_id, _ = await store.record(SAMPLE)
    await store.settle(request_id, OK)
    assert request_id in store._entries.by_id, "the first poll reads the result from memory"
    assert await store.wait(request_id, "tenant", 1) == OK
    assert not store._entries.by_id
    assert await store.wait(request_id, "tenant", 1) == OK


async def test_reading_outcomes_wakes_the_polls_of_engine_commands(database: Database, store: FutureStore) -> None:
    request_id, _ = await store.record(COMMAND)
    waiter = await start_waiting(store, request_id)
    await store.read_outcomes([request_id])
    assert not waiter.done(), "the engine has not settled the command yet"
    settle_as_engine(database, request_id)
    await store.read_outcomes(["unknown", request_id])
    assert await waiter == OK


async def test_polling_finds_outcomes_whose_ring_was_lost(database: Database, store: FutureStore) -> None:
    ids = [(await store.record(msgspec.structs.replace(COMMAND, seq_id=n)))[0] for n in range(3)]
    waiters = [await start_waiting(store, request_id) for request_id in ids]
    for request_id in ids[:2]:
        settle_as_engine(database, request_id)
    await store.poll_outcomes()
    assert [await waiter for waiter in waiters[:2]] == [OK, OK]
    assert not waiters[2].done()
    waiters[2].cancel()


async def test_a_failure_keeps_its_category_and_is_never_replaced(database: Database, store: FutureStore) -> None:
    failure = Outcome(error="no", error_category="user")
    request_id, _ = await store.record(COMMAND)
    settle_as_engine(database, request_id, failure)
    await store.read_outcomes([request_id])
    assert await store.wait(request_id, "tenant", 1) == failure
    settle_as_engine(database, request_id, OK)
    stored = database.read(lambda c: rows.find(c, request_id))
    assert stored is not None
    assert stored.outcome == failure, "the first outcome stays"


async def test_a_wait_ends_after_its_time_and_can_be_repeated(database: Database, store: FutureStore) -> None:
    request_id, _ = await store.record(COMMAND)
    assert await store.wait(request_id, "tenant", 0.01) is None
    settle_as_engine(database, request_id)
    await store.poll_outcomes()
    assert await store.wait(request_id, "tenant", 0) == OK


async def test_results_survive_a_restart(database: Database, writer: GroupCommitWriter, store: FutureStore) -> None:
    done, _ = await store.record(SAMPLE)
    await store.settle(done, OK)
    pending, _ = await store.record(COMMAND)
    restarted = FutureStore(database, writer)
    assert await restarted.wait(done, "tenant", 1) == OK
    waiter = asyncio.create_task(restarted.wait(pending, "tenant", 30))
    await wait_until(lambda: restarted.pending == 1)
    settle_as_engine(database, pending)
    await restarted.read_outcomes([pending])
    assert await waiter == OK


async def test_an_adopted_sample_is_settled_by_the_new_process(
    database: Database, writer: GroupCommitWriter, store: FutureStore
) -> None:
    request_id, _ = await store.record(SAMPLE)
    restarted = FutureStore(database, writer)
    restarted.adopt(request_id, "tenant", "s1", SAMPLE.digest(), ("s1:sample:0", 5))
    waiter = await start_waiting(restarted, request_id)
    assert await restarted.record(SAMPLE) == (request_id, False)
    await restarted.settle(request_id, OK)
    assert await waiter == OK


async def test_a_poll_hears_of_an_adopted_sample_without_a_number(
    database: Database, writer: GroupCommitWriter, store: FutureStore
) -> None:
    sample = msgspec.structs.replace(SAMPLE, sample_seq_id=None)
    request_id, _ = await store.record(sample)
    restarted = FutureStore(database, writer)
    target = Target("s1", "s1:sample:0", clone_of(None))
    assert await restarted.ends.poll(target, 0, 0) == (0, [])
    restarted.adopt(request_id, "tenant", "s1", sample.digest(), ("s1:sample:0", None))
    poll = asyncio.create_task(restarted.ends.poll(target, 0, 5))
    await asyncio.sleep(0)
    await restarted.settle(request_id, OK)
    _, ends = await poll
    assert [end.request_id for end in ends] == [request_id]


async def test_another_tenant_cannot_wait_for_a_request(
    database: Database, writer: GroupCommitWriter, store: FutureStore
) -> None:
    request_id, _ = await store.record(COMMAND)
    restarted = FutureStore(database, writer)
    for any_store in (store, restarted):
        with pytest.raises(KeyError):
            await any_store.wait(request_id, "other", 30)
    settle_as_engine(database, request_id)
    await store.read_outcomes([request_id])
    for any_store in (store, FutureStore(database, writer)):
        with pytest.raises(KeyError):
            await any_store.wait(request_id, "other", 30)
    with pytest.raises(KeyError):
        await store.wait("no such request", "tenant", 30)


@pytest.mark.parametrize("limit", ["KEPT_OUTCOMES", "KEPT_BYTES"])
async def test_old_outcomes_leave_memory_and_stay_readable(
    database: Database, store: FutureStore, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(entries, limit, {"KEPT_OUTCOMES": 3, "KEPT_BYTES": 3 * len(OK.result)}[limit])
    requests = [msgspec.structs.replace(SAMPLE, sample_seq_id=n) for n in range(10)]
    ids = [(await store.record(request))[0] for request in requests]
    for request_id in ids:
        await store.settle(request_id, OK)
    assert set(store._entries.by_id) == set(ids[-3:])
    assert len(store._entries.by_key) == 3
    assert [await store.wait(request_id, "tenant", 1) for request_id in ids] == [OK] * 10
    assert await store.record(requests[0]) == (ids[0], False)


async def test_a_request_that_ended_before_its_commit_failed_leaves_nothing_in_memory(
    store: FutureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may run a command whose commit the API process takes for lost."""
    monkeypatch.setattr(entries, "KEPT_OUTCOMES", 1)
    kept = store._entries
    lost = entries.Entry("lost", Kind.FORWARD, "tenant", "s1", b"", None, None)
    kept.add(lost, owned_elsewhere=True)
    kept.set_outcome(lost, OK)
    kept.drop(lost)
    for number in range(2):
        request_id, _ = await store.record(msgspec.structs.replace(SAMPLE, sample_seq_id=number))
        await store.settle(request_id, OK)
    assert (kept.pending, len(kept.by_id)) == (0, 1)


async def test_dropping_a_session_wakes_the_polls_of_its_samples(database: Database, store: FutureStore) -> None:
    dropped, _ = await store.record(SAMPLE)
    other, _ = await store.record(msgspec.structs.replace(COMMAND, session_id="s2", seq_id=9))
    done, _ = await store.record(COMMAND)
    settle_as_engine(database, done)
    await store.read_outcomes([done])
    waiter, other_waiter = await start_waiting(store, dropped), await start_waiting(store, other)
    assert store.drop_session("s1") == [dropped]
    with pytest.raises(KeyError):
        await waiter
    assert await store.wait(done, "tenant", 1) == OK, "stored results stay"
    await store.settle(dropped, OK)  # the forwarding task ends later, and its result is discarded
    assert not other_waiter.done()
    other_waiter.cancel()


async def test_a_poll_of_a_dropped_sample_gets_the_engines_failure(database: Database, store: FutureStore) -> None:
    """The client polls again before the engine has closed the session's requests."""
    request_id, _ = await store.record(SAMPLE)
    store.drop_session("s1")
    waiter = asyncio.create_task(store.wait(request_id, "tenant", 30))
    await wait_until(lambda: store.pending == 1)
    ended = Outcome(error="the session has ended", error_category="user")
    settle_as_engine(database, request_id, ended)
    await store.poll_outcomes()
    assert await asyncio.wait_for(waiter, 5) == ended


async def test_forget_deletes_only_old_outcomes(database: Database, store: FutureStore) -> None:
    ids = [(await store.record(msgspec.structs.replace(SAMPLE, sample_seq_id=n)))[0] for n in range(3)]
    await store.settle(ids[0], OK)
    middle = time.time()
    await store.settle(ids[1], OK)

    def forget(connection: Connection) -> int:
        return retention.forget(connection, middle)

    assert database.write(forget) == 1
    assert database.read(lambda c: rows.find(c, ids[0])) is None
    assert count(database) == 2


async def test_a_poll_gets_the_outcome_that_the_engine_stored_first(database: Database, store: FutureStore) -> None:
    """The engine has ended one of the requests, and this process does not know it yet."""
    ids = [(await store.record(msgspec.structs.replace(SAMPLE, sample_seq_id=n)))[0] for n in range(3)]
    settle_as_engine(database, ids[1], rows.SESSION_ENDED)
    await asyncio.gather(*(store.settle(request_id, OK) for request_id in ids))
    outcomes = [await store.wait(request_id, "tenant", 5) for request_id in ids]
    again = [await store.wait(request_id, "tenant", 5) for request_id in ids]
    assert outcomes == again == [OK, rows.SESSION_ENDED, OK]


async def test_a_result_that_the_database_refuses_becomes_a_failure(
    store: FutureStore, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, _ = await store.record(SAMPLE)
    execute = writer.execute

    async def refuse(statement: Any, values: dict[str, Any]) -> bool:
        if values["new_result"] is not None:
            raise DataError(None, None, Exception("value too long"))
        return await execute(statement, values)

    monkeypatch.setattr(writer, "execute", refuse)
    await store.settle(request_id, OK)
    outcome = await store.wait(request_id, "tenant", 5)
    assert outcome is not None
    assert outcome.error == "the result cannot be stored"
    assert outcome.error_category == "server"


async def test_an_outcome_waits_for_a_free_connection(
    store: FutureStore, writer: GroupCommitWriter, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool without a free connection raises an error of SQLAlchemy, not of the driver. The error is transient too."""
    request_id, _ = await store.record(SAMPLE)
    execute, busy = writer.execute, [NoConnectionFree("QueuePool limit")]

    async def execute_when_free(statement: Any, parameters: dict[str, Any]) -> bool:
        if busy:
            raise busy.pop()
        return await execute(statement, parameters)

    monkeypatch.setattr(writer, "execute", execute_when_free)
    await store.settle(request_id, Outcome(b"done"))
    assert not busy
    stored = database.read(lambda c: rows.find(c, request_id))
    assert stored is not None
    assert stored.outcome == Outcome(b"done")
