"""What agents' libraries add to requests: it neither fails a turn of a session nor forks it."""

from __future__ import annotations

from typing import Any

import pytest
from agent_world import CHAT, MESSAGES, RESPONSES, Server, user

from skyrl.chat.openai.fields import ECHOED, WITHOUT_EFFECT

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ECHO = {key: {"type": "ephemeral"} for key in ECHOED}
CACHED = {"cache_control": {"type": "ephemeral"}}


async def test_a_chat_with_every_echo_continues_the_turn_before(server: Server) -> None:
    """The hints move from one message to another, as caches' clients move them."""
    agent = await server.agent()
    top = dict.fromkeys(WITHOUT_EFFECT, "low")
    first = {"role": "user", "content": [{"type": "text", "text": "go"} | ECHO]} | ECHO
    said = await agent.say([first], tools=[TOOL | ECHO], **top)
    answered = said | ECHO
    plain = {"role": "user", "content": "go"}
    last = {"role": "user", "content": [{"type": "text", "text": "on"} | ECHO]}
    again = await agent.say([plain, answered, last], tools=[TOOL])
    await agent.say([plain, answered, last, again | ECHO, user("on")], tools=[{**TOOL, **CACHED}], **top)
    turns = (await agent.get("/turns"))["rows"]
    assert [(turn["fork"], len(turn["messages"])) for turn in turns] == [(None, 1)] * 3
    assert server.vllm.was_given


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("reasoning", {"effort": "low"}),
        ("transforms", ["middle-out"]),
        ("messages[0].prefix", None),
    ],
)
async def test_what_could_change_the_sample_is_refused_by_name_in_a_session(
    server: Server, field: str, wrong: Any
) -> None:
    agent = await server.agent()
    more = {} if wrong is None else {field: wrong}
    message = user("go") | ({"prefix": True} if wrong is None else {})
    refused = await agent.ask(CHAT, messages=[message], **more)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_the_other_dialects_with_their_echoes_continue_the_turn_before(server: Server) -> None:
    claude, codex = await server.agent(), await server.agent()
    system = [{"type": "text", "text": "Be brief.", **CACHED}]
    asked: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "go", **CACHED}]}]
    for hint in (CACHED, {}):
        answer = await claude.ask(MESSAGES, messages=asked, system=system, service_tier="auto", **hint)
        assert answer.status_code == 200, answer.text
        said = [block | {"citations": None} for block in answer.json()["content"]]
        asked = [user("go"), {"role": "assistant", "content": said}, user("on")]
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    for retention in ("24h", "in_memory"):
        answer = await codex.ask(
            RESPONSES, input=items, prompt_cache_retention=retention, text={"verbosity": "low"}, store=False
        )
        assert answer.status_code == 200, answer.text
        items = [*items, *answer.json()["output"], {"role": "user", "content": "on"}]
    for agent in (claude, codex):
        assert [turn["fork"] for turn in (await agent.get("/turns"))["rows"]] == [None, None]
