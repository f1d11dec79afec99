"""System messages on the chat templates of released models: each text reaches the model, in all dialects, with and
without a session, and what was rendered before it stays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from skyrl.base.tiny import model_path
from skyrl.server.agents.tail import Tails
from skyrl.server.agents.template import CannotRender, ChatTemplate, prepared
from skyrl.server.dialects import messages as anthropic
from skyrl.server.dialects import responses
from skyrl.server.openai.generation import chat
from skyrl.server.sampling.job import ContextLimits
from tests.released_templates import CannotFetch, released_templates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENDS = (
    *("<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|END_OF_TURN_TOKEN|>"),
    *("[e~[", "<|assistant_end|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<seed:eos>", "<|user_end|>"),
)
"""Tokens that end an answer in one template or another."""
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
        return template.render([prepared(message) for message in sent.fields["messages"]], {}, fields.get("tools"))
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


@pytest.mark.parametrize("loop", [False, True])
def test_a_later_system_message_does_not_fork_a_session(templates: Mapping[str, ChatTemplate], loop: bool) -> None:
    fields, tried = plain(loop), 0
    at = next(at for at, message in enumerate(fields["messages"]) if message["role"] == "assistant")
    answer, new = fields["messages"][at], fields["messages"][at + 1 :]
    for name, template in templates.items():
        tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
        tokenizer.add_special_tokens([*ENDS])
        ends = frozenset(token for end in ENDS if (token := tokenizer.token_to_id(end)) is not None)
        sampled = np.array([5, tokenizer.token_to_id(ENDS[0])], np.int32)
        tails = Tails(template, tokenizer, ends)
        kept = [message for message in new if message["content"] != LATER]
        if (before := tails.tail(answer, kept, sampled, {}, loop)) is None:
            continue  # each turn of this model is rendered anew
        tail = tails.tail(answer, new, sampled, {}, loop)
        assert tail is not None, name
        assert LATER in tokenizer.decode(tail), name
        assert len(tail) > len(before), name
        tried += 1
    assert tried >= 30
