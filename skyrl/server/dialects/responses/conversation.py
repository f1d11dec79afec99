"""The items of a Responses request, as messages of a chat.

The items of one answer (reasoning, message, calls) follow one another and are one message of the chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.server.dialects.parts import assistant_message, image_part, joined, needed, text_part, tool_call
from skyrl.server.dialects.responses.fields import Item, Part
from skyrl.server.dialects.responses.tools import ChatTools, CustomInput

OURS = "skyrl:"
"""How the `encrypted_content` of this server's reasoning items begins. The rest is the reasoning's text: clients that
keep nothing else of such an item send it back."""
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class Conversation:
    """Collects the messages. `left_out` gets a sentence for what has no effect."""

    def __init__(self, tools: ChatTools, left_out: list[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._tools = tools
        self._left_out = left_out
        self._clear()

    def _clear(self) -> None:
        self._answering = False
        self._texts: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, items: str | Sequence[Item]) -> None:
        """Raises RequestError naming the item."""
        if isinstance(items, str):
            self.messages.append({"role": "user", "content": items})
            return
        for number, item in enumerate(items):
            self._add(item, f"input[{number}]")
        self._end_answer()

    def _add(self, item: Item, place: str) -> None:
        match item.type or "message":
            case "message":
                self._message(item, place)
            case "reasoning":
                self._answering = True
                self._thinking.append(self._reasoning(item, place))
            case "function_call":
                self._call(item, needed(item.arguments, f"{place}.arguments"), place)
            case "custom_tool_call":
                given = CustomInput(needed(item.input, f"{place}.input"))
                self._call(item, msgspec.json.encode(given).decode(), place)
            case "function_call_output" | "custom_tool_call_output":
                content = _content(needed(item.output, f"{place}.output"), f"{place}.output")
                call_id = needed(item.call_id, f"{place}.call_id")
                self._tell({"role": "tool", "tool_call_id": call_id, "content": content})
            case "item_reference":
                raise RequestError("items are not kept here; send the item itself", field=f"{place}.type")
            case other:
                raise RequestError(f"an item of the type {other!r} is not supported", field=f"{place}.type")

    def _message(self, item: Item, place: str) -> None:
        role, content = needed(item.role, f"{place}.role"), needed(item.content, f"{place}.content")
        if role != "assistant":
            role = "system" if role == "developer" else role
            self._tell({"role": role, "content": _content(content, f"{place}.content")})
            return
        self._answering = True
        if isinstance(content, str):
            self._texts.append(content)
        else:
            self._texts += (_text(part, f"{place}.content[{number}]") for number, part in enumerate(content))

    def _call(self, item: Item, arguments: str, place: str) -> None:
        name = self._tools.chat_name(needed(item.name, f"{place}.name"), item.namespace)
        self._answering = True
        self._calls.append(tool_call(needed(item.call_id, f"{place}.call_id"), name, arguments))

    def _reasoning(self, item: Item, place: str) -> str:
        if item.content and not isinstance(item.content, str):
            return "".join(_text(part, f"{place}.content[{number}]") for number, part in enumerate(item.content))
        if item.encrypted_content is not None:
            if item.encrypted_content.startswith(OURS):
                return item.encrypted_content.removeprefix(OURS)
            self._left_out.append(f"{place}: reasoning that only another server can read is left out")
        parts = enumerate(item.summary or ())
        return "\n".join(_text(part, f"{place}.summary[{number}]") for number, part in parts)

    def _tell(self, message: dict[str, Any]) -> None:
        """A message that is not the assistant's."""
        self._end_answer()
        self.messages.append(message)

    def _end_answer(self) -> None:
        if self._answering:
            self.messages.append(assistant_message(self._texts, self._thinking, self._calls))
            self._clear()


def _content(content: str | Sequence[Part], place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return joined([_part(part, f"{place}[{number}]") for number, part in enumerate(content)])


def _part(part: Part, place: str) -> dict[str, Any]:
    if part.type != "input_image":
        return text_part(_text(part, place))
    uri = needed(part.image_url, f"{place}.image_url")
    if not uri.startswith("data:"):
        raise RequestError("must be a data URI: this server opens no address", field=f"{place}.image_url")
    return image_part(uri)


def _text(part: Part, place: str) -> str:
    if part.type == "refusal":
        return needed(part.refusal, f"{place}.refusal")
    if part.type not in _TEXTS:
        raise RequestError(f"a part of the type {part.type!r} cannot stand here", field=f"{place}.type")
    return needed(part.text, f"{place}.text")
