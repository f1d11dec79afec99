"""When agent sessions end: while their turns run, while they are read, and when they have been idle."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from agent_world import CHAT, Agent, Server, user
from api_harness import BASE, Api, scrape
from chatting_upstream import SAMPLED
from fake_upstream import FakeUpstream
from router_world import until

from skyrl.api.access import tenant_of_key
from skyrl.base.types.agents import AgentLimits, AgentSession
from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.live_sessions import LiveSession, RunningTurn
from skyrl.storage.db import agents
from skyrl.storage.db.database import MAX_NAMED
from skyrl.storage.db.sessions import Continuity
from tests.postgres_server import ON_BOTH, ON_BOTH_SLOWLY, ON_POSTGRES

BRANCHES, LIMIT = 100, 20
STREAMS = 80
TASK = [user("Who watches the river?")]


async def test_requests_at_once_are_branches_that_train_each_token_once(server: Server) -> None:
    agent = await server.agent()
    begun = [*TASK, await agent.say(TASK)]
    said = await asyncio.gather(*(agent.say([*begun, user(f"Question {n}?")]) for n in range(BRANCHES)))
    assert len({answer["content"] for answer in said}) == BRANCHES
    turns = await pages(agent, "/turns")
    assert {turn["parent"] for turn in turns[1:]} == {turns[0]["id"]}
    assert Counter(turn["fork"] for turn in turns) == {None: 2, "branch": BRANCHES - 1}
    rows = await pages(agent, "/trajectory?format=samples")
    assert len(rows) == BRANCHES
    trained = [
        logprob
        for row in rows
        for logprob, mask in zip(row["rollout_log_probs"], row["loss_mask"], strict=True)
        if mask
    ]
    assert sorted(trained) == sorted(logprob for answer in server.vllm.answers for logprob in answer.logprobs)


async def test_requests_at_once_do_not_exceed_the_limit_of_turns(server: Server) -> None:
    agent = await server.agent(limits={"turns": LIMIT})
    answers = await asyncio.gather(*(agent.ask(CHAT, messages=[user(f"Task {n}.")]) for n in range(BRANCHES)))
    assert Counter(answer.status_code for answer in answers) == {200: LIMIT, 403: BRANCHES - LIMIT}
    assert len(server.vllm.answers) == LIMIT
    assert (await agent.get())["end_reason"] == "turns"


async def test_streams_that_are_left_are_finished_and_hold_nothing(server: Server) -> None:
    agents = [await server.agent() for _ in range(STREAMS)]
    server.vllm.go_on.clear()
    begun = await asyncio.gather(*map(left, agents))
    await until(lambda: len(server.api.services.openai_in_flight) == 0)
    server.vllm.go_on.set()
    lives = [live for agent in agents if (live := server.live(agent)) is not None]
    await until(lambda: not any(live.running for live in lives))
    assert [len(live.tree) for live in lives] == [1] * STREAMS
    again = await asyncio.gather(*(agent.say(TASK) for agent in agents))
    for first, answer in zip(begun, again, strict=True):
        assert answer["content"].startswith(first)
    assert len(server.vllm.answers) == STREAMS, "each answer was sampled once"
    assert [(await agent.get())["sampled"] for agent in agents] == [SAMPLED] * STREAMS


@pytest.mark.parametrize("streams", [True, False])
async def test_the_end_of_a_session_ends_its_running_turns_and_its_trajectory_stays(
    server: Server, upstream: FakeUpstream, streams: bool
) -> None:
    agent, other = await server.agent(), await server.agent()
    said = await agent.say(TASK)
    server.vllm.go_on.clear()
    again = {"messages": [*TASK, said, user("And now?")], "stream": streams}
    waiting = asyncio.create_task(agent.ask(CHAT, **again))
    others = asyncio.create_task(other.ask(CHAT, messages=TASK, stream=True))
    live = server.live(agent)
    assert live is not None
    await until(lambda: live.running and (elsewhere := server.live(other)) is not None and elsewhere.running)
    if streams:
        await left(agent)
        await until(lambda: len(live.running) == 2)
    await server.end(agent)
    refused = await waiting
    assert "agent_session_ended" in refused.text
    assert refused.status_code == (200 if streams else 403), "a stream that has begun ends with the error"
    await until(lambda: not live.running)
    before = await agent.get("/trajectory?format=samples")
    server.vllm.go_on.set()
    assert (await others).status_code == 200, "other sessions go on"
    assert "agent_session_ended" not in (await others).text
    assert await agent.get("/trajectory?format=samples") == before
    assert len((await agent.get("/turns"))["rows"]) == 1
    assert (await agent.ask(CHAT, **again)).status_code == 403


async def test_a_turn_that_runs_when_the_time_of_its_session_is_over_ends_with_it(server: Server) -> None:
    agent = await server.agent(limits={"seconds": 60})
    server.vllm.go_on.clear()
    waiting = asyncio.create_task(agent.ask(CHAT, messages=TASK, stream=True))
    await until(lambda: (live := server.live(agent)) is not None and live.running)
    live = server.live(agent)
    assert live is not None
    live.session = replace(live.session, created_at=live.session.created_at - 100)
    await server.api.services.agents.live.note_running()  # as it happens every ten seconds
    assert "agent_session_ended" in (await waiting).text
    await until(lambda: not live.running)
    assert (await agent.get())["end_reason"] == "time"
    assert (await agent.get("/turns"))["rows"] == []


async def test_a_turn_that_is_complete_when_its_session_ends_is_in_the_trajectory_or_was_not_answered(
    server: Server,
) -> None:
    """Ends at any moment of turns: what a client has got whole is in the trajectory, and nothing is added later."""
    agents = [await server.agent() for _ in range(40)]

    async def end(agent: Agent, after_s: float) -> list[Any]:
        await asyncio.sleep(after_s)
        await server.end(agent)
        return (await agent.get("/turns"))["rows"]

    asking = [asyncio.create_task(agent.ask(CHAT, messages=TASK)) for agent in agents]
    ended = await asyncio.gather(*(end(agent, number / 400) for number, agent in enumerate(agents)))
    answers = await asyncio.gather(*asking)
    for agent, turns, answer in zip(agents, ended, answers, strict=True):
        assert answer.status_code in (200, 403), answer.text
        assert (answer.status_code == 200) <= (len(turns) == 1)
        assert (await agent.get("/turns"))["rows"] == turns


async def test_a_lost_answer_is_given_again_after_the_end_of_the_session(server: Server) -> None:
    agent = await server.agent(limits={"turns": 1})
    first = await agent.ask(CHAT, messages=TASK)
    assert (await agent.ask(CHAT, messages=[user("And at night?")])).status_code == 403
    assert (await agent.get())["end_reason"] == "turns"
    retried = {"Authorization": f"Bearer {agent.key}", "x-stainless-retry-count": "1"}
    body = {"model": "any", "max_tokens": 9, "messages": TASK}
    again = await agent.http.post(CHAT, json=body, headers=retried)
    assert again.status_code == 200, again.text
    message = first.json()["choices"][0]["message"]
    assert again.json()["choices"][0]["message"] == message
    assert len(server.vllm.answers) == 1


async def left(agent: Agent) -> str:
    """The first part of a streamed answer, after which the client closes its connection."""
    body = {"model": "any", "max_tokens": 9, "messages": TASK, "stream": True}
    headers = {"Authorization": f"Bearer {agent.key}"}
    async with agent.http.stream("POST", CHAT, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        first = await anext(answer.aiter_lines())
    return json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["content"]


async def pages(agent: Agent, path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    offset: str | int | None = 0
    while offset is not None:
        page = await agent.get(f"{path}{'&' if '?' in path else '?'}offset={offset}")
        rows += page["rows"]
        offset = page["next_offset"]
    return rows


TENANT = tenant_of_key("tml-one")


async def created(api: Api) -> str:
    return (await api.post("agent_sessions", {"model": BASE})).json()["session_id"]


@asynccontextmanager
async def read_half(
    api: Api, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[LiveSession]]:
    """A session that is being opened: its row is read, its turns are not. At the end it is open in memory."""
    turns, went_on, reads = api.services.agent_turns, asyncio.Event(), []
    of: Callable[..., Any] = turns.of

    async def slow(*given: Any) -> Any:
        reads.append(given)
        if len(reads) == 1:
            await went_on.wait()
        return await of(*given)

    monkeypatch.setattr(turns, "of", slow)
    opening = asyncio.create_task(api.services.agents.live.open(session_id, TENANT))
    await until(lambda: bool(reads))
    yield opening
    went_on.set()


async def until_stored(api: Api, session_id: str) -> None:
    """Wait until the end is in the database."""
    find = api.services.agent_sessions.find
    while (session := await find(session_id)) is None or session.ended_at is None:  # noqa: ASYNC110 - a row tells
        await asyncio.sleep(0.005)


def refused(live: LiveSession) -> None:
    with pytest.raises(RequestError, match="has ended: it was ended by a call"):
        live.check_open()


@ON_BOTH
async def test_a_session_that_ends_while_it_is_read_has_ended(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session_id, lives = await created(api), api.services.agents.live
    async with read_half(api, session_id, monkeypatch) as opening:
        ending = asyncio.create_task(lives.end(session_id, "called"))
        await until_stored(api, session_id)
    assert await ending
    refused(await opening)


@ON_POSTGRES
async def test_a_session_that_another_process_ends_while_it_is_read_has_ended(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id, lives = await created(api), api.services.agents.live
    async with read_half(api, session_id, monkeypatch) as opening:
        assert await api.services.agent_sessions.end(session_id, "called", time.time())
        told = asyncio.create_task(lives.look_again(session_id))
        await asyncio.sleep(0)
    await told
    refused(await opening)


@ON_POSTGRES
async def test_a_turn_that_is_planned_when_another_process_ends_its_session_does_not_begin(api: Api) -> None:
    session_id, lives = await created(api), api.services.agents.live
    live = await lives.open(session_id, TENANT)  # the turn is planned from here to its second `check_open`
    assert await api.services.agent_sessions.end(session_id, "called", time.time())
    await lives.look_again(session_id)
    refused(live)


@ON_POSTGRES
@pytest.mark.parametrize("swept", [False, True])
async def test_a_session_that_another_process_deletes_ends_its_turns_and_no_others(api: Api, swept: bool) -> None:
    """This process hears of the end when the session is found no more."""
    session_ids, lives = [await created(api) for _ in range(2)], api.services.agents.live
    deleted, other = [await lives.open(session_id, TENANT) for session_id in session_ids]
    turn = RunningTurn("turn", None, tokens=1, n=1, streams=False)
    turn.task = asyncio.create_task(asyncio.sleep(LONG_S))
    deleted.running.append(turn)
    other.planned += 1
    assert await api.services.agent_sessions.end(session_ids[0], "called", time.time())
    await api.services.agent_sessions.delete(session_ids[0])
    while swept and await api.services.writer.transact(lambda c: agents.forget(c, time.time() - LONG_S)):
        pass
    other.used_at = 0.0
    await lives.note_running()
    assert other.used_at > 0, "the loop goes on"
    with pytest.raises(asyncio.CancelledError):
        await turn.task
    assert turn.stopped is not None
    assert "has ended" in str(turn.stopped)
    await lives.look_again(session_ids[0])
    refused(deleted)
    with pytest.raises(RequestError, match="does not exist any more"):
        await lives.open(session_ids[0], TENANT)


LONG_S = 1_000.0


async def opened(api: Api) -> LiveSession:
    answer = await api.post("agent_sessions", {"model": BASE, "limits": {"idle_s": LONG_S / 2}})
    return await api.services.agents.live.open(answer.json()["session_id"], tenant_of_key("tml-one"))


async def create(api: Api, session_id: str, *, created_at: float, used_at: float) -> None:
    session = AgentSession(
        id=session_id,
        tenant="one",
        name="",
        model=BASE,
        base_model=BASE,
        weights=BaseWeights(),
        follows="pinned",
        limits=AgentLimits(turns=9, tokens=9, seconds=LONG_S / 2, idle_s=LONG_S / 2),
        created_at=created_at,
        used_at=used_at,
    )
    assert await api.services.agent_sessions.create(session, 10 * MAX_NAMED)


async def used_at(api: Api, live: LiveSession) -> float:
    await api.services.agent_sessions.write_uses()
    found = await api.services.agent_sessions.find(live.session.id)
    assert found is not None
    assert found.end_reason is None
    return found.used_at


@ON_BOTH_SLOWLY
async def test_a_session_is_in_use_while_its_turn_runs(api: Api) -> None:
    live = await opened(api)
    await used_at(api, live)
    live.used_at = time.time() - LONG_S
    before = time.time()
    await api.services.agents.live.note_running()
    assert await used_at(api, live) < before, "no turn runs"
    turn = RunningTurn("t1", None, tokens=1, n=1, streams=False)
    live.running.append(turn)
    await api.services.agents.live.note_running()
    live.running.remove(turn)
    assert await used_at(api, live) >= before
    assert live.used_at >= before, "the next request comes after the turn, not after its beginning"


@ON_POSTGRES
async def test_an_answer_of_another_process_counts_as_use(api: Api) -> None:
    live = await opened(api)
    await used_at(api, live)  # as another process writes it
    live.used_at = time.time() - LONG_S
    await api.services.agents.live.open(live.session.id, live.session.tenant)
    await used_at(api, live)


@ON_BOTH_SLOWLY
async def test_sessions_that_end_unasked_are_counted_once_by_reason(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    now, old = time.time(), MAX_NAMED + 3
    for number in range(old):
        await create(api, f"old{number}", created_at=now - LONG_S, used_at=now)
    await create(api, "idle", created_at=now, used_at=now - LONG_S)
    await create(api, "open", created_at=now, used_at=now)
    before = await scrape(api)
    await api.services.agents.live.end_over()  # this process has just started: for all it knows, none was idle
    monkeypatch.setattr(Continuity, "seconds", LONG_S)
    for _ in range(2):
        await api.services.agents.live.end_over()
    after = await scrape(api)
    counted = {
        name: after[name] - before[name] for name in after if name.startswith("skyrl_agent_sessions_ended_total")
    }
    by_reason = {name.partition("reason=")[2].rstrip("}"): number for name, number in counted.items() if number}
    assert by_reason == {"time": old, "idle": 1}
    left, _ = await api.services.agent_sessions.page("one", 9, 0, "open")
    assert [session.id for session, _ in left] == ["open"]
