"""The ends of samples in the order that the database gives them, so that a poll may come to any process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from engine_harness import until
from sqlalchemy import select

from skyrl.base.types.requests import Kind, NewRequest
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.futures import completion_feed
from skyrl.storage.futures import store as futures_store
from skyrl.storage.futures.completion_feed import CLONE_BLOCK, Completion, CompletionFeed, Target, TargetGone
from skyrl.storage.futures.store import FutureStore
from skyrl.storage.notices import PeerNotifier
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH

SAMPLE = NewRequest(Kind.EXTERNAL, "tenant", "s1", b"{}", sampling_session_id="s1:sample:0")
TARGET = Target("s1", "s1:sample:0", 0)
OK = Outcome(b"abc", "proto:sample")
LONG_S = 60.0


class TwoProcesses:
    """Two processes on one database."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self.database = database
        self.peers = PeerNotifier()
        self.peers.living = frozenset({"another"})
        self.here, self.there = (FutureStore(database, writer, name, self.peers) for name in ("here", "there"))

    async def record(self, store: FutureStore, count: int, first: int = 0, target: Target = TARGET) -> list[str]:
        sampler, block = target.sampling_session_id, target.clone * CLONE_BLOCK
        samples = [
            msgspec.structs.replace(SAMPLE, sampling_session_id=sampler, sample_seq_id=block + number)
            for number in range(first, first + count)
        ]
        return [(await store.record(sample))[0] for sample in samples]

    async def end(self, count: int, first: int = 0, target: Target = TARGET) -> list[str]:
        """End `count` samples in this process, one after the other."""
        ids = await self.record(self.here, count, first, target)
        for request_id in ids:
            await self.here.settle(request_id, OK)
        return ids

    def count_reads(self, monkeypatch: pytest.MonkeyPatch) -> list[None]:
        """A list that grows with every read from now on."""
        reads: list[None] = []
        read = self.database.read_async

        async def counted(query: Any) -> Any:
            reads.append(None)
            return await read(query)

        monkeypatch.setattr(self.database, "read_async", counted)
        return reads

    def settle(self, request_id: str, now: float) -> None:
        self.database.write(lambda c: rows.SETTLE.execute(c, [rows.settlement(request_id, OK, now)]))


def names(reported: list[Completion]) -> list[str]:
    return [end.request_id for end in reported]


async def poll_until_empty(ends: CompletionFeed, cursor: int = 0, target: Target = TARGET) -> tuple[int, list[str]]:
    """Poll again and again, from the last cursor, until the poll reports nothing."""
    ids: list[str] = []
    while True:
        cursor, reported = await ends.poll(target, cursor, 0)
        if not reported:
            return cursor, ids
        ids += names(reported)


@pytest.fixture
async def world(migrated_url: str) -> AsyncIterator[TwoProcesses]:
    database = Database(migrated_url)
    writer = GroupCommitWriter(database)
    yield TwoProcesses(database, writer)
    await writer.close()
    database.close()


async def test_each_end_is_later_than_the_one_before_even_if_clocks_differ(world: TwoProcesses) -> None:
    ids = await world.record(world.here, 4)
    for request_id, now in zip(ids, (100.0, 50.0, 100.0, 200.0), strict=True):
        world.settle(request_id, now)
    query = select(rows.futures.c.completed_at).order_by(rows.futures.c.n)
    moments = world.database.read(lambda c: list(c.execute(query).scalars()))
    assert [moments[0], moments[3]] == [100.0, 200.0]
    assert all(later - earlier > 1e-6 for earlier, later in zip(moments, moments[1:], strict=False))
    cursor, reported = 0, []
    for turn in range(4):
        store = (world.here, world.there)[turn % 2]
        cursor, ends = await store.ends.poll(TARGET, cursor, 0)
        reported += [end.request_id for end in ends]
    assert reported == ids


