"""Small objects inside the fields of a request: options of streams, choices of tools, tool calls.

They go on to vLLM as the client wrote them, but for keys that say nothing. They are checked here first, because vLLM
ignores an unknown key, and writes a line to its log for each wrong element of a list.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from skyrl.base.wire.errors import RequestError


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """OpenAI pads its events with it. No event is padded here."""


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """Part of a message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


ECHOED = frozenset(
    {"annotations", "cache_control", "extra_content", "index", "parsed", "parsed_arguments", "phase"}
    | {"prompt_cache_breakpoint", "provider_specific_fields", "reasoning_details", "thinking_blocks"}
)
"""Keys of messages, parts, calls and tools that say nothing to the model: hints to other servers' caches, and what
clients' libraries add to an answer and send back with it. They are dropped."""


def without_echoes(value: Any) -> Any:
    """A message's part, call or tool without the keys of `ECHOED`, its `function` likewise."""
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if key not in ECHOED}
    return kept | {"function": without_echoes(kept["function"])} if "function" in kept else kept


def tools_without_echoes(tools: Any) -> Any:
    """The tools of a request, which are not checked yet."""
    return [without_echoes(tool) for tool in tools] if isinstance(tools, list) else tools


def checked_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """The calls of a message, as they go on. Raises RequestError naming the part of `field` that is wrong."""
    calls = [without_echoes(call) for call in value] if isinstance(value, list) else value
    try:
        msgspec.convert(calls, list[ToolCall])
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise RequestError(problem, field=field + path.rstrip("`")) from error
    return calls
