"""The kinds of content blocks that a Messages request may hold, and what becomes of each.

The table names every kind of Anthropic's SDK; docs/reference/agents.md shows it, and a test compares it with the SDK,
so that a new kind is seen. A kind that is not in the table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
