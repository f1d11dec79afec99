"""The fields of a Messages request that are read. Others are accepted and have no effect, as agents expect: they send
hints for caching, billing and beta features of Anthropic's own server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


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
    """A part of a message. Which fields count depends on the type: see `conversation`."""

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
