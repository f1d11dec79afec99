"""The exchanges of OpenAI requests: one with a whole answer, one with a stream.

An exchange fails before the first event, or it has succeeded: until then the forwarding client may send the request
again, because the caller has got nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from skyrl.base.types.requests import new_request_id
from skyrl.base.types.weights import WeightsRef
from skyrl.server.openai.answers import Used, rewritten, versions_in, with_token_names
from skyrl.server.openai.errors import code_in, impossible_shape, refusal_of
from skyrl.server.openai.events import DONE, Events
from skyrl.server.openai.fields import Sampling
from skyrl.server.openai.generation import CHAT, GENERATE, RENDERED, Generation
from skyrl.server.openai.models import Target
from skyrl.server.sampling.answer_stream import AnswerStream
from skyrl.server.sampling.completion import MalformedAnswer
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.error_messages import describe, server_failure
from skyrl.server.sampling.loaded_weights import OtherWeights, Span, check_began
from skyrl.server.sampling.transport import CONTROL_ANSWER_BYTES, Answer, CompletionTransport

EVENT_STREAM = "text/event-stream"
TOKENIZE = "/tokenize"
TOKENIZED_BYTES = 16
"""Of each token in the answer to TOKENIZE, at most."""
_TOKENIZED = frozenset({"messages", "tools", "chat_template_kwargs", *RENDERED} - {"documents"})
_ERROR_EVENT = b'{"error"'


class Transport(CompletionTransport, Protocol):
    async def open_stream(
        self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> AnswerStream: ...


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
    def __init__(self, sending: Sending, transport: Transport) -> None:
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
        head = stream.head
        if stream.status != 200 or head.content_type != EVENT_STREAM:
            body, whole = await stream.read_all(CONTROL_ANSWER_BYTES)
            return Answer(stream.status, head.content_type, body, head.retry_after_s, whole, head.worker)
        events = Events(stream, self._request.size.answer_bytes)
        events.first = await events.next()
        if is_error(events.first):
            return Answer(code_in(events.first), "application/json", events.first, worker=head.worker)
        self._versions = await self._began(events)
        self._opened = events
        return Answer(stream.status, head.content_type, b"", worker=head.worker)

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

    def __init__(self, sending: Sending, transport: Transport) -> None:
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
