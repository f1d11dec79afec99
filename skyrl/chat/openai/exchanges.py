"""The exchanges of OpenAI requests: one with a whole answer, one with a stream; and their answers as the caller's.

An exchange fails before the first event, or it has succeeded: until then the forwarding client may send the request
again, because the caller has got nothing yet. `Events` knows the frames of a stream. `rewritten` and `EventRewriter`
make the caller's answer of the inference server's: the caller's name for the model, and no field of the server's own.
They read the token counts for usage.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.base.types.requests import new_request_id
from skyrl.base.types.weights import WeightsRef
from skyrl.chat.openai.errors import code_in, impossible_shape, refusal_of
from skyrl.chat.openai.fields import Sampling
from skyrl.chat.openai.generation import CHAT, GENERATE, RENDERED, Generation
from skyrl.chat.openai.models import Target
from skyrl.http.answers import Answer
from skyrl.http.client import CONTROL_ANSWER_BYTES, AnswerStream, HttpClient
from skyrl.http.connection import Interrupted
from skyrl.sampling.completion import STOP_TOKEN, AbortedAnswer, AnswerUsage, MalformedAnswer
from skyrl.sampling.metrics import Used
from skyrl.sampling.servers import (
    NOT_TOLD,
    Endpoint,
    OtherWeights,
    Span,
    check_began,
    describe,
    server_failure,
    spans_in,
)

DONE = b"[DONE]"
"""The last event of a complete stream."""
_PREFIX, _END = b"data:", b"\n\n"


def event_frame(data: bytes) -> bytes:
    """The frame of an event for the caller."""
    return b"data: " + data + b"\n\n"


class Events:
    """Reads the events of an answer, at most `max_bytes` of them. `first` is the data of the first event."""

    first: bytes

    def __init__(self, stream: AnswerStream, max_bytes: int) -> None:
        self._stream = stream
        self._unread: deque[bytes] = deque()
        self._left = max_bytes
        self._buffer = bytearray()
        self._searched = 0

    async def next(self) -> bytes:
        """The data of the next event, DONE at the end. Raises Interrupted if the answer breaks off before its end."""
        if self._unread:
            return self._unread.popleft()
        while True:
            end = self._buffer.find(_END, self._searched)
            if end >= 0:
                frame = bytes(self._buffer[:end])
                del self._buffer[: end + len(_END)]
                self._searched = 0
                if frame.startswith(_PREFIX):  # else it is a comment
                    return frame[len(_PREFIX) :].strip()
                continue
            self._searched = max(0, len(self._buffer) - 1)
            piece = await self._stream.read()
            if not piece:
                raise Interrupted("the stream ended before its last event")
            self._left -= len(piece)
            if self._left < 0:
                raise Interrupted("the stream is larger than any right answer to this request")
            self._buffer += piece

    def unread(self, events: Iterable[bytes]) -> None:
        """`next` returns these events again, before all others."""
        self._unread.extend(events)

    def close(self) -> None:
        """End the connection; the inference server stops computing."""
        self._stream.close()


SHOWN = frozenset(
    {"choices", "created", "id", "object", "output_mode", "prompt_logprobs", "prompt_text", "prompt_token_ids"}
    | {"request_id", "service_tier", "system_fingerprint", "usage"}
)
"""Fields of an answer that go on to the caller, beside `model`."""
_TOKEN_ID = re.compile(rb'\{\s*"token_id"\s*:\s*(\d+)')
"""The beginning of a logprob in an answer to `generate`. No text in JSON has it: there a quote has a backslash."""
_FINISHED = frozenset({None, "function_call", "length", "stop", STOP_TOKEN, "tool_calls"})

_encode = msgspec.json.Encoder().encode


class _AssistantDelta(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    """`message` is a whole answer's, `delta` an event's."""

    index: int = 0
    finish_reason: str | None = None
    weight_versions: msgspec.Raw = NOT_TOLD
    message: _AssistantDelta | None = None
    delta: _AssistantDelta | None = None

    @property
    def calls(self) -> bool:
        """Whether it has a call of a tool, or a part of one."""
        return any(said is not None and bool(said.tool_calls) for said in (self.message, self.delta))


class _Seen(msgspec.Struct):
    """What the server reads of an answer or an event."""

    choices: list[_Choice]
    usage: AnswerUsage | None = None


_CALLED = "tool_calls"
_choices = msgspec.json.Decoder(list[dict[str, Any]]).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_seen = msgspec.json.Decoder(_Seen).decode


def _read(content: bytes) -> tuple[dict[str, Any], _Seen]:
    """The shown fields, undecoded, and what the server reads. Raises MalformedAnswer and AbortedAnswer."""
    try:
        fields, seen = _fields(content), _seen(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"not a completion: {error}") from error
    for choice in seen.choices:
        if choice.finish_reason not in _FINISHED:
            raise AbortedAnswer(f"finish_reason {choice.finish_reason!r}")
    return {name: value for name, value in fields.items() if name in SHOWN}, seen


def with_token_names(content: bytes) -> bytes:
    """An answer to `generate` or an event of it, whose logprobs also have the name of their token, `token_id:7`. vLLM
    has told the id alone since 0.32; the package `renderers` (0.1.12), which verifiers uses, reads the name."""
    return _TOKEN_ID.sub(rb'{"token":"token_id:\1","token_id":\1', content)


def _tell_stops(fields: dict[str, Any], seen: _Seen, called: Collection[int]) -> None:
    """Change the finish reasons of choices that have stopped, and say something else: a word that OpenAI's clients do
    not know; or a call, which vLLM says of each answer that had to call a tool, also where it ended within its
    thoughts. `called` are the indices of choices that had a call earlier."""
    stopped = [
        choice.finish_reason == STOP_TOKEN
        or (choice.finish_reason == _CALLED and not choice.calls and choice.index not in called)
        for choice in seen.choices
    ]
    if any(stopped):
        fields["choices"] = [
            choice | {"finish_reason": "stop"} if has_stopped else choice
            for choice, has_stopped in zip(_choices(fields["choices"]), stopped, strict=True)
        ]


def rewritten(content: bytes, model: str, version: str | None = None) -> tuple[bytes, Used]:
    """A whole answer for the caller, and what it used. Raises MalformedAnswer, AbortedAnswer, and OtherWeights if it
    did not begin with the weights `version`."""
    fields, seen = _read(content)
    if version is not None:
        check_began((spans_in(choice.weight_versions) for choice in seen.choices), version)
    _tell_stops(fields, seen, ())
    used = (seen.usage or AnswerUsage()).used()
    used.samples, used.truncated = len(seen.choices), _truncated(seen.choices)
    return _encode(fields | {"model": model}), used


def _truncated(choices: Sequence[_Choice]) -> int:
    return sum(choice.finish_reason == "length" for choice in choices)


def versions_in(event: bytes) -> list[list[Span] | None]:
    """What an event of a stream tells of the weights that have begun its choices. Raises MalformedAnswer,
    AbortedAnswer."""
    return [spans_in(choice.weight_versions) for choice in _read(event)[1].choices]


class EventRewriter:
    """Rewrites the events of one stream. Every event of the server has the usage of its choice so far, and the last
    one has the whole usage. The caller gets the usage only where it asked for it."""

    def __init__(self, model: str, n: int, *, include_usage: bool, continuous_usage: bool) -> None:
        self._model = model
        self._n = n
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._prompts: dict[int, int] = {}
        self._choices: dict[int, int] = {}
        self._total: Used | None = None
        self._called: set[int] = set()
        """The choices that have called a tool."""
        self._finished = self._truncated = 0

    @property
    def used(self) -> Used:
        """What the stream has used so far. Cached tokens are known at its end."""
        used = self._total or Used(sum(self._prompts.values()), 0, sum(self._choices.values()))
        used.samples, used.truncated = self._finished, self._truncated
        return used

    def rewrite(self, event: bytes) -> bytes | None:
        """The event for the caller, None if the caller did not ask for it. Raises MalformedAnswer, AbortedAnswer."""
        fields, seen = _read(event)
        if not seen.choices:
            if seen.usage is not None:
                self._total = seen.usage.used()
            return _encode(fields | {"model": self._model}) if self._include_usage else None
        self._called.update(choice.index for choice in seen.choices if choice.calls)
        self._finished += sum(choice.finish_reason is not None for choice in seen.choices)
        self._truncated += _truncated(seen.choices)
        _tell_stops(fields, seen, self._called)
        if seen.usage is not None:
            used = seen.usage.used()
            for choice in seen.choices:
                self._prompts[choice.index // self._n] = used.prompt_tokens
                self._choices[choice.index] = used.sampled_tokens
            if not self._continuous_usage:
                del fields["usage"]
        return _encode(fields | {"model": self._model})


EVENT_STREAM = "text/event-stream"
TOKENIZE = "/tokenize"
TOKENIZED_BYTES = 16
"""Of each token in the answer to TOKENIZE, at most."""
_TOKENIZED = frozenset({"messages", "tools", "chat_template_kwargs", *RENDERED} - {"documents"})
_ERROR_EVENT = b'{"error"'


@dataclass(frozen=True)
class Sending:
    """What is sent: a request for a model, with its priority, for a tenant, under an id that the inference server
    puts into its own id of the request. `prefix_key` is explained at `Asked`."""

    request: Generation
    target: Target
    priority: int | None
    tenant: str
    id: str
    prefix_key: str | None = None


class _Exchange:
    def __init__(self, sending: Sending, transport: HttpClient) -> None:
        self._request = sending.request
        self._target = sending.target
        self._transport = transport
        self._body = sending.request.body(sending.target.served_name, sending.priority)
        self.headers: Mapping[str, str] = {"X-Request-Id": sending.id}
        self.key = sending.prefix_key or sending.id
        self.request_id = new_request_id()
        """Not the caller's id: two callers may choose the same."""
        self.shared_key = sending.prefix_key or f"{sending.tenant}:{sending.target.served_name}"
        self.server: str | None = None
        """The replica that has answered, if a router has named it."""

    @property
    def weights(self) -> WeightsRef:
        return self._target.weights

    @property
    def operation(self) -> str:
        return "chat" if self._request.path == CHAT else "text_completion"

    def refusal(self, answer: Answer) -> Exception:
        request, target = self._request, self._target
        refusal = refusal_of(
            answer, target.served_name, target.name, request.limits, request.prompt_field, request.size.max_tokens
        )
        if request.path == GENERATE and refusal.field in Sampling.__struct_fields__:
            refusal.field = f"sampling_params.{refusal.field}"
        return refusal

    def failure(self, answer: Answer) -> Exception:
        """vLLM fails where none of the model's tokens has the shape that the answer must have."""
        if answer.status == 500 and self._request.shape is not None:
            return impossible_shape(self._request.shape)
        return server_failure(describe(answer))


