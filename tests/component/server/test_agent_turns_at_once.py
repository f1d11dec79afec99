"""Many turns of agents at once, over HTTP: branches of one session, and streams that their clients leave half-way."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_world import CHAT, Agent, Server, agent_server, user
from api_harness import Serve
from chatting_upstream import SAMPLED
from fake_upstream import FakeUpstream
from router_world import until

from skyrl.storage.db.database import Database

BRANCHES, LIMIT = 100, 20
STREAMS = 100
TASK = [user("Who watches the river?")]


@pytest.fixture
async def server(serve: Serve, database: Database, upstream: FakeUpstream, tmp_path: Path) -> AsyncIterator[Server]:
    async with agent_server(serve, database, upstream, tmp_path / "model") as server:
        yield server


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
    offset: int | None = 0
    while offset is not None:
        page = await agent.get(f"{path}{'&' if '?' in path else '?'}offset={offset}")
        rows += page["rows"]
        offset = page["next_offset"]
    return rows
