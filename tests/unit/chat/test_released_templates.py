"""System messages on the chat templates of released models: each text reaches the model, in all dialects, with and
without a session, and what was rendered before it stays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from skyrl.base.types.context_limits import ContextLimits
from skyrl.chat.agents.rendering.renderer import CannotRender, ChatTemplate, Setting
from skyrl.chat.dialects import messages as anthropic
from skyrl.chat.dialects import responses
from skyrl.chat.openai.generation import chat
from tests.released_templates import CannotFetch, released_templates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CALL_ID = "call00000"
"""Of the length that Mistral's templates want."""
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}, "required": []}}
FIRST, SECOND, LATER = "Be a sailor.", "Speak of boats.", "It is noon now."
ASKED, AGAIN, RESULT = "How many?", "And today?", "seven boats"
LIMITS = ContextLimits()


@pytest.fixture(scope="module")
def templates() -> Mapping[str, ChatTemplate]:
    try:
        directory = released_templates()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")
    return {file.stem: ChatTemplate(file.read_text(), SPECIAL) for file in sorted(directory.glob("*.jinja"))}


def codex(loop: bool) -> dict[str, Any]:
    def said(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    called = {"type": "function_call", "call_id": CALL_ID, "name": "look", "arguments": "{}"}
    turn = (
        [called, {"type": "function_call_output", "call_id": CALL_ID, "output": RESULT}, said("developer", LATER)]
        if loop
        else [said("assistant", "Two."), said("developer", LATER), said("user", AGAIN)]
    )
    tools = {"tools": [{"type": "function", **TOOL}]} if loop else {}
    first = [said("developer", SECOND), said("user", ASKED)]
    return {"model": "m", "instructions": FIRST, "input": [*first, *turn], **tools}


def claude(loop: bool) -> dict[str, Any]:
    call = {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {}}
    noon = {"role": "system", "content": LATER}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL_ID, "content": RESULT}]}
    turn = (
        [{"role": "assistant", "content": [call]}, result, noon]
        if loop
        else [{"role": "assistant", "content": "Two."}, noon, {"role": "user", "content": AGAIN}]
    )
    tool = {"name": "look", "description": "Looks.", "input_schema": TOOL["parameters"]}
    tools = {"tools": [tool]} if loop else {}
    first = [{"role": "user", "content": ASKED}, {"role": "system", "content": SECOND}]
    return {"model": "m", "max_tokens": 9, "system": FIRST, "messages": [*first, *turn], **tools}


def plain(loop: bool) -> dict[str, Any]:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    noon = {"role": "system", "content": LATER}
    turn = (
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL_ID, "content": RESULT},
            noon,
        ]
        if loop
        else [{"role": "assistant", "content": "Two."}, noon, {"role": "user", "content": AGAIN}]
    )
    head = [{"role": "system", "content": FIRST}, {"role": "developer", "content": SECOND}]
    tools = {"tools": [{"type": "function", "function": TOOL}]} if loop else {}
    return {"model": "m", "messages": [*head, {"role": "user", "content": ASKED}, *turn], **tools}


DIALECTS = {
    "chat": plain,
    "responses": lambda loop: responses.to_chat(json.dumps(codex(loop)).encode(), None, "resp_1").chat,
    "messages": lambda loop: anthropic.to_chat(json.dumps(claude(loop)).encode()).chat,
}


def rendered(template: ChatTemplate, fields: Mapping[str, Any]) -> str | None:
    """The prompt of a chat, from the messages that go to the inference server. None if the template refuses them."""
    request = chat(json.dumps(fields).encode(), LIMITS)
    sent = request if template.has_system_role else request.without_system_role()
    try:
        return template.render(sent.fields["messages"], Setting(tools=fields.get("tools")))
    except CannotRender:
        return None


def without_later(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = [message for message in fields["messages"] if LATER not in str(message["content"])]
    return {**fields, "messages": kept}


def first_turn(fields: Mapping[str, Any]) -> dict[str, Any]:
    messages = fields["messages"]
    end = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return {**fields, "messages": messages[:end]}


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("loop", [False, True])
def test_all_system_messages_reach_the_model(templates: Mapping[str, ChatTemplate], dialect: str, loop: bool) -> None:
    fields, tried = DIALECTS[dialect](loop), 0
    for name, template in templates.items():
        control = without_later(fields)
        plain = rendered(template, control)
        if plain is None or (loop and RESULT not in plain):
            continue  # the template knows no tools, or needs an argument of its own
        whole = rendered(template, fields)
        assert whole is not None, name
        assert [text for text in (FIRST, SECOND, ASKED, LATER) if whole.count(text) != 1] == [], (name, whole)
        begun = rendered(template, first_turn(fields))
        began = rendered(template, first_turn(control))
        assert begun is not None, name
        assert began is not None, name
        assert whole.startswith(begun) == plain.startswith(began), name
        tried += 1
    assert tried >= (55 if loop else 60)


def test_the_templates_without_a_system_message_that_stays(templates: Mapping[str, ChatTemplate]) -> None:
    assert [name for name, template in templates.items() if not template.has_system_role] == [
        "google-gemma-2-2b-it",
        "mistralai-Mistral-Nemo-Instruct-2407",
    ]
