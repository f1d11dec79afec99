"""Agent sessions in the database: of one tenant, bounded in number, ended once, and deleted some time after that."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from one_turn import LIMITS, NOW, session, turn
from sqlalchemy import func, select

from skyrl.base.types.weights import AdapterVersion
from skyrl.storage.db import agents as rows
from skyrl.storage.db.agents import AgentSessions, AgentTurns, Counts, turns
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.writer import GroupCommitWriter
from tests.postgres_server import ON_BOTH

pytestmark = ON_BOTH


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.close()


@pytest.fixture
def sessions(database: Database, writer: GroupCommitWriter) -> AgentSessions:
    return AgentSessions(database, writer)


@pytest.fixture
def kept(database: Database, writer: GroupCommitWriter) -> AgentTurns:
    return AgentTurns(database, writer)


async def test_a_session_is_read_as_it_was_made(sessions: AgentSessions) -> None:
    made = session(
        "a",
        weights=AdapterVersion.of("s:train:0", 3),
        follows="newest",
        sampling={"temperature": 0.5, "stop": ["\u0000x"]},
        metadata={"task": {"n": 7}},
        keep_thinking=True,
        routed_experts=True,
    )
    assert await sessions.create(made, 1)
    assert await sessions.find("a") == made
    assert await sessions.find("b") is None


async def test_a_tenant_has_a_bounded_number_of_open_sessions(sessions: AgentSessions) -> None:
    assert await sessions.create(session("a"), 2)
    assert await sessions.create(session("b"), 2)
    assert not await sessions.create(session("c"), 2)
    assert await sessions.find("c") is None
    assert await sessions.create(session("d", tenant="two"), 2), "each tenant has its own"
    assert await sessions.end("a", "called", NOW + 1)
    assert await sessions.create(session("c"), 2), "a session that has ended takes no place"


async def test_a_session_ends_once(sessions: AgentSessions) -> None:
    await sessions.create(session("a"), 9)
    assert await sessions.end("a", "tokens", NOW + 1)
    assert not await sessions.end("a", "called", NOW + 2)
    assert not await sessions.end("b", "called", NOW + 2)
    found = await sessions.find("a")
    assert found is not None
    assert (found.ended_at, found.end_reason) == (NOW + 1, "tokens")


async def test_only_its_tenant_rewards_a_session_also_after_its_end(sessions: AgentSessions) -> None:
    await sessions.create(session("a"), 9)
    await sessions.end("a", "called", NOW)
    assert not await sessions.reward("a", "two", 1.0)
    assert not await sessions.reward("b", "one", 1.0)
    assert await sessions.reward("a", "one", 0.0)
    assert await sessions.reward("a", "one", -0.25)
    found = await sessions.find("a")
    assert found is not None
    assert found.reward == -0.25


async def test_a_page_has_the_tenants_newest_sessions_and_the_sums_of_their_turns(
    sessions: AgentSessions, kept: AgentTurns
) -> None:
    for number in range(4):
        await sessions.create(session(str(number), created_at=NOW + number), 9)
    await sessions.create(session("theirs", tenant="two", created_at=NOW + 9), 9)
    await sessions.end("1", "called", NOW)
    await kept.add(turn(4, id="t1", session_id="3"))
    await kept.add(turn(5, "branch", id="t2", session_id="3", attempt=1))
    await kept.add(turn(6, id="t3", session_id="theirs"))

    async def page(limit: int, offset: int, state: rows.SessionState | None = None) -> tuple[list[str], int]:
        found, total = await sessions.page("one", limit, offset, state)
        return [one.id for one, _ in found], total

    assert await page(2, 0) == (["3", "2"], 4)
    assert await page(2, 2) == (["1", "0"], 4)
    assert await page(2, 4) == ([], 4)
    assert await page(9, 0, "open") == (["3", "2", "0"], 3)
    assert await page(9, 0, "ended") == (["1"], 1)
    [(_, newest), (_, other)], _ = await sessions.page("one", 2, 0)
    assert (newest, other) == (Counts(turns=2, added=6, sampled=9, forks=1), Counts())
    assert await sessions.counts(["3", "0"]) == {"3": newest}


async def test_uses_are_written_together_and_again_after_a_failure(
    sessions: AgentSessions, writer: GroupCommitWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        await sessions.create(session(name), 9)
    sessions.note_use("a")
    sessions.note_use("b")

    async def fails(_: Any) -> None:
        raise DatabaseError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "transact", fails)
        with pytest.raises(DatabaseError):
            await sessions.write_uses()
    before = time.time()
    await sessions.write_uses()
    used = {one.id: one.used_at for one, _ in (await sessions.page("one", 9, 0))[0]}
    assert used["a"] >= before
    assert used["b"] >= before
    assert used["c"] == NOW


async def test_sessions_end_when_their_time_is_over_or_nothing_was_asked(sessions: AgentSessions) -> None:
    await sessions.create(session("idle"), 9)
    await sessions.create(session("over", created_at=NOW - 1_000, used_at=NOW + 900), 9)
    await sessions.create(session("used", used_at=NOW + 900), 9)
    await sessions.create(session("ended", created_at=NOW - 1_000), 9)
    await sessions.end("ended", "called", NOW)
    assert await sessions.end_over(NOW + LIMITS.idle_s + rows.USES_LATE_S) == {"idle": 1, "time": 1}
    assert await sessions.end_over(NOW + LIMITS.idle_s + rows.USES_LATE_S) == {}
    found = {one.id: one.end_reason for one, _ in (await sessions.page("one", 9, 0))[0]}
    assert found == {"idle": "idle", "over": "time", "used": None, "ended": "called"}


async def test_a_use_that_is_not_written_yet_keeps_a_session_from_counting_as_idle(sessions: AgentSessions) -> None:
    await sessions.create(session("a"), 9)
    assert await sessions.end_over(NOW + LIMITS.idle_s + rows.USES_LATE_S - 1) == {}
    assert await sessions.end_over(NOW + LIMITS.idle_s + rows.USES_LATE_S) == {"idle": 1}


async def test_of_two_processes_that_sweep_at_the_same_time_one_ends_a_session(
    sessions: AgentSessions, migrated_url: str
) -> None:
    for number in range(20):
        await sessions.create(session(str(number)), 20)
    with closing(Database(migrated_url)) as database:
        writer = GroupCommitWriter(database)
        others = AgentSessions(database, writer)
        sweeps = [each.end_over(NOW + LIMITS.seconds, limit=3) for each in (sessions, others) * 4]
        ended = await asyncio.gather(*sweeps)
        await writer.close()
    assert sum(counts["time"] for counts in ended) == 20
    assert (await sessions.page("one", 1, 0, "open"))[1] == 0


async def test_a_session_and_its_turns_are_deleted_after_their_time_in_steps(
    sessions: AgentSessions, kept: AgentTurns, database: Database, writer: GroupCommitWriter
) -> None:
    now = time.time()
    for name, ended_s_ago in (("old", 150.0), ("new", 50.0)):  # a busy machine takes seconds for the turns
        await sessions.create(session(name, created_at=now, used_at=now), 9)
        for attempt in range(rows.FORGET_TURNS + 1 if name == "old" else 1):
            await kept.add(turn(1, id=f"{name}{attempt}", session_id=name, attempt=attempt))
        await sessions.end(name, "called", now - ended_s_ago)
    await sessions.create(session("open", created_at=now, used_at=now), 9)
    steps = [database.write(lambda c: rows.forget(c, now - 100.0)) for _ in range(2)]
    assert steps == [rows.FORGET_TURNS, 1]
    assert await sessions.find("old") is not None, "the session goes last: its turns are found by it"
    await Retention(database, writer, 100.0, agent_retention_s=100.0).sweep()
    assert await sessions.find("old") is None
    assert [(await sessions.find(name)) is not None for name in ("new", "open")] == [True, True]
    assert database.read(lambda c: c.execute(select(func.count()).select_from(turns)).scalar_one()) == 1


async def test_long_turns_are_deleted_in_smaller_steps(
    sessions: AgentSessions, database: Database, writer: GroupCommitWriter
) -> None:
    kept = AgentTurns(database, writer)
    await sessions.create(session("old"), 9)
    experts = os.urandom(rows.FORGET_BYTES // 2)
    for attempt in range(5):
        await kept.add(turn(1, id=f"t{attempt}", session_id="old", attempt=attempt, routed_experts=experts))
    await sessions.end("old", "called", NOW)
    steps = [database.write(lambda c: rows.forget(c, NOW + 1.0)) for _ in range(5)]
    assert steps == [2, 2, 1, 1, 0], "the fourth step deletes the session"


async def test_weights_of_open_pinned_sessions_are_named(sessions: AgentSessions, database: Database) -> None:
    adapter = AdapterVersion.of("s:train:0", 3)
    await sessions.create(session("a", weights=adapter), 9)
    await sessions.create(session("b", weights=AdapterVersion.of("s:train:0", 4), follows="newest"), 9)
    await sessions.create(session("c"), 9)

    def named() -> list[Any]:
        return database.read(lambda c: list(c.execute(rows.pinned()).scalars()))

    assert named() == [adapter]
    await sessions.end("a", "called", NOW)
    assert named() == []
