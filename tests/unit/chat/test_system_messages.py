"""System messages, wherever they stand, reach the model on every template, and change nothing that was rendered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.base.types.context_limits import ContextLimits
from skyrl.chat.dialects import messages as anthropic
from skyrl.chat.dialects import responses
from skyrl.chat.openai import messages
from skyrl.chat.openai.generation import Generation, chat
from skyrl.chat.openai.messages import for_template

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
SAID = {"role": "assistant", "content": "ok"}
LIMITS = ContextLimits(base_model="m", max_context=None, vocab_size=None)


def system(content: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([user("a")], [user("a")]),
        ([system("s"), user("a")], [system("s"), user("a")]),
        ([system("s", "developer"), user("a")], [system("s"), user("a")]),
        ([system("s"), system("t", "developer"), system("u"), user("a")], [system("s\n\nt\n\nu"), user("a")]),
        ([system([text("s"), text("t")]), system("u")], [system("s\nt\n\nu")]),
        ([system("s"), system(""), user("a")], [system("s"), user("a")]),
        ([user("a"), system("s")], [user("a\n\ns")]),
        ([user("a"), system("s"), user("b"), system("t")], [user("a\n\ns"), user("b\n\nt")]),
        ([user("a"), SAID, result("r"), system("s")], [user("a"), SAID, result("r\n\ns")]),
        ([user("a"), SAID, system("s"), result("r")], [user("a"), SAID, result("s\n\nr")]),
        ([user("a"), SAID, system("s"), system("t"), user("b")], [user("a"), SAID, user("s\n\nt\n\nb")]),
        ([user("a"), SAID, system("s")], [user("a"), SAID, user("s")]),
        ([user("a"), SAID, system("s"), SAID], [user("a"), SAID, user("s"), SAID]),
        ([user([text("a"), PICTURE]), system("s")], [user([text("a"), PICTURE, text("s")])]),
        ([user([text("a"), text("b")]), system("s")], [user("a\nb\n\ns")]),
        ([user(""), system("s")], [user("s")]),
        ([result(None), system("s")], [result("s")]),
        ([system("s")], [system("s")]),
    ],
)
def test_where_a_system_message_goes(given: list[dict[str, Any]], made: list[dict[str, Any]]) -> None:
    kept = json.dumps(given)
    assert for_template(given) == made
    assert json.dumps(given) == kept, "the client's messages are the index of a session: they do not change"


def test_behind_an_answer_no_message_is_the_first_one() -> None:
    assert for_template([system("s"), user("b")], begins=False) == [user("s\n\nb")]
    assert for_template([system("s")], begins=False) == [user("s")]


def test_a_conversation_that_grows_keeps_what_was_rendered() -> None:
    whole = [system("s"), user("a"), system("t"), SAID, system("u"), user("b"), SAID, result("r"), system("v")]
    turns = [at for at, message in enumerate(whole) if message is SAID]
    for end in turns:
        before = for_template(whole[:end])
        assert for_template(whole)[: len(before)] == before
    assert for_template(whole) == [
        *for_template(whole[: turns[0] + 1]),
        *for_template(whole[turns[0] + 1 : turns[1] + 1], begins=False),
        *for_template(whole[turns[1] + 1 :], begins=False),
    ]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ([system("s"), user("a")], [user("s\n\na")]),
        ([system("s"), system("t"), user("a"), system("u")], [user("s\n\nt\n\na\n\nu")]),
        ([system("s"), SAID, user("a")], [user("s"), SAID, user("a")]),
        ([system("s")], [user("s")]),
        ([user("a")], [user("a")]),
    ],
)
def test_a_template_without_system_messages(given: list[dict[str, Any]], made: list[dict[str, Any]]) -> None:
    assert messages.without_the_role(for_template(given)) == made


def _chat(fields: dict[str, Any]) -> Generation:
    return chat(json.dumps(fields).encode(), LIMITS)


def test_each_dialect_sends_one_system_message_to_the_inference_server() -> None:
    called = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    codex = {
        "model": "m",
        "instructions": "one",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "two"}]},
            {"role": "user", "content": "a"},
            called,
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "three"}]},
        ],
    }
    used = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    claude = {
        "model": "m",
        "max_tokens": 9,
        "system": [text("one\n\ntwo")],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
            {"role": "system", "content": "three"},
        ],
    }
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        result("r"),
        system("three", "developer"),
    ]
    plain = {"model": "m", "messages": [system("one"), system("two", "developer"), user("a"), *asked]}
    sent = [
        _chat(plain),
        _chat(responses.to_chat(json.dumps(codex).encode(), None, "resp_1").chat),
        _chat(anthropic.to_chat(json.dumps(claude).encode()).chat),
        _chat(anthropic.to_count(json.dumps(claude).encode())),
    ]
    for each in sent:
        assert each.fields["messages"] == [system("one\n\ntwo"), user("a"), asked[0], result("r\n\nthree")]
    folded = sent[0].without_system_role().fields["messages"]
    assert folded == [user("one\n\ntwo\n\na"), asked[0], result("r\n\nthree")]
