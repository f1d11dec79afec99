"""Parts of messages of a chat, which the dialects have under other names."""

from __future__ import annotations

from typing import Any, TypeVar

from skyrl.base.wire.errors import RequestError

T = TypeVar("T")


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
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