async def test_samples_that_end_at_the_same_moment_come_in_pages_from_both_processes(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_feed, "MAX_COMPLETIONS", 7)
    ids = await world.record(world.here, 50)
    await asyncio.gather(*(world.here.settle(request_id, OK) for request_id in ids))
    cursor, reported = 0, []
    for turn in range(9):
        cursor, ends = await (world.here, world.there)[turn % 2].ends.poll(TARGET, cursor, 0)
        reported += [end.request_id for end in ends]
        assert len(ends) <= 7
    assert sorted(reported) == sorted(ids)


@pytest.mark.parametrize("notified", [True, False])
async def test_a_held_poll_reports_an_end_of_the_other_process_with_or_without_notice(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch, notified: bool
) -> None:
    monkeypatch.setattr(completion_feed, "SAFETY_READ_S", 1000.0 if notified else 0.01)
    held = asyncio.create_task(world.there.ends.poll(TARGET, 0, LONG_S))
    await until(lambda: world.there.ends.held == 1)
    if notified:

        def tell(words: list[str]) -> None:
            for word in words:
                world.there.ends.ended_elsewhere(word)

        world.peers.send = tell
    (request_id,) = await world.record(world.here, 1)
    await world.here.settle(request_id, OK)
    _, ends = await asyncio.wait_for(held, LONG_S)
    assert [end.request_id for end in ends] == [request_id]


async def test_a_held_poll_does_not_read_the_database_if_its_process_is_alone(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_feed, "SAFETY_READ_S", 0.001)
    world.peers.living = frozenset()
    await world.here.ends.poll(TARGET, 5, 0)
    reads = world.count_reads(monkeypatch)
    assert await world.here.ends.poll(TARGET, 5, 0.2) == (5, [])
    assert len(reads) <= 1, "at most one read, for a cursor older than the ends in memory"


async def test_a_closed_session_ends_its_polls(world: TwoProcesses) -> None:
    held = asyncio.create_task(world.here.ends.poll(TARGET, 0, LONG_S))
    await until(lambda: world.here.ends.held == 1)
    world.here.drop_session("s1")
    with pytest.raises(TargetGone):
        await asyncio.wait_for(held, LONG_S)
    assert len(world.here.ends) == 0


