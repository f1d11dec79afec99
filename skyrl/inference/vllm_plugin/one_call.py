"""Calls of Llama 3, whose templates refuse a message with several: the first one is the answer's, the others are left
out, as vLLM does for `parallel_tool_calls` false. An agent that sent several back would get a 400 at its next turn.

vLLM also holds an answer to a grammar for that field. Here the model samples freely: the field is set after vLLM has
made the grammar.
"""

from __future__ import annotations

from typing import Any

from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser


class OneLlamaCall(Llama3JsonToolParser):
    def adjust_request(self, request: Any) -> Any:
        request.parallel_tool_calls = False
        return super().adjust_request(request)
