"""Requests of agents that are not well formed: each gets a 400 that names its field, also where it continues an earlier
turn, whose tail is made of the new messages; and what is well formed is stored."""

from __future__ import annotations

from typing import Any

import pytest
from agent_world import CHAT, RESPONSES, Agent, Server, user

from skyrl.api.routes.chats import RETRY_COUNT

NOON = {"role": "system", "content": "It is noon."}


@pytest.fixture
async def agent(server: Server) -> Agent:
    return await server.agent()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"content": "no role"}, "messages[3].role"),
        ({"role": ["user"], "content": "x"}, "messages[3].role"),
        ({"role": "user", "content": 5}, "messages[3].content"),
        ({"role": "user", "content": ["x"]}, "messages[3].content[0].type"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[3].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[3].content[0].text"),
        ({"role": "system", "content": {"a": 1}}, "messages[3].content"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": "add"}]}, "messages[3].tool_calls[0]"),
        ({"role": "user", "content": "x", "prefix": True}, "messages[3].prefix"),
    ],
)
async def test_a_message_behind_an_earlier_turn_is_named_by_its_number(
    agent: Agent, wrong: dict[str, Any], field: str
) -> None:
    begun = [user("go"), await agent.say([user("go")])]
    for messages in ([*begun, NOON, wrong], [*begun, user("on"), wrong, NOON]):
        refused = await agent.ask(CHAT, messages=messages)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith(field)
    assert len((await agent.get("/turns"))["rows"]) == 1


async def test_a_tool_with_an_integer_of_more_than_64_bits_is_stored_and_continued(
    server: Server, agent: Agent
) -> None:
    most = {"type": "object", "properties": {"n": {"type": "integer", "exclusiveMaximum": 2**64}}}
    tools = [{"type": "function", "function": {"name": "count", "parameters": most}}]
    begun = [user("go"), await agent.say([user("go")], tools=tools)]
    await agent.say([*begun, user("on")], tools=tools)
    assert server.vllm.was_given, "the second turn continues the first one"
    assert (await agent.get("/turns"))["rows"][0]["setting"] == {"tools": tools}


@pytest.mark.parametrize("count", ["\u00b2", "9" * 5000, "-1", "x", ""])
async def test_a_count_of_tries_that_is_no_number_fails_no_turn(agent: Agent, count: str) -> None:
    headers = {"Authorization": f"Bearer {agent.key}", RETRY_COUNT: count.encode("latin-1")}
    answer = await agent.http.post(CHAT, json={"messages": [user("go")]}, headers=headers)
    assert answer.status_code == 200, answer.text


async def test_a_response_continues_a_chat_with_a_result_that_names_no_call(agent: Agent) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    await agent.say([user("go"), called, {"role": "tool", "content": "3"}])
    [turn] = (await agent.get("/turns"))["rows"]
    answer = await agent.ask(RESPONSES, input="on", previous_response_id=f"resp_{turn['id']}")
    assert answer.status_code == 200, answer.text
    assert (await agent.get("/turns"))["rows"][1]["parent"] == turn["id"]
