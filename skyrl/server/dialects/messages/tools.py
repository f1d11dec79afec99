"""The tools of a Messages request, as tools of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl.base.wire.errors import RequestError
from skyrl.server.dialects.messages.fields import Tool, ToolChoice


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