class WholeAnswer(_Exchange):
    """Reads the answer as it goes to the caller, and what it used."""

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        url, most = endpoint.url + self._request.path, self._request.size.answer_bytes
        return await self._transport.post(url, self._body, headers, timeout_s, most)

    async def read(self, answer: Answer) -> tuple[bytes, Used]:
        self.server = answer.worker
        if not answer.whole:
            raise server_failure(f"the inference server's answer is larger than any right answer; {describe(answer)}")
        try:
            body = with_token_names(answer.body) if self._request.path == GENERATE else answer.body
            return rewritten(body, self._target.name, self._target.version)
        except MalformedAnswer as error:
            raise server_failure(f"{error}; {describe(answer)}") from error


class StreamedAnswer(_Exchange):
    """Reads the events. If the first event is an error, the exchange has failed as if that were the answer."""

    _opened: Events | None = None
    _versions: Sequence[list[Span] | None] = ()

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        url = endpoint.url + self._request.path
        stream = await self._transport.open_stream(url, self._body, headers, timeout_s)
        self._opened = None
        try:
            return await self._begin(stream)
        finally:
            if self._opened is None:
                stream.close()

    async def _begin(self, stream: AnswerStream) -> Answer:
        if stream.status != 200 or stream.content_type != EVENT_STREAM:
            body, whole = await stream.read_all(CONTROL_ANSWER_BYTES)
            return Answer(stream.status, body, stream.headers, whole)
        events = Events(stream, self._request.size.answer_bytes)
        events.first = await events.next()
        if is_error(events.first):
            return Answer(
                code_in(events.first), events.first, [(b"content-type", b"application/json"), *stream.headers]
            )
        self._versions = await self._began(events)
        self._opened = events
        return Answer(stream.status, b"", stream.headers)

    async def _began(self, events: Events) -> list[list[Span] | None]:
        """Read until an event tells which weights have begun the answer: before that the caller gets nothing."""
        if self._target.version is None:
            return []
        read: list[bytes] = []
        event, found = events.first, []
        while event != DONE and not is_error(event):
            if any(found := versions_in(event)):
                break
            event = await events.next()
            read.append(event)
        events.unread(read)
        return found

    async def read(self, answer: Answer) -> Events:
        self.server, events = answer.worker, self._opened
        if events is None:
            raise server_failure(f"the inference server sent no stream; {describe(answer)}")
        if self._target.version is not None:
            try:
                check_began(self._versions, self._target.version)
            except OtherWeights:
                events.close()
                raise
        return events


class PromptCount(_Exchange):
    """Counts the tokens that the inference server makes of the messages of a chat."""

    def __init__(self, sending: Sending, transport: HttpClient) -> None:
        super().__init__(sending, transport)
        fields = {name: value for name, value in sending.request.fields.items() if name in _TOKENIZED}
        self._body = msgspec.json.encode(fields | {"model": sending.target.served_name})

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        most = CONTROL_ANSWER_BYTES + TOKENIZED_BYTES * self._request.size.most_prompt
        return await self._transport.post(endpoint.url + TOKENIZE, self._body, headers, timeout_s, most)

    async def read(self, answer: Answer) -> int:
        try:
            return msgspec.json.decode(answer.body, type=_Tokenized).count
        except msgspec.DecodeError as error:
            raise server_failure(f"not a count of tokens: {error}; {describe(answer)}") from error


class _Tokenized(msgspec.Struct):
    count: int


def is_error(event: bytes) -> bool:
    return event.startswith(_ERROR_EVENT)
