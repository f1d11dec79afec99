"""Mistral's calls with ids, `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, which Mistral-Small-3.1 and -3.2 write.

vLLM 0.32 takes all before the arguments for the name, so that no call had a name that a client knows. The id is kept: a
later prompt then names the result as the model has named its call.

vLLM loads this module in place of its own when a server has the parser `mistral`.
"""

from __future__ import annotations

from typing import Any

from vllm.parser.mistral import MistralParser, MistralToolCall
from vllm.tool_parsers.mistral_tool_parser import MistralToolParser

__all__ = ["MistralToolParser"]
_MARK = "[CALL_ID]"


def _separate(slot: Any) -> None:
    """Take the id out of the name of a call, if it is there."""
    name, _, given = slot.name.partition(_MARK)
    slot.name = name
    if not slot.id and MistralToolCall.is_valid_id(given.strip()):
        slot.id = given.strip()


def _patch() -> None:
    build, emit = MistralParser._build_extracted_result, MistralParser._emit_name_delta
    end = MistralParser._handle_tool_end

    def build_extracted_result(self: Any, *deltas: Any) -> Any:
        for slot in self._tool_slots:
            _separate(slot)
        return build(self, *deltas)

    def emit_name_delta(self: Any, idx: int, deltas: Any, name: str | None) -> None:
        _separate(self._tool_slots[idx])
        emit(self, idx, deltas, None if name is None else name.partition(_MARK)[0])

    def handle_tool_end(self: Any, event: Any, deltas: Any) -> None:
        if event.tool_index < len(self._tool_slots):
            _separate(self._tool_slots[event.tool_index])
        end(self, event, deltas)

    MistralParser._build_extracted_result = build_extracted_result
    MistralParser._emit_name_delta = emit_name_delta
    MistralParser._handle_tool_end = handle_tool_end


_patch()
