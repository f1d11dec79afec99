"""Arguments of calls: a text in chat completions, a JSON object in other dialects.

A model may write arguments that are no JSON object, or be cut off within them. Such a text is not lost: it becomes the
only value of an object, and the text again when the client sends the object back.
"""

from __future__ import annotations

import msgspec

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
