"""Small objects inside the fields of a request: options of streams, choices of tools, tool calls.

They go on to vLLM as the client wrote them. They are checked here first, because vLLM ignores an unknown key, and
writes a line to its log for each wrong element of a list.
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


class ToolCall(msgspec.Struct):
    """Part of a message. Clients repeat what an answer had, with keys of its stream such as `index`."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def check_tool_calls(value: Any, field: str) -> None:
    """Raises RequestError naming the part of `field` that is wrong."""
    try:
        msgspec.convert(value, list[ToolCall])
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise RequestError(problem, field=field + path.rstrip("`")) from error
