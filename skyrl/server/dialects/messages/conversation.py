"""The messages of a Messages request, as messages of a chat.

A message of blocks becomes a message of text, its blocks joined by line feeds as the inference server joins parts; the
assistant's are joined as they are, because they are pieces of one text. A user's message with results of tools becomes
a message of the role `tool` for each. Thinking becomes `reasoning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from skyrl.base.wire.decoding import decode_part, raw_value
from skyrl.base.wire.errors import RequestError
from skyrl.server.dialects.arguments import as_text
from skyrl.server.dialects.messages.block_kinds import ADDS_TOOL, LEFT_OUT, REFUSED
from skyrl.server.dialects.messages.fields import Block, Message, Tool
from skyrl.server.dialects.parts import assistant_message, image_part, joined, needed, text_part, tool_call

BILLING = "x-anthropic-billing-header"
"""Claude Code begins its system prompt with a block that begins with this and is another one in each request. In a
prompt it would leave nothing to the prefix cache."""


def system_message(system: str | Sequence[Block], left_out: list[str]) -> dict[str, Any] | None:
    """The first message; None if nothing is left of the system prompt. Raises RequestError."""
    return _system(system, "system", left_out)


def chat_messages(messages: Sequence[Message], left_out: list[str]) -> list[dict[str, Any]]:
    """Adds a sentence to `left_out` for what has no effect. Raises RequestError naming the block."""
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        content = f"{place}.content"
        if message.role == "assistant":
            chat.append(_assistant(message.content, content, left_out))
        elif message.role == "user":
            chat += _user(message.content, content, left_out)
        elif (system := _system(message.content, content, left_out)) is not None:
            chat.append(system)
        if message.clear_at not in (None, "never"):
            left_out.append(f"{place}.clear_at: the message stays in the prompt, so that the tokens after it stay")
        if message.role == "system" and message.output_config:
            left_out.append(f"{place}.output_config: the request's own counts")
    return chat


def tools_in(messages: Sequence[Message]) -> list[tuple[str, Tool]]:
    """The tools that blocks of a conversation define, each with its place."""
    return [
        (f"messages[{index}].content[{number}].tool.definition", block.tool.definition)
        for index, message in enumerate(messages)
        for number, block in enumerate(message.content)
        if isinstance(block, Block) and block.type == ADDS_TOOL and block.tool is not None and block.tool.definition
    ]


def _shown(content: Sequence[Block], place: str, left_out: list[str]) -> Iterator[tuple[str, Block]]:
    """The blocks that the model sees, each with its place."""
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        if block.type in LEFT_OUT:
            left_out.append(f"{where}: a block of the type {block.type!r} is left out: {LEFT_OUT[block.type]}")
        elif block.type != ADDS_TOOL:  # `tools_in` reads it
            yield where, block


def _system(content: str | Sequence[Block], place: str, left_out: list[str]) -> dict[str, Any] | None:
    if not isinstance(content, str):
        texts = [_text(block, where) for where, block in _shown(content, place, left_out)]
        content = "\n".join(text for text in texts if not text.startswith(BILLING))
    return {"role": "system", "content": content} if content else None


def _assistant(content: str | Sequence[Block], place: str, left_out: list[str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in _shown(content, place, left_out):
        if block.type == "thinking":
            thinking.append(needed(block.thinking, f"{where}.thinking"))
        elif block.type == "tool_use":
            calls.append(_call(block, where))
        elif block.type == "compaction":
            texts.append(decode_part(str | None, block.content, f"{where}.content") or "")
        else:
            texts.append(_text(block, where))
    return assistant_message(texts, thinking, calls)


def _call(block: Block, place: str) -> dict[str, Any]:
    given = block.input or msgspec.Raw("{}")
    if not isinstance(raw_value(given, f"{place}.input"), dict):
        raise RequestError("must be an object", field=f"{place}.input")
    return tool_call(needed(block.id, f"{place}.id"), needed(block.name, f"{place}.name"), as_text(given))


def _user(content: str | Sequence[Block], place: str, left_out: list[str]) -> list[dict[str, Any]]:
    """The messages of one message, in the order of its blocks."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for where, block in _shown(content, place, left_out):
        if block.type != "tool_result":
            parts.append(_part(block, where))
            continue
        if parts:
            messages.append({"role": "user", "content": joined(parts)})
            parts = []
        messages.append(_result(block, where))
    if parts or not content:
        messages.append({"role": "user", "content": joined(parts)})
    return messages


def _result(block: Block, place: str) -> dict[str, Any]:
    """`is_error` has no place in a chat: agents say in the text what went wrong."""
    given = block.content if bytes(block.content) else msgspec.Raw("null")
    content = decode_part(str | list[Block] | None, given, f"{place}.content") or ""
    if not isinstance(content, str):
        content = joined([_part(part, f"{place}.content[{number}]") for number, part in enumerate(content)])
    if not content and block.is_error:
        content = "error"
    return {"role": "tool", "tool_call_id": needed(block.tool_use_id, f"{place}.tool_use_id"), "content": content}


def _part(block: Block, place: str) -> dict[str, Any]:
    if block.type == "image":
        return _image(block, place)
    if block.type == "tool_reference":  # a tool that a search has found; all tools are in the prompt anyway
        return text_part(needed(block.tool_name, f"{place}.tool_name"))
    return text_part(_text(block, place))


def _image(block: Block, place: str) -> dict[str, Any]:
    source = needed(block.source, f"{place}.source")
    if source.type != "base64":
        raise RequestError("must be 'base64': this server opens no address and keeps no files", field=f"{place}.source")
    kind = needed(source.media_type, f"{place}.source.media_type")
    data = needed(source.data, f"{place}.source.data")
    return image_part(f"data:{kind};base64,{data}")


def _text(block: Block, place: str) -> str:
    if block.type in REFUSED:
        raise RequestError(REFUSED[block.type], field=f"{place}.type")
    if block.type != "text":
        raise RequestError(f"a block of the type {block.type!r} cannot stand here", field=f"{place}.type")
    return needed(block.text, f"{place}.text")
