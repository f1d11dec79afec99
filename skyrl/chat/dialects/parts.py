"""Parts of a chat that dialects write otherwise: parts of messages, arguments of calls, the order of tools' results.

Arguments of a call are a text in chat completions, and a JSON object in other dialects. A model may write arguments
that are no JSON object, or be cut off within them. Such a text is not lost: it becomes the only value of an object, and
the text again when the client sends the object back.

A result names its call in other dialects, and agents send results in the order in which their tools ended. Many
templates show no ids, so that a model takes the first result for that of the first call: here results are sorted.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from skyrl.base.wire.errors import RequestError

NOT_AN_OBJECT = "_not_a_json_object"
"""The key of a text that is no JSON object. No tool has an argument of this name, so agents refuse the call and show
the model why."""


class _NotAnObject(msgspec.Struct, forbid_unknown_fields=True):
    text: str = msgspec.field(name=NOT_AN_OBJECT)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def as_object(text: str) -> str:
    """The arguments as the text of a JSON object. What is one stays as the model wrote it; no text stands for no
    arguments."""
    if not text.strip():
        return "{}"
    return text if is_object(text) else msgspec.json.encode(_NotAnObject(text)).decode()


def as_text(given: msgspec.Raw) -> str:
    """The arguments for a chat completion, from the JSON object that a client sent back."""
    try:
        return msgspec.json.decode(given, type=_NotAnObject).text
    except msgspec.MsgspecError:
        return bytes(given).decode()


T = TypeVar("T")


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def joined_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message. Texts alone become one text, as the inference server joins them; templates that know
    texts alone take it, too."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def needed(value: T | None, field: str) -> T:
    """Raises RequestError naming the field if there is no value."""
    if value is None:
        raise RequestError("is missing", field=field)
    return value


def assistant_message(texts: list[str], thinking: list[str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of one answer. Its texts are pieces of one text, and so is its thinking."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning := "".join(thinking):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def in_order_of_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the results right after an answer in the order of its calls. A result of no such call stays
    behind them."""
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    results: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += _sorted(results, places)
        ordered.append(message)
        calls = message.get("tool_calls") or ()
        places, results = {call["id"]: place for place, call in enumerate(calls)}, []
    return ordered + _sorted(results, places)


def _sorted(results: list[dict[str, Any]], places: dict[str, int]) -> list[dict[str, Any]]:
    return sorted(results, key=lambda result: places.get(result.get("tool_call_id", ""), len(places)))
