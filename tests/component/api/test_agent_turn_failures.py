"""Turns whose answer lacks something that a trajectory needs: nothing is made up, and no turn is stored."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api
from fake_upstream import FakeUpstream, Reply, after, reply

from skyrl.base.types.agents import AgentTurn

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Who watches the river?"}]
PROMPT = [5, 6, 7]
Answer = dict[str, Any]
Damage = Callable[[Answer], object]


def answer_of(damage: Damage = lambda _: None) -> Reply:
    """Two sampled tokens, as vLLM answers a turn that it has rendered itself."""
    tokens = [{"token": f"token_id:{number}", "logprob": -0.5, "bytes": [104]} for number in (8, 9)]
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": BASE,
        "prompt_token_ids": PROMPT,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hh"},
                "logprobs": {"content": tokens},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": 2, "total_tokens": 5},
    }
    damage(body)
    return reply(200, body)


class Agent:
    def __init__(self, api: Api, made: dict[str, Any]) -> None:
        self._api = api
        self._key = made["key"]
        self._path = f"/api/v1/agent_sessions/{made['session_id']}"

    async def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": "any", "messages": MESSAGES, "max_tokens": 4} | fields
        return await self._api.http.post(CHAT, json=body, headers={"X-API-Key": self._key})

    async def turns(self) -> list[dict[str, Any]]:
        return (await self._api.http.get(f"{self._path}/turns")).json()["rows"]


async def an_agent(api: Api, **options: Any) -> Agent:
    return Agent(api, (await api.post("agent_sessions", {"model": BASE} | options)).json())


def without_finish_reason(body: Answer) -> None:
    body["choices"][0]["finish_reason"] = None


def without_a_logprob(body: Answer) -> None:
    del body["choices"][0]["logprobs"]["content"][1]["logprob"]


def with_a_token_fewer(body: Answer) -> None:
    body["choices"][0]["logprobs"]["content"].pop()


def without_usage(body: Answer) -> None:
    del body["usage"]


def with_another_prompt(body: Answer) -> None:
    body["prompt_token_ids"] = [*PROMPT, 1]


def with_experts_that_are_none(body: Answer) -> None:
    body["choices"][0]["routed_experts"] = base64.b64encode(b"no rows").decode()


DAMAGES = [
    without_finish_reason,
    without_a_logprob,
    with_a_token_fewer,
    without_usage,
    with_another_prompt,
    with_experts_that_are_none,
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_answer_that_lacks_something_is_no_turn(api: Api, upstream: FakeUpstream, damage: Damage) -> None:
    agent = await an_agent(api)
    upstream.controls[CHAT] = answer_of(damage)
    failed = await agent.ask()
    assert (failed.status_code, failed.json()["error"]["message"]) == (
        503,
        "the inference server's answer lacks tokens or logprobs",
    )
    assert await agent.turns() == []
    upstream.controls[CHAT] = answer_of()
    assert (await agent.ask()).status_code == 200
    (turn,) = await agent.turns()
    assert (turn["added_tokens"], turn["sampled_tokens"], turn["logprobs"]) == (PROMPT, [8, 9], [-0.5, -0.5])
    assert turn["finish_reason"] == "stop"


async def test_equal_requests_at_the_same_time_are_two_turns_of_one_place(api: Api, upstream: FakeUpstream) -> None:
    agent, both = await an_agent(api), asyncio.Event()
    upstream.controls[CHAT] = after(both, answer_of())
    asked = [asyncio.create_task(agent.ask()) for _ in range(2)]
    await upstream.until(lambda now: now.busy == 2)
    both.set()
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
    turns = await agent.turns()
    assert {turn["fork"] for turn in turns} == {None, "asked_again"}
    assert len({turn["id"] for turn in turns}) == 2


def with_two_choices(body: Answer) -> None:
    body["choices"] += [body["choices"][0] | {"index": 1}]
    body["usage"]["completion_tokens"] *= 2


async def test_an_end_between_two_choices_of_an_answer_leaves_both(
    api: Api, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, kept = await an_agent(api), api.services.agent_turns
    add = kept.add

    async def add_and_end(turn: AgentTurn) -> AgentTurn | None:
        stored = await add(turn)
        await api.services.agents.live.end(turn.session_id, "called")
        return stored

    monkeypatch.setattr(kept, "add", add_and_end)
    upstream.controls[CHAT] = answer_of(with_two_choices)
    answer = await agent.ask(n=2)
    assert answer.status_code == 200, "a session has all choices of an answer, or none"
    assert len(await agent.turns()) == 2
