"""Requests of other dialects that are wrong anywhere: they are refused, and nothing else is raised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects import messages, responses

PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
TEXT = {"type": "text", "text": "a"}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT, {"type": "image", "source": PNG}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": [1]}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}]},
        {
            "role": "system",
            "content": [
                TEXT,
                {
                    "type": "tool_addition",
                    "tool": {"type": "tool_definition", "definition": {"name": "sub", "input_schema": {}}},
                },
            ],
        },
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["END"],
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "read", "namespace": "fs", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "more"}]},
        {"type": "shell_call", "call_id": "3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "3", "output": [{"stdout": "a"}]},
        {"type": "agent_message", "author": "a", "recipient": "b", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
        {"type": "web_search_call", "id": "ws"},
    ],
    "tools": [
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "s: x"}},
    ],
    "tool_choice": {"type": "custom", "name": "patch"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner),
    max_leaves=4,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every part of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in items for place in _places(part, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, request: dict[str, Any]) -> bytes:
    """The request with another value somewhere."""
    given = copy.deepcopy(request)
    *path, last = draw(st.sampled_from(_places(request)[1:]))
    part: Any = given
    for key in path:
        part = part[key]
    part[last] = draw(VALUES)
    return json.dumps(given).encode()


def to_response(body: bytes) -> Any:
    return responses.to_chat(body, None, "resp_1")


def check(convert: Callable[[bytes], Any], body: bytes) -> None:
    """A request becomes a chat that can be sent, or is refused."""
    try:
        status, chat = 200, convert(body).chat
    except RequestError as error:
        status, chat = error.status, {}
    assert status in (200, 400)
    msgspec.json.encode(chat)


@given(damaged(MESSAGES))
def test_a_damaged_messages_request_is_refused_or_becomes_a_chat(body: bytes) -> None:
    check(messages.to_chat, body)


@given(damaged(RESPONSES))
def test_a_damaged_responses_request_is_refused_or_becomes_a_chat(body: bytes) -> None:
    check(to_response, body)


def test_the_undamaged_requests_become_chats() -> None:
    assert len(messages.to_chat(json.dumps(MESSAGES).encode()).chat["messages"]) == 5
    assert len(to_response(json.dumps(RESPONSES).encode()).chat["messages"]) == 8


@pytest.mark.parametrize("convert", [messages.to_chat, to_response])
@pytest.mark.parametrize("damage", [b"\xff", b'\\ud800"', b"\x00", b"["])
def test_bytes_that_are_no_json_are_refused_wherever_they_are(convert: Callable[[bytes], Any], damage: bytes) -> None:
    for request in (MESSAGES, RESPONSES):
        whole = json.dumps(request).encode()
        for place in range(0, len(whole), 7):
            check(convert, whole[:place] + damage + whole[place:])


def test_deep_nesting_is_refused() -> None:
    deep = b"[" * 5000 + b"]" * 5000
    call = b'{"type": "tool_use", "id": "1", "name": "add", "input": {"a": ' + deep + b"}}"
    message = b'{"role": "assistant", "content": [' + call + b"]}"
    with pytest.raises(RequestError, match="nested too deeply"):
        messages.to_chat(b'{"model": "m", "max_tokens": 9, "messages": [' + message + b"]}")
    with pytest.raises(RequestError, match="nested too deeply"):
        to_response(b'{"model": "m", "input": "hi", "metadata": {"a": ' + deep + b"}}")