async def test_a_client_gets_all_ends_after_its_first_poll_failed_to_read(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first successful poll also reads the pending samples, so that this process waits for them."""
    ended, pending = await world.record(world.there, 2)
    world.settle(ended, 1.0)
    read, left = world.database.read_async, [1, 1]

    async def fail(query: Any) -> Any:
        if left:
            left.pop()
            raise OSError("the database is away")
        return await read(query)

    monkeypatch.setattr(world.database, "read_async", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            await world.here.ends.poll(TARGET, 0, LONG_S)
        assert not world.here.is_pending(pending)
    cursor, reported = await world.here.ends.poll(TARGET, 0, LONG_S)
    assert names(reported) == [ended]
    assert world.here.is_pending(pending)
    await world.there.settle(pending, OK)
    assert names((await world.here.ends.poll(TARGET, cursor, LONG_S))[1]) == [pending]


async def test_the_reader_tries_again_after_a_failed_read(world: TwoProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    world.peers.living = frozenset()
    cursor, _ = await world.here.ends.poll(TARGET, 0, 0)
    (request_id,) = await world.record(world.here, 1)
    await world.here.settle(request_id, OK)
    with monkeypatch.context() as patch:

        async def fail(_: Any) -> Any:
            raise OSError("the database is away")

        patch.setattr(world.database, "read_async", fail)
        with pytest.raises(OSError, match="away"):
            await world.here.ends.poll(TARGET, cursor, LONG_S)
    assert names((await world.here.ends.poll(TARGET, cursor, LONG_S))[1]) == [request_id]


async def test_an_end_is_reported_once_however_its_time_is_rounded(world: TwoProcesses) -> None:
    (request_id,) = await world.record(world.here, 1)
    world.settle(request_id, 1800000000.0000026)
    cursor, reported = await world.here.ends.poll(TARGET, 0, 0)
    assert [end.request_id for end in reported] == [request_id]
    assert await world.there.ends.poll(TARGET, cursor, 0) == (cursor, [])


async def test_a_clock_that_was_set_back_hides_no_end(world: TwoProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose cursor is later than the clock still gets the samples that end now."""
    (first,) = await world.end(1)
    cursor, reported = await world.here.ends.poll(TARGET, 0, LONG_S)
    assert names(reported) == [first]
    an_hour_ago = time.time() - 3600
    monkeypatch.setattr(futures_store.time, "time", lambda: an_hour_ago)
    (second,) = await world.end(1, first=1)
    later, reported = await world.here.ends.poll(TARGET, cursor, LONG_S)
    assert names(reported) == [second]
    assert later > cursor


async def test_many_ends_between_two_polls_cost_one_read(world: TwoProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of new ends serves several clients."""
    world.peers.living = frozenset()
    targets = [TARGET, Target("s1", "s1:sample:1", 0), Target("s1", "s1:sample:1", 3)]
    cursors = [(await world.here.ends.poll(target, 0, 0))[0] for target in targets]
    ids = [await world.end(5, target=target) for target in targets]
    reads = world.count_reads(monkeypatch)
    reported = [await world.here.ends.poll(t, cursor, LONG_S) for t, cursor in zip(targets, cursors, strict=True)]
    cursors = [cursor for cursor, _ in reported]
    assert len(reads) <= 1 + len(targets), "one read per client, because each cursor is older than the ends in memory"
    assert [names(ends) for _, ends in reported] == ids
    more = [await world.end(5, first=5, target=target) for target in targets]
    reads.clear()
    reported = [await world.here.ends.poll(t, cursor, LONG_S) for t, cursor in zip(targets, cursors, strict=True)]
    assert [names(ends) for _, ends in reported] == more
    assert len(reads) == 1


async def test_ends_that_no_client_polls_leave_memory_and_are_not_lost(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_feed, "MAX_KEPT", 10)
    silent, asking = TARGET, Target("s1", "s1:sample:1", 0)
    seen = await world.end(1, target=silent)
    cursor, ids = await poll_until_empty(world.here.ends, 0, silent)
    assert ids == seen
    position, reported = 0, []
    for number in range(5):
        unseen = await world.end(5, first=1 + 5 * number, target=silent)
        reported += [*unseen]
        await world.end(1, first=number, target=asking)
        position, _ = await poll_until_empty(world.here.ends, position, asking)
        assert world.here.ends.kept <= 10
    assert (await poll_until_empty(world.here.ends, cursor, silent))[1] == reported


async def test_a_reader_that_is_far_behind_starts_anew_and_loses_nothing(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_feed, "MAX_READ", 10)
    monkeypatch.setattr(completion_feed, "MAX_COMPLETIONS", 7)
    seen = await world.end(1)
    cursor, ids = await poll_until_empty(world.here.ends)
    assert ids == seen
    unseen = await world.end(25, first=1)
    assert (await poll_until_empty(world.here.ends, cursor))[1] == unseen


async def test_the_number_of_remembered_idle_clients_is_bounded_and_they_lose_nothing(
    world: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_feed, "MAX_CLIENTS", 3)
    targets = [Target("s1", "s1:sample:0", clone) for clone in range(10)]
    cursors = [(await poll_until_empty(world.here.ends, 0, target))[0] for target in targets]
    assert len(world.here.ends) <= 3
    ids = [await world.end(2, target=target) for target in targets]
    for target, cursor, wanted in zip(targets, cursors, ids, strict=True):
        assert (await poll_until_empty(world.here.ends, cursor, target))[1] == wanted


async def test_a_waiting_poll_gets_an_end_although_another_poll_starts_from_the_beginning(world: TwoProcesses) -> None:
    first = await world.end(1)
    cursor, ids = await poll_until_empty(world.here.ends)
    assert ids == first
    waiting = asyncio.create_task(world.here.ends.poll(TARGET, cursor, LONG_S))
    await until(lambda: world.here.ends.held == 1)
    assert names((await world.here.ends.poll(TARGET, 0, 0))[1]) == first
    second = await world.end(1, first=1)
    assert names((await asyncio.wait_for(waiting, LONG_S))[1]) == second
    assert names((await world.here.ends.poll(TARGET, 0, 0))[1]) == first + second, (
        "the samples are reported again, because an answer may have been lost"
    )
