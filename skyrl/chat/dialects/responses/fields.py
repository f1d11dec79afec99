"""The fields of a Responses request that are read, and the kinds of items that it may hold, with what becomes of each.

Other fields are accepted and have no effect, as agents expect. `KINDS` names every kind of Codex and of OpenAI's SDK;
docs/reference/agents.md shows the table, and a test compares it with both programs, so that a new kind is seen. A kind
that is not in the table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Fate = Literal["message", "answer", "result", "tools", "setting", "left out", "refused"]
"""What becomes of an item: a message of the chat, a part of the model's answer, the result of a call, more tools, a
setting of the request; or it is left out of the prompt and the header X-Skyrl-Left-Out says so; or the request is
refused."""


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A kind of call that a client runs itself: in the chat it is a call of the function `name`, whose arguments are
    the value of the item's field `arguments`."""

    name: str
    arguments: str


CLIENT_CALLS: Mapping[str, ClientCall] = {
    "local_shell_call": ClientCall("local_shell", "action"),
    "shell_call": ClientCall("shell", "action"),
    "apply_patch_call": ClientCall("apply_patch", "operation"),
    "tool_search_call": ClientCall("tool_search", "arguments"),
}
RESULTS: Mapping[str, str] = {
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "tool_search_output": "tools",
}
"""Results of calls, and the field of each that holds the result."""
LEFT_OUT: Mapping[str, str] = {
    "code_interpreter_call": "OpenAI's server ran it",
    "compaction": "only the server that wrote it can read it",
    "computer_call": "no tool of this kind is served",
    "computer_call_output": "no tool of this kind is served",
    "context_compaction": "only the server that wrote it can read it",
    "file_search_call": "OpenAI's server ran it",
    "image_generation_call": "OpenAI's server ran it",
    "mcp_approval_request": "this server connects to no MCP server",
    "mcp_approval_response": "this server connects to no MCP server",
    "mcp_call": "OpenAI's server ran it",
    "mcp_list_tools": "this server connects to no MCP server",
    "other": "the client does not know its kind",
    "program": "OpenAI's server ran it",
    "program_output": "OpenAI's server ran it",
    "web_search_call": "OpenAI's server ran it",
}
"""Kinds that have no place in a prompt here, and why."""
REFUSED: Mapping[str, str] = {
    "compaction_trigger": "this server compacts no conversations; ask the model for a summary in a message",
    "item_reference": "items are not kept here; send the item itself",
}
KINDS: Mapping[str, Fate] = {
    "message": "message",
    "agent_message": "message",
    "reasoning": "answer",
    "function_call": "answer",
    "custom_tool_call": "answer",
    **dict.fromkeys(CLIENT_CALLS, "answer"),
    **dict.fromkeys(RESULTS, "result"),
    "additional_tools": "tools",
    "configuration_update": "setting",
    **dict.fromkeys(LEFT_OUT, "left out"),
    **dict.fromkeys(REFUSED, "refused"),
}


class Part(msgspec.Struct):
    """A part of a message, of a reasoning item, or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class Grammar(msgspec.Struct):
    """The form of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class Tool(msgspec.Struct):
    """`tools` are those of a namespace, `format` is a custom tool's."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[Tool] | None = None
    format: Grammar | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class Item(msgspec.Struct):
    """What the conversation is made of. Which fields count depends on the type: see `KINDS` and `conversation`."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    author: str | None = None
    recipient: str | None = None
    arguments: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    action: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    operation: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    input: str | None = None
    output: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    reasoning: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    text: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields after `previous_response_id` have no effect or are refused; some are here for their types."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    include: list[str] | None = None
    truncation: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    top_logprobs: int | None = None


class Echo(msgspec.Struct):
    """The fields of a request that its response repeats, as the client wrote them. Their defaults are OpenAI's."""

    background: msgspec.Raw = msgspec.Raw("false")
    instructions: msgspec.Raw = msgspec.Raw("null")
    max_output_tokens: msgspec.Raw = msgspec.Raw("null")
    max_tool_calls: msgspec.Raw = msgspec.Raw("null")
    metadata: msgspec.Raw = msgspec.Raw("{}")
    parallel_tool_calls: msgspec.Raw = msgspec.Raw("true")
    previous_response_id: msgspec.Raw = msgspec.Raw("null")
    prompt_cache_key: msgspec.Raw = msgspec.Raw("null")
    reasoning: msgspec.Raw = msgspec.Raw('{"effort":null,"summary":null}')
    safety_identifier: msgspec.Raw = msgspec.Raw("null")
    store: msgspec.Raw = msgspec.Raw("true")
    temperature: msgspec.Raw = msgspec.Raw("1.0")
    text: msgspec.Raw = msgspec.Raw('{"format":{"type":"text"}}')
    tool_choice: msgspec.Raw = msgspec.Raw('"auto"')
    tools: msgspec.Raw = msgspec.Raw("[]")
    top_logprobs: msgspec.Raw = msgspec.Raw("0")
    top_p: msgspec.Raw = msgspec.Raw("1.0")
    truncation: msgspec.Raw = msgspec.Raw('"disabled"')
    user: msgspec.Raw = msgspec.Raw("null")

    def fields(self) -> dict[str, msgspec.Raw]:
        """By their names; null stands for the default."""
        defaults = Echo()
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: getattr(defaults, name) if bytes(raw) == b"null" else raw for name, raw in given}
