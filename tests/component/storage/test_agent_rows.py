"""Agent sessions and their turns in the database: of one tenant, bounded, exact, each once, and deleted some time after
the end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
from one_turn import LIMITS, NOW, session, turn
from sqlalchemy import func, select, update

from skyrl.base.types.agents import AgentTurn, VersionSpan
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.storage.db import agents as rows
from skyrl.storage.db.agents import COMPRESSED_BYTES, AgentSessions, AgentTurns, Counts, turns
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.models import Model, add_model
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.run_steps import end_step, history
from skyrl.storage.db.sessions import Sessions
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


async def test_a_reward_counts_for_a_run_of_its_tenant_alone_and_not_after_the_session_was_deleted(
    database: Database, writer: GroupCommitWriter, sessions: AgentSessions
) -> None:
    """Another tenant may have its agents use the run's published checkpoint."""
    training = await Sessions(database, writer).create("one", [], None, "")
    run = Model(f"{training.id}:train:0", training.id, "one", "tiny", LoraSpec(4, 32.0, 1), None)
    await writer.transact(add_model(run, 0))
    weights = AdapterVersion.of(run.id, 1)
    for id_, tenant, reward in (("a", "one", 0.25), ("b", "two", -9.0), ("c", "one", 7.0)):
        await sessions.create(session(id_, tenant=tenant, weights=weights), 9)
        if id_ == "c":
            await sessions.end("c", "called", NOW)
            await sessions.delete("c")
        assert await sessions.reward(id_, tenant, reward) == (id_ != "c")
    await writer.transact(end_step(run.id, 0.0))
    assert [step.reward for step in database.read(lambda c: history(c, run.id))] == [0.25]


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


async def test_time_in_which_nobody_could_ask_is_no_idle_time(sessions: AgentSessions) -> None:
    await sessions.create(session("a"), 9)
    known = NOW + 5 * LIMITS.idle_s
    end = known + rows.USES_LATE_S
    assert await sessions.end_over(end, idle_since=known - LIMITS.idle_s + 1) == {}
    assert await sessions.end_over(end, idle_since=known - LIMITS.idle_s) == {"idle": 1}


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


LARGE_ID = 2**31 - 1
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1.0, "b": "\\u0000é"}'}}
LOGPROBS = np.array([-0.0, -1e-45, -np.inf, np.float32(-0.1)], np.float32)
"""Among them the smallest float32 and one whose decimal digits are not exact."""


SESSIONS = ["s1", "s2", *(f"o{number}" for number in range(20))]


@pytest.fixture
async def turn_writer(database: Database) -> AsyncIterator[GroupCommitWriter]:
    """The sessions SESSIONS are open."""
    writer = GroupCommitWriter(database)
    sessions = AgentSessions(database, writer)
    await asyncio.gather(*(sessions.create(session(name), len(SESSIONS)) for name in SESSIONS))
    yield writer
    await writer.close()


@pytest.fixture
def kept_turns(database: Database, turn_writer: GroupCommitWriter) -> AgentTurns:
    return AgentTurns(database, turn_writer)


def fields(turn: AgentTurn) -> dict[str, Any]:
    """All fields, with arrays as type and bytes: equal only if every bit is."""
    return {
        name: (value.dtype, value.tobytes()) if isinstance(value := getattr(turn, name), np.ndarray) else value
        for name in AgentTurn.__dataclass_fields__
    }


