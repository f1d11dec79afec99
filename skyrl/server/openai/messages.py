"""Checks the messages of a chat: text and pictures, and no key that vLLM would ignore.

vLLM fetches images, audio and video from the addresses in a message. So only parts with text go on, and pictures that
are in the request itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.base.wire.errors import RequestError
from skyrl.server.openai.chat_pictures import PICTURE, ChatPicture, picture_in
from skyrl.server.openai.nested import checked_tool_calls, without_echoes

_KEYS = frozenset(
    {"content", "name", "reasoning", "reasoning_content", "refusal", "role", "tool_call_id", "tool_calls"}
)
_PART_KEYS = {"text": "text", "refusal": "refusal"}
"""Types of parts, and the key of each that holds its text."""
_TEXTS = ("name", "reasoning", "reasoning_content", "refusal", "tool_call_id")
TEMPLATE_KEYS = frozenset(
    {"add_generation_prompt", "continue_final_message", "conversation", "documents", "messages", "reasoning_effort"}
    | {"chat_template", "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"processor_kwargs", "self", "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation"}
)
"""Arguments that have fields of their own, or that the renderer of the template takes instead of the template."""


def checked_messages(
    messages: Sequence[dict[str, Any]], first: int = 0
) -> tuple[list[dict[str, Any]], tuple[ChatPicture, ...]]:
    """The messages without empty keys, which clients send when they repeat an answer, and their pictures, which are not
    checked yet. `first` is the number of the first of them in the request. Raises RequestError."""
    if not messages:
        raise RequestError("must hold at least one message", field="messages")
    pictures: list[ChatPicture] = []
    checked = [_checked(message, f"messages[{index}]", pictures) for index, message in enumerate(messages, first)]
    return checked, tuple(pictures)


def _checked(message: dict[str, Any], place: str, pictures: list[ChatPicture]) -> dict[str, Any]:
    """Adds the message's pictures to `pictures`."""
    given = without_echoes(message)
    kept = {key: value for key, value in given.items() if key == "content" or value not in (None, [])}
    if unknown := kept.keys() - _KEYS:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    for key in ("role", *(key for key in _TEXTS if key in kept)):
        if not isinstance(kept.get(key), str):
            raise RequestError("must be a string", field=f"{place}.{key}")
    if "tool_calls" in kept:
        kept["tool_calls"] = checked_tool_calls(kept["tool_calls"], f"{place}.tool_calls")
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = [
            _checked_part(part, f"{place}.content[{index}]", pictures) for index, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise RequestError("must be a string or a list of parts", field=f"{place}.content")
    return kept


def _checked_part(part: Any, place: str, pictures: list[ChatPicture]) -> dict[str, Any]:
    part = without_echoes(part)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == PICTURE:
        pictures.append(picture_in(part, place))
        return pictures[-1].part
    key = _PART_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise RequestError("must be 'text' or 'image_url'", field=f"{place}.type")
    if not isinstance(part.get(key), str):
        raise RequestError("must be a string", field=f"{place}.{key}")
    if unknown := part.keys() - {"type", key}:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    return part


def check_template_arguments(arguments: dict[str, Any] | None) -> None:
    """Raises RequestError for an argument that would replace the model's own template, or has a field of its own."""
    if taken := (arguments or {}).keys() & TEMPLATE_KEYS:
        raise RequestError("cannot be set here", field=f"chat_template_kwargs.{min(taken)}")
