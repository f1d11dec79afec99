"""The output items of a response: reasoning, message, and calls."""

from __future__ import annotations

from typing import Any, Literal

from skyrl.server.dialects.blocks import Block
from skyrl.server.dialects.responses.conversation import OURS
from skyrl.server.dialects.responses.tools import ChatTools, custom_input

Status = Literal["in_progress", "completed", "incomplete"]


class Items:
    """The items of one response. Their ids are made of the response's and their number."""

    def __init__(self, response_id: str, tools: ChatTools) -> None:
        self._suffix = response_id.removeprefix("resp_")
        self._tools = tools

    def is_custom(self, block: Block) -> bool:
        """Whether a block is a call of a custom tool."""
        return block.kind == "call" and self._tools.named(block.name).custom

    def id_of(self, block: Block) -> str:
        kind = {"thinking": "rs", "text": "msg", "call": "ctc" if self.is_custom(block) else "fc"}[block.kind]
        return f"{kind}_{self._suffix}_{block.number}"

    def item(self, block: Block, status: Status) -> dict[str, Any]:
        """The item of a block, empty while it is in progress."""
        begun = status != "in_progress"
        item: dict[str, Any] = {"id": self.id_of(block), "status": status}
        if block.kind == "text":
            content = [part(block, block.text)] if begun else []
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "thinking":
            content = [part(block, block.text)] if begun else []
            kept = OURS + block.text if begun else None
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": kept}
        named = self._tools.named(block.name)
        item |= {"call_id": block.call_id, "name": named.name}
        if named.namespace is not None:
            item["namespace"] = named.namespace
        if named.custom:
            return item | {"type": "custom_tool_call", "input": custom_input(block.text) if begun else ""}
        return item | {"type": "function_call", "arguments": arguments(block) if begun else ""}


def part(block: Block, text: str) -> dict[str, Any]:
    """The one part of a message or a reasoning."""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def arguments(block: Block) -> str:
    """The arguments of a call, as the model wrote them; no text stands for no arguments."""
    return block.text or "{}"
