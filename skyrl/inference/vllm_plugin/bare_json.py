"""Calls that are written as bare JSON: `{"name": "f", "arguments": {...}}`, also in a block of code.

Qwen2.5-Coder writes its calls so, though its template asks for `<tool_call>`. An operator chooses this parser. It reads
an answer that begins with such an object and names a tool of the request; all other answers are read as `hermes` reads
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import regex
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

_HEAD = regex.compile(
    r'\s*(?:```(?:json)?\s*)?[\[,]?\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FOOT = regex.compile(r"\s*\}[\s;]*(?:\][\s;]*)?(?:```\s*)?")
_JSON = json.JSONDecoder()


class _Call(NamedTuple):
    name: str
    arguments: str
    """JSON, which goes on if the call is not complete."""
    complete: bool


class _Read(NamedTuple):
    calls: list[_Call]
    rest: str | None
    """The text that is no call. None while it may become one."""


class BareJsonToolParser(Hermes2ProToolParser):
    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._is_other = False
        """The streamed answer does not begin with a call."""
        self._told: list[int] = []
        """Characters of each call's arguments in the events so far."""
        self._rest = 0
        """Characters of the rest in the events so far."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        read = _read(model_output, _names(request))
        if not read.calls or not read.calls[-1].complete:
            return super().extract_tool_calls(model_output, request)
        made = [
            ToolCall(type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in read.calls
        ]
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=made, content=(read.rest or "").strip() or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        ids = previous_token_ids, current_token_ids, delta_token_ids
        if self._is_other:
            return super().extract_tool_calls_streaming(previous_text, current_text, delta_text, *ids, request)
        read = _read(current_text, _names(request))
        ended = not delta_text  # the token that ends an answer has no text
        if not read.calls and (read.rest is not None or ended):
            self._is_other = True
            return super().extract_tool_calls_streaming("", current_text, current_text, *ids, request)
        events = [event for number, call in enumerate(read.calls) for event in self._new(number, call)]
        rest = read.rest or ""
        content, self._rest = rest[self._rest :], max(self._rest, len(rest))
        if not events and not content.strip():
            return None
        return DeltaMessage(content=content or None, tool_calls=events)

    def _new(self, number: int, call: _Call) -> list[DeltaToolCall]:
        """The events for what is new of a call."""
        events = []
        if number == len(self._told):
            self._told.append(0)
            self.prev_tool_call_arr.append({"name": call.name, "arguments": {}})
            self.streamed_args_for_tool.append("")
            function = DeltaFunctionCall(name=call.name)
            events.append(DeltaToolCall(index=number, type="function", id=make_tool_call_id(), function=function))
        if new := call.arguments[self._told[number] :]:
            self._told[number] = len(call.arguments)
            self.streamed_args_for_tool[number] = call.arguments
            self.prev_tool_call_arr[number]["arguments"] = call.arguments
            events.append(DeltaToolCall(index=number, function=DeltaFunctionCall(arguments=new)))
        return events


def _names(request: Any) -> frozenset[str]:
    return frozenset(tool.function.name for tool in request.tools or () if getattr(tool, "function", None))


def _read(text: str, names: frozenset[str]) -> _Read:
    calls: list[_Call] = []
    at = 0
    while at < len(text):
        head = _HEAD.match(text, at, partial=True)
        if head is None or (not head.partial and head["name"] not in names):
            return _Read(calls, text[at:])
        if head.partial:
            return _Read(calls, None)
        try:
            _, end = _JSON.raw_decode(text, head.end())
        except ValueError:
            return _Read([*calls, _Call(head["name"], text[head.end() :], False)], None)
        calls.append(_Call(head["name"], text[head.end() : end], True))
        foot = _FOOT.match(text, end, partial=True)
        if foot is None:
            return _Read(calls, text[end:])
        at = foot.end()
    return _Read(calls, "" if calls else None)