def full(texts: int) -> AgentTurn:
    """A turn with a value in every field, and messages of about `texts` characters."""
    return turn(
        4,
        "user_changed",
        forked_at=2,
        parent="t0",
        key=bytes(range(256)),
        attempt=3,
        messages=[{"role": "user", "content": "a\u0000b\U0001f600" + "x" * texts}, {"role": "tool", "content": None}],
        setting={"tools": [{"type": "function"}], "chat_template_kwargs": {"n": 1.0, "m": 1, "big": 2**63}},
        added=np.array([0, LARGE_ID], np.int32),
        logprobs=LOGPROBS,
        versions=(VersionSpan(0, "v1"), VersionSpan(3, "v2")),
        answer={"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]},
        finish_reason="tool_calls",
        stop_reason=151_645,
        routed_experts=b"\x93NUMPY\x00\xff",
        constrained=np.array([False, True, True, False]),
        own_logprobs=False,
    )


@pytest.mark.parametrize("texts", [0, 10 * COMPRESSED_BYTES])
async def test_a_turn_is_read_bit_for_bit_as_it_was_written(kept_turns: AgentTurns, texts: int) -> None:
    written = full(texts)
    assert await kept_turns.add(written) is written
    [read], _ = await kept_turns.of("s1")
    assert fields(read) == fields(written)


async def test_a_turn_of_the_version_before_is_read(kept_turns: AgentTurns, database: Database) -> None:
    """Its content had neither `constrained` nor `own_logprobs`, the last two of 16."""
    written = full(0)
    await kept_turns.add(written)
    stored = database.read(lambda c: c.execute(select(turns.c.content)).scalar_one())
    content = msgspec.msgpack.decode(stored[1:])
    assert content[-2:] == [b"\x60", False]
    before = stored[:1] + msgspec.msgpack.encode(content[:-2])
    database.write(lambda c: c.execute(update(turns).values(content=before)))
    [read], _ = await kept_turns.of("s1")
    assert fields(read) == fields(written) | {"constrained": None, "own_logprobs": True}


async def test_integers_of_more_than_64_bits_are_kept(kept_turns: AgentTurns) -> None:
    """JSON has them, and MessagePack has not."""
    schema = {"type": "integer", "exclusiveMaximum": 2**64, "default": 1.0}
    messages = [{"role": "user", "content": "hé", "metadata": {"n": -(2**70)}}]
    written = turn(2, setting={"tools": [{"type": "function", "function": schema}]}, messages=messages)
    assert await kept_turns.add(written) is written
    [read], _ = await kept_turns.of("s1")
    assert fields(read) == fields(written)
    assert repr(read.setting) == repr(written.setting)


async def test_a_turn_without_tokens_is_kept(kept_turns: AgentTurns) -> None:
    written = turn(0, added=np.array([], np.int32))
    await kept_turns.add(written)
    [read], _ = await kept_turns.of("s1")
    assert fields(read) == fields(written)


async def test_long_texts_take_less_room(kept_turns: AgentTurns, database: Database) -> None:
    await kept_turns.add(full(100 * COMPRESSED_BYTES))
    size = database.read(lambda c: c.execute(select(func.length(turns.c.content))).scalar_one())
    assert size < COMPRESSED_BYTES


async def test_of_the_same_answer_the_first_stored_stays(kept_turns: AgentTurns) -> None:
    first = turn(1, id="t1")
    second = turn(2, id="t2")
    assert await kept_turns.add(first) is first
    stored = await kept_turns.add(second)
    assert stored is not None
    assert fields(stored) == fields(first)
    for other in (turn(2, id="t3", attempt=1), turn(2, id="t4", key=b"l"), turn(2, id="t5", session_id="s2")):
        assert await kept_turns.add(other) is other
    assert [each.id for each in (await kept_turns.of("s1"))[0]] == ["t1", "t3", "t4"]


async def test_of_many_at_once_one_is_stored_and_all_get_it(kept_turns: AgentTurns) -> None:
    same = [turn(1, id=f"t{number}") for number in range(20)]
    others = [turn(1, id=f"o{number}", session_id=f"o{number}") for number in range(20)]
    got = await asyncio.gather(*map(kept_turns.add, [each for pair in zip(same, others, strict=True) for each in pair]))
    stored, _ = await kept_turns.of("s1")
    assert len(stored) == 1
    assert {each and each.id for each in got[::2]} == {stored[0].id}
    assert [each and each.id for each in got[1::2]] == [each.id for each in others], "one refused row refuses no other"


async def test_a_turn_of_a_session_that_has_ended_is_not_stored(
    kept_turns: AgentTurns, database: Database, turn_writer: GroupCommitWriter
) -> None:
    sessions = AgentSessions(database, turn_writer)
    before = turn(1, id="t1")
    await kept_turns.add(before)
    assert await sessions.end("s1", "called", 1.0)
    assert await kept_turns.add(turn(1, id="t2", key=b"other")) is None
    assert await kept_turns.add(turn(1, id="t3", session_id="s9")) is None, "nor is one of no session"
    again = await kept_turns.add(before)
    assert again is not None
    assert fields(again) == fields(before), "what was stored before stays known"
    assert [each.id for each in (await kept_turns.of("s1"))[0]] == ["t1"]


async def test_of_many_turns_at_once_those_of_ended_sessions_are_refused_alone(
    kept_turns: AgentTurns, database: Database, turn_writer: GroupCommitWriter
) -> None:
    sessions = AgentSessions(database, turn_writer)
    ended = SESSIONS[2::2]
    for name in ended:
        assert await sessions.end(name, "called", 1.0)
    written = [turn(1, id=f"t-{name}", session_id=name) for name in SESSIONS[2:]]
    got = await asyncio.gather(*map(kept_turns.add, written))
    assert [each is None for each in got] == [name in ended for name in SESSIONS[2:]]


async def test_turns_that_are_stored_while_their_session_ends_were_there_at_its_end(
    kept_turns: AgentTurns, database: Database, turn_writer: GroupCommitWriter
) -> None:
    """A turn that is stored is seen by whoever was told of the end."""
    sessions = AgentSessions(database, turn_writer)

    async def end() -> list[str]:
        await sessions.end("s1", "called", 1.0)
        return [each.id for each in (await kept_turns.of("s1"))[0]]

    adding = [asyncio.create_task(kept_turns.add(turn(1, id=f"t{n}", key=bytes([n])))) for n in range(50)]
    ending = asyncio.create_task(end())
    adding += [asyncio.create_task(kept_turns.add(turn(1, id=f"t{n}", key=bytes([n])))) for n in range(50, 100)]
    stored = [each.id for each in await asyncio.gather(*adding) if each is not None]
    assert sorted(await ending) == sorted(stored) == sorted(each.id for each in (await kept_turns.of("s1"))[0])


async def test_turns_come_in_their_order_and_only_those_after_a_row(kept_turns: AgentTurns) -> None:
    for number in range(3):
        await kept_turns.add(turn(1, id=f"t{number}", key=bytes([number])))
        await kept_turns.add(turn(1, id=f"u{number}", key=bytes([number]), session_id="s2"))
    found, last = await kept_turns.of("s1")
    assert [each.id for each in found] == ["t0", "t1", "t2"]
    assert await kept_turns.of("s1", last) == ([], last)
    await kept_turns.add(turn(1, id="t3", key=b"t3"))
    later, newest = await kept_turns.of("s1", last)
    assert [each.id for each in later] == ["t3"]
    assert newest > last
    assert await kept_turns.of("s9") == ([], 0)
    [(row, one), (next_row, two)] = await kept_turns.page("s1", 0, 2)
    assert (one.id, two.id) == ("t0", "t1")
    assert [each.id for _, each in await kept_turns.page("s1", row, 1)] == ["t1"]
    assert [each.id for _, each in await kept_turns.page("s1", next_row, 9)] == ["t2", "t3"]
