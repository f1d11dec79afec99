"""Turns whose answers follow a grammar: what the rows of a trajectory say of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from agent_world import Agent, Server, user
from chatting_upstream import SAMPLED

JSON = {"response_format": {"type": "json_object"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
STRICT = TOOL | {"function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]


async def two_turns(server: Server, **second: Any) -> Agent:
    """A free turn, then one with these fields."""
    agent = await server.agent()
    said = await agent.say([user("Hi")])
    await agent.say([user("Hi"), said, user("And now?")], **second)
    return agent


async def rows(agent: Agent) -> dict[str, Any]:
    return {form: (await agent.get(f"/trajectory?format={form}"))["rows"][0] for form in ("samples", "verl", "datums")}


@pytest.mark.parametrize("stream", [False, True])
async def test_constrained_tokens_are_marked_and_trained_with_the_models_own_logprobs(
    server: Server, stream: bool
) -> None:
    server.vllm.marks = [False] * SAMPLED
    agent = await server.agent()
    said = await agent.say([user("Hi")])
    server.vllm.marks = [True, False, True]
    answer = await agent.ask(
        "/v1/chat/completions", messages=[user("Hi"), said, user("And now?")], stream=stream, **JSON
    )
    assert answer.status_code == 200, answer.text
    first, second = (await agent.get("/turns"))["rows"]
    assert "constrained" not in first
    assert second["constrained"] == [1, 0, 1]
    assert "own_logprobs" not in second
    forms = await rows(agent)
    assert forms["samples"]["metadata"]["constrained"] == forms["verl"]["constrained"]
    assert forms["verl"]["constrained"][-SAMPLED:] == [1, 0, 1]
    assert sum(forms["verl"]["constrained"]) == 2
    assert forms["verl"]["response_mask"][-SAMPLED:] == [1, 1, 1]
    inputs = forms["datums"]["loss_fn_inputs"]
    assert inputs["constrained"]["data"][-SAMPLED:] == [1, 0, 1]
    assert len(inputs["constrained"]["data"]) == len(inputs["mask"]["data"])


@pytest.mark.parametrize(
    "asked",
    [
        JSON,
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [STRICT]},
    ],
    ids=["response_format", "structured_outputs", "required", "strict"],
)
async def test_without_the_plugin_a_turn_under_a_grammar_is_not_trained_and_its_row_says_so(
    server: Server, asked: dict[str, Any]
) -> None:
    agent = await two_turns(server, **asked)
    first, second = (await agent.get("/turns"))["rows"]
    assert "own_logprobs" not in first
    assert second["own_logprobs"] is False
    last = (await agent.get("/trajectory?format=verl"))["rows"][-1]
    assert last["constrained"][-SAMPLED:] == [1] * SAMPLED
    assert last["response_mask"][-SAMPLED:] == [0] * SAMPLED
    assert last["rollout_log_probs"][-SAMPLED:] == [0.0] * SAMPLED
    assert last["advantages"][-SAMPLED:] == [0.0] * SAMPLED


async def test_without_the_plugin_free_turns_are_trained(server: Server) -> None:
    agent = await two_turns(server, tools=[TOOL])
    turns = (await agent.get("/turns"))["rows"]
    assert all("own_logprobs" not in turn and "constrained" not in turn for turn in turns)
    trajectory = (await agent.get("/trajectory?format=verl"))["rows"]
    assert sum(sum(row["response_mask"]) for row in trajectory) == 2 * SAMPLED
    assert all("constrained" not in row for row in trajectory)


async def test_an_agent_that_asks_for_logprobs_sees_the_marks(server: Server) -> None:
    server.vllm.marks = [True, False, True]
    agent = await server.agent()
    answer = await agent.ask("/v1/chat/completions", messages=[user("Hi")], logprobs=True, **JSON)
    told = answer.json()["choices"][0]["logprobs"]["content"]
    assert [each.get("constrained") for each in told] == [True, None, True]
