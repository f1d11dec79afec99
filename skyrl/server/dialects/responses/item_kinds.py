"""The kinds of items that a Responses request may hold, and what becomes of each.

The table names every kind of Codex and of OpenAI's SDK; docs/reference/agents.md shows it, and a test compares it
with both programs, so that a new kind is seen. A kind that is not in the table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
