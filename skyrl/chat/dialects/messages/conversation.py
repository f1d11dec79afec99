"""The fields of a Messages request that are read, and its messages and tools as those of a chat.

Other fields are accepted and have no effect, as agents expect: they send hints for caching, billing and beta features
of Anthropic's own server. `KINDS` names every kind of content block of Anthropic's SDK, and what becomes of it;
docs/reference/agents.md shows the table, and a test compares it with the SDK, so that a new kind is seen. A kind that
is not in the table is refused.

A message of blocks becomes a message of text, its blocks joined by line feeds as the inference server joins parts; the
assistant's are joined as they are, because they are pieces of one text. A user's message with results of tools becomes
a message of the role `tool` for each. Thinking becomes `reasoning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from skyrl.base.wire.decoding import decode_part, raw_value
from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.parts import as_text, assistant_message, image_part, joined_parts, needed, text_part, tool_call

Fate = Literal["shown", "tools", "left out", "refused"]
"""What becomes of a block: the model sees it; it adds a tool; it is left out of the prompt and the header
X-Skyrl-Left-Out says so; or the request is refused."""

_RAN = "Anthropic's server ran it"
_NO_MCP = "this server connects to no MCP server"
LEFT_OUT: Mapping[str, str] = {
    "advisor_tool_result": _RAN,
    "bash_code_execution_tool_result": _RAN,
    "code_execution_tool_result": _RAN,
    "fallback": "there are no other models to fall back on",
    "mcp_tool_listing": _NO_MCP,
    "mcp_tool_result": _NO_MCP,
    "mcp_tool_use": _NO_MCP,
    "redacted_thinking": "only Anthropic's server can read it",
    "server_tool_use": _RAN,
    "text_editor_code_execution_tool_result": _RAN,
    "tool_removal": "the tool stays in the prompt, so that the tokens before it stay",
    "tool_search_tool_result": _RAN,
    "web_fetch_tool_result": _RAN,
    "web_search_tool_result": _RAN,
}
"""Kinds that have no place in a prompt here, and why."""
REFUSED: Mapping[str, str] = dict.fromkeys(
    ("container_upload", "document", "search_result"), "documents are not supported; send their text"
)
ADDS_TOOL = "tool_addition"
KINDS: Mapping[str, Fate] = {
    **dict.fromkeys(("text", "image", "thinking", "tool_use", "tool_result", "compaction"), "shown"),
    ADDS_TOOL: "tools",
    **dict.fromkeys(LEFT_OUT, "left out"),
    **dict.fromkeys(REFUSED, "refused"),
}


class Source(msgspec.Struct):
    """Where an image comes from."""

    type: str
    media_type: str | None = None
    data: str | None = None


class Tool(msgspec.Struct):
    """`type` is None or "custom" for the client's own tools; others are Anthropic's."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChange(msgspec.Struct):
    """The tool that a block of the type `tool_addition` names, or brings in `definition`."""

    type: str
    definition: Tool | None = None


class Block(msgspec.Struct):
    """A part of a message. Which fields count depends on the type: see `chat_messages`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: Source | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    is_error: bool | None = None
    tool: ToolChange | None = None


class Message(msgspec.Struct):
    """`clear_at` and `output_config` are those of a system message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: str | None = None
    output_config: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Counted(msgspec.Struct, kw_only=True):
    """What the prompt is made of: the body of `messages/count_tokens`."""

    model: str
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[dict[str, Any]] | None = None


class MessagesRequest(Counted, kw_only=True):
    """The body of `messages`. The fields after `stream` have no effect; they are here for their types."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    context_management: dict[str, Any] | None = None


def chat_tools(tools: Sequence[tuple[str, Tool]], left_out: list[str]) -> list[dict[str, Any]]:
    """The tools, each given with its place; a later one takes the place of an earlier one with its name. Tools that
    Anthropic's server would run, or whose schema only Anthropic's models know, are left out; `left_out` gets a sentence
    for each. Raises RequestError naming the tool."""
    chat: dict[str, dict[str, Any]] = {}
    for place, tool in tools:
        if tool.type not in (None, "custom"):
            left_out.append(f"{place}: a tool of the type {tool.type!r} is not served and left out")
            continue
        if not tool.name or tool.input_schema is None:
            raise RequestError("is missing", field=f"{place}.{'input_schema' if tool.name else 'name'}")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict:
            function["strict"] = True
        chat[tool.name] = {"type": "function", "function": function}
    return list(chat.values())


def chat_choice(choice: ToolChoice, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of the chat that say which of its `tools` must be called. Raises RequestError if there is no such
    tool."""
    if choice.type in ("any", "tool") and not tools:
        raise RequestError("asks for a call, and there is no tool that can be called", field="tool_choice")
    if not tools:
        return {}
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
    if all(tool["function"]["name"] != choice.name for tool in tools):
        raise RequestError(f"there is no tool {choice.name!r} that can be called", field="tool_choice.name")
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


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
            messages.append({"role": "user", "content": joined_parts(parts)})
            parts = []
        messages.append(_result(block, where))
    if parts or not content:
        messages.append({"role": "user", "content": joined_parts(parts)})
    return messages


def _result(block: Block, place: str) -> dict[str, Any]:
    """`is_error` has no place in a chat: agents say in the text what went wrong."""
    given = block.content if bytes(block.content) else msgspec.Raw("null")
    content = decode_part(str | list[Block] | None, given, f"{place}.content") or ""
    if not isinstance(content, str):
        content = joined_parts([_part(part, f"{place}.content[{number}]") for number, part in enumerate(content)])
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
