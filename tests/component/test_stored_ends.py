"""Ends of samples as the database orders them: what a poll tells that may come to any process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_harness import until
from sqlalchemy import select

from skyrl.db import futures as rows
from skyrl.db.database import Database
from skyrl.db.futures import Outcome
from skyrl.db.writer import GroupCommitWriter
from skyrl.futures import stored_ends
from skyrl.futures.completions import Completion, Target, TargetGone
from skyrl.futures.store import FutureStore
from skyrl.notify.peers import PeerNotifier
from skyrl.types.kinds import Kind
from skyrl.types.requests import NewRequest
from tests.postgres_server import ON_POSTGRES

pytestmark = ON_POSTGRES

SAMPLE = NewRequest(Kind.EXTERNAL, "tenant", "s1", b"{}", sampling_session_id="s1:sample:0")
TARGET = Target("s1", "s1:sample:0", 0)
OK = Outcome(b"abc", "proto:sample")
LONG_S = 60.0


class World:
    """Two processes of one database."""

    def __init__(self, database: Database, writer: GroupCommitWriter) -> None:
        self.database = database
        self.others = PeerNotifier()
        self.others.living = frozenset({"another"})
        self.here, self.there = (FutureStore(database, writer, name, self.others) for name in ("here", "there"))

    async def record(self, store: FutureStore, count: int, first: int = 0) -> list[str]:
        samples = [dataclasses.replace(SAMPLE, sample_seq_id=number) for number in range(first, first + count)]
        return [(await store.record(sample))[0] for sample in samples]

    def settle(self, request_id: str, now: float) -> None:
        self.database.write(lambda c: c.execute(rows.SETTLE, rows.settlement(request_id, OK, now)))


@pytest.fixture
async def world(migrated_url: str) -> AsyncIterator[World]:
    database = Database(migrated_url)
    writer = GroupCommitWriter(database)
    yield World(database, writer)
    await writer.close()
    database.close()


async def test_each_end_is_later_than_the_one_before_whatever_the_clocks_say(world: World) -> None:
    ids = await world.record(world.here, 4)
    for request_id, now in zip(ids, (100.0, 50.0, 100.0, 200.0), strict=True):
        world.settle(request_id, now)
    query = select(rows.futures.c.completed_at).order_by(rows.futures.c.n)
    moments = world.database.read(lambda c: list(c.execute(query).scalars()))
    assert [moments[0], moments[3]] == [100.0, 200.0]
    assert all(later - earlier > 1e-6 for earlier, later in zip(moments, moments[1:], strict=False))
    cursor, told = 0, []
    for turn in range(4):
        store = (world.here, world.there)[turn % 2]
        cursor, ends = await store.completions.poll(TARGET, cursor, 0)
        told += [end.request_id for end in ends]
    assert told == ids


async def test_many_that_end_in_one_moment_come_in_pages_from_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_ends, "MAX_COMPLETIONS", 7)
    ids = await world.record(world.here, 50)
    await asyncio.gather(*(world.here.settle(request_id, OK) for request_id in ids))
    cursor, told = 0, []
    for turn in range(9):
        cursor, ends = await (world.here, world.there)[turn % 2].completions.poll(TARGET, cursor, 0)
        told += [end.request_id for end in ends]
        assert len(ends) <= 7
    assert sorted(told) == sorted(ids)


@pytest.mark.parametrize("told", [True, False])
async def test_poll_that_is_held_hears_of_an_end_elsewhere_told_or_not(
    world: World, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(stored_ends, "LOOK_S", 1000.0 if told else 0.01)
    held = asyncio.create_task(world.there.completions.poll(TARGET, 0, LONG_S))
    await until(lambda: world.there.completions.held == 1)
    if told:

        def tell(words: list[str]) -> None:
            for word in words:
                world.there.wake_polls(word)

        world.others.send = tell
    (request_id,) = await world.record(world.here, 1)
    await world.here.settle(request_id, OK)
    _, ends = await asyncio.wait_for(held, LONG_S)
    assert [end.request_id for end in ends] == [request_id]


async def test_alone_a_poll_that_is_held_asks_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_ends, "LOOK_S", 0.001)
    world.others.living = frozenset()
    reads = 0
    read = world.database.read_async

    async def counted(query: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read(query)

    monkeypatch.setattr(world.database, "read_async", counted)
    assert await world.here.completions.poll(TARGET, 5, 0.2) == (5, [])
    assert reads == 1


async def test_closed_session_ends_its_polls(world: World) -> None:
    held = asyncio.create_task(world.here.completions.poll(TARGET, 0, LONG_S))
    await until(lambda: world.here.completions.held == 1)
    world.here.drop_session("s1")
    with pytest.raises(TargetGone):
        await asyncio.wait_for(held, LONG_S)
    assert len(world.here.completions) == 0


async def test_what_is_pending_is_read_again_when_it_could_not_be(world: World) -> None:
    asked_for: list[bool] = []

    async def load(target: Target, since: float, *, limit: int, pending: bool) -> list[Completion]:
        asked_for.append(pending)
        if len(asked_for) == 1:
            raise OSError("the database is away")
        return await world.here._ends_of(target, since, limit=limit, pending=pending)

    (request_id,) = await world.record(world.there, 1)
    world.settle(request_id, 1.0)
    ends = stored_ends.StoredEnds(load)
    with pytest.raises(OSError, match="away"):
        await ends.poll(TARGET, 0, LONG_S)
    for _ in range(2):
        _, told = await ends.poll(TARGET, 0, LONG_S)
        assert [end.request_id for end in told] == [request_id]
    assert asked_for == [True, True, False]


async def test_end_is_told_once_however_its_moment_is_rounded(world: World) -> None:
    (request_id,) = await world.record(world.here, 1)
    world.settle(request_id, 1800000000.0000026)
    cursor, told = await world.here.completions.poll(TARGET, 0, 0)
    assert [end.request_id for end in told] == [request_id]
    assert await world.there.completions.poll(TARGET, cursor, 0) == (cursor, [])
