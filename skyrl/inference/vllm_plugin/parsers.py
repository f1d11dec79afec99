"""Parsers that vLLM 0.32 lacks: vLLM loads this module when a server has one of them by name.

Knows vLLM's interfaces of parsers for thoughts and for calls of tools. Knows nothing of which model needs which parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
from vllm.parser.mistral import MistralParser, MistralToolCall
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
from vllm.tool_parsers.mistral_tool_parser import MistralToolParser

START, END = "<think>", "</think>"
_TAIL = 16
"""Tokens at the end of a prompt in which the mark is looked for: it may be several, and white space follows it."""


class WrittenThoughts(ReasoningParser):
    """Thoughts of models that write their own `<think>`, and may do without: LFM2.5, MiMo-VL, SmolLM3, MiniCPM5.

    vLLM's parsers for `<think>` take an answer that has no mark for thoughts. That is right where the prompt opens
    them, and loses the answer of a model that chose not to think: its `content` is null. This parser goes by the texts.
    An answer has thoughts if it begins with `<think>`, or if the prompt ends with it; all other text is content.

    Where a grammar holds, such an answer has no thoughts unless the prompt opens them: the grammar begins at the first
    token, because nobody knows beforehand whether the model will think.

    Each answer has an instance. vLLM's engine core has instances of its own, which see token ids alone.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._opened = False
        """The prompt ends with the beginning of thoughts."""
        self._told = 0
        """Characters of thoughts in the events so far."""
        self._over: bool | None = None
        """Whether the answer's thoughts have ended, or it has none. None before the first event."""

    @property
    def reasoning_start_str(self) -> str:
        return START

    @property
    def reasoning_end_str(self) -> str:
        return END

    def adjust_request(self, request: Any) -> Any:
        if START in getattr(self.model_tokenizer, "all_special_tokens", ()):
            request.skip_special_tokens = False
        return request

    def opens(self, prompt: Sequence[int]) -> bool:
        """Whether thoughts are open at the end of a prompt (token ids), which is remembered."""
        self._opened = self._end_of(prompt).endswith(START)
        return self._opened

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether a prompt (token ids) ends with closed thoughts. Earlier answers in it may have some, too."""
        self.opens(input_ids)
        return self._end_of(input_ids).endswith(END)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        if self._over is not None:
            return self._over
        end = self.vocab.get(END)
        return end in delta_ids if end is not None else END in self._end_of(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        end = self.vocab.get(END)
        return input_ids[input_ids.index(end) + 1 :] if end in input_ids else input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        thoughts, content = self._split(model_output)
        if content is None and thoughts is None:
            return None, model_output
        return thoughts, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        thoughts, content = self._split(current_text)
        self._over = content is not None
        shown = _without_part_of_end(thoughts or "") if content is None else thoughts or ""
        new, self._told = shown[self._told :], max(self._told, len(shown))
        if not new and not content:
            return None
        return DeltaMessage(reasoning=new or None, content=content or None)

    def get_streaming_fallback_content(self, text: str, request: Any) -> str | None:
        """The text of a whole answer that ended before it was clear whether it has thoughts."""
        thoughts, content = self._split(text)
        return text if thoughts is None and content is None else None

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        start, end = self.vocab.get(START), self.vocab.get(END)
        thoughts = list(token_ids[: token_ids.index(end)]) if end in token_ids else list(token_ids)
        if not self._opened and (start is None or start not in thoughts[:2]):
            return 0
        return len(thoughts) - thoughts.count(start) if start is not None else len(thoughts)

    def _split(self, text: str) -> tuple[str | None, str | None]:
        """The thoughts and the content of a text that may go on. Content is None while thoughts are open; both are None
        while it is not clear whether the text has thoughts."""
        body = text.lstrip()
        if body.startswith(START):
            body = body[len(START) :]
        elif not self._opened:
            return (None, None) if START.startswith(body) else (None, text)
        thoughts, mark, content = body.partition(END)
        return thoughts, content if mark else None

    def _end_of(self, ids: Sequence[int]) -> str:
        return self.model_tokenizer.decode(list(ids[-_TAIL:]), skip_special_tokens=False).rstrip()


def _without_part_of_end(text: str) -> str:
    """The text without what may be the first characters of the end mark."""
    for length in range(len(END) - 1, 0, -1):
        if text.endswith(END[:length]):
            return text[:-length]
    return text


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
    """Calls that are written as bare JSON: `{"name": "f", "arguments": {...}}`, also in a block of code.

    Qwen2.5-Coder writes its calls so, though its template asks for `<tool_call>`. An operator chooses this parser. It
    reads an answer that begins with such an object and names a tool of the request; all other answers are read as
    `hermes` reads them.
    """

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


class OneLlamaCall(Llama3JsonToolParser):
    """Calls of Llama 3, whose templates refuse a message with several: the first one is the answer's, the others are
    left out, as vLLM does for `parallel_tool_calls` false. An agent that sent several back would get a 400 at its next
    turn.

    vLLM also holds an answer to a grammar for that field. Here the model samples freely: the field is set after vLLM
    has made the grammar.
    """

    def adjust_request(self, request: Any) -> Any:
        request.parallel_tool_calls = False
        return super().adjust_request(request)


__all__ = ["BareJsonToolParser", "MistralToolParser", "OneLlamaCall", "WrittenThoughts"]
_MARK = "[CALL_ID]"


def _separate(slot: Any) -> None:
    """Take the id out of the name of a call, if it is there."""
    name, _, given = slot.name.partition(_MARK)
    slot.name = name
    if not slot.id and MistralToolCall.is_valid_id(given.strip()):
        slot.id = given.strip()


def _separate_ids_of_mistral() -> None:
    """Read Mistral's calls with ids, `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, which Mistral-Small-3.1 and -3.2 write.

    vLLM 0.32 takes all before the arguments for the name, so that no call had a name that a client knows. The id is
    kept: a later prompt then names the result as the model has named its call.
    """
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


_separate_ids_of_mistral()
