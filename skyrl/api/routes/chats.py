"""The routes that answer with text: OpenAI's models, completions, chat completions and Responses, vLLM's for token
ids, and Anthropic's Messages, of tenants and of agents.

`Generating` answers a request: from the checked body to a whole answer or a stream, in the caller's dialect. Each
dialect of chats is turned into a chat completion and back. An agent's request is a turn of the session that its key
belongs to (`AgentChats`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl.api.call import Body, Call, reply
from skyrl.api.error_answers import MESSAGES
from skyrl.api.routing import Routes
from skyrl.api.served import ServedModel
from skyrl.api.services import Services
from skyrl.base.types.requests import new_request_id
from skyrl.base.wire.decoding import raw_fields, raw_value
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.live_sessions import RunningTurn
from skyrl.chat.agents.planning import TurnRequest
from skyrl.chat.agents.turns import TurnRunner
from skyrl.chat.dialects import messages, responses
from skyrl.chat.dialects.dialect import AnswerEncoder, ChatEncoder, TranslatedRequest
from skyrl.chat.openai.errors import TOO_LONG_CODE, DoesNotFit, OpenAIError
from skyrl.chat.openai.fields import ChatFields, CompletionFields, GenerateFields
from skyrl.chat.openai.generation import CHAT, GENERATE, Generation, chat, completion, generate, model_in
from skyrl.chat.openai.service import Asked, ClientGone, InFlight, OpenAIService
from skyrl.runtime.processes.logs import about_request
from skyrl.storage.futures.store import LARGE_BODY_BYTES

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """`events` are framed. If the stream fails after its first event, it ends with what `failed` makes of the error. If
    the client reads too slowly, the stream ends `deadline_s` after its first event, and with it all that it holds."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[RequestError], bytes],
        in_flight: InFlight,
        deadline_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call = call
        self._events = events
        self._failed = failed
        self._in_flight = in_flight
        self._deadline_s = deadline_s
        self._first = b""

    async def begin(self) -> EventStream:
        """Wait for the first event. Raises what the events raise before it."""

        async def first() -> bytes:
            return await anext(self._events)

        try:
            self._first = await self._in_flight.run(first(), gone(self._call.request.receive))
        except BaseException:
            await self._events.aclose()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._in_flight.run(self._send_events(send), gone(receive))
                last = b""
            except ClientGone:
                return
            except TimeoutError:  # nothing more can be sent: what was sent before waits to be read
                logger.warning("a client did not read its stream in time", extra=about_request(self._call.id))
                return
            except RequestError as error:
                last = self._failed(error)
            except Exception as error:  # the answer has begun: the log has the error, and the stream its class
                logger.exception("a stream failed", extra=about_request(self._call.id))
                last = self._failed(RequestError(f"internal error: {type(error).__name__}", status=500))
            await send({"type": "http.response.body", "body": last})
        finally:
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        async with asyncio.timeout(self._deadline_s):
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for framed in self._events:
                await send({"type": "http.response.body", "body": framed, "more_body": True})


class Generating:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._in_flight = services.openai_in_flight

    def check_open(self) -> None:
        """Raises OpenAIError on a server whose engine samples, and RequestError 503 on one that stops."""
        if any(model.openai is None for model in self._services.served):
            raise OpenAIError(
                "this server samples between two turns of training (colocate_all) and serves no completions; sample "
                "with the Tinker SDK",
                status=501,
                final=True,
            )
        self._in_flight.check_open()

    async def answer(
        self, call: Call, body: bytes, check: Callable[..., Generation], encoder: AnswerEncoder
    ) -> Response:
        """The answer ends where the context does, if that is before the `max_tokens` of the request."""
        self.check_open()
        is_large = len(body) > LARGE_BODY_BYTES
        name = await asyncio.to_thread(model_in, body) if is_large else model_in(body)
        target = await self._services.openai_models.find(name, call.tenant)
        model = self._services.served[target.number]
        checked = partial(check, body, model.watch.limits(), grammars=self._services.config.openai_grammars)
        request = await asyncio.to_thread(checked) if is_large else checked()
        release(call)
        service = service_of(model)
        asked = Asked(request, target, call.tenant, call.id, len(body))
        try:
            return await self._answered(call, service, asked, encoder)
        except DoesNotFit:  # a server that does not cut max_tokens by itself, as vLLM does
            fitting = await service.fitting(asked) if request.path == CHAT else asked
            if fitting is asked:
                raise
        return await self._answered(call, service, fitting, encoder)

    async def _answered(self, call: Call, service: OpenAIService, asked: Asked, encoder: AnswerEncoder) -> Response:
        if asked.request.stream:
            return await self.stream(call, framed_events(service.stream(asked), encoder), encoder)
        answer = await self.while_there(call, service.answer(asked))
        return Response(encoder.whole(answer), media_type="application/json")

    async def count(self, call: Call, body: bytes) -> int:
        """How many tokens the prompt of a chat has. Raises RequestError."""
        self.check_open()
        target = await self._services.openai_models.find(model_in(body), call.tenant)
        model = self._services.served[target.number]
        grammars = self._services.config.openai_grammars
        request = await asyncio.to_thread(chat, body, model.watch.limits(), grammars=grammars)
        return await service_of(model).count(Asked(request, target, call.tenant, call.id, len(body)))

    async def while_there(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which ends if the client goes. Raises ClientGone, and what `work` raises."""
        return await self._in_flight.run(work, gone(call.request.receive))

    async def stream(self, call: Call, events: AsyncGenerator[bytes, None], encoder: AnswerEncoder) -> Response:
        """Framed events as the answer of a call."""
        deadline_s = self._services.config.forwarding_deadline_s
        return await EventStream(call, events, encoder.failed, self._in_flight, deadline_s).begin()


def release(call: Call) -> None:
    """Give the memory of a large body back: the request may run for minutes, and its bytes count in the admission."""
    if call.large_body is not None:
        call.large_body.release()


def service_of(model: ServedModel) -> OpenAIService:
    """The base model's, on a server that serves completions."""
    assert model.openai is not None
    return model.openai


async def framed_events(chunks: AsyncGenerator[bytes, None], encoder: AnswerEncoder) -> AsyncGenerator[bytes, None]:
    """The framed events of an answer's chunks."""
    try:
        async for chunk in chunks:
            if framed := encoder.events(chunk):
                yield framed
        yield encoder.end()
    finally:
        await chunks.aclose()


PREFIXES = ("/oai/api/v1", "/v1")


def completion_routes(services: Services) -> Routes:
    routes = Routes("openai", prefix="")
    models, generating = services.openai_models, Generating(services)

    async def list_models(call: Call) -> Response:
        """An agent's key shows the base models alone. Each base model tells what its agent sessions do."""
        agent = call.caller.agent_session is not None
        listed = models.served() if agent else await models.listed(call.tenant)
        return reply({"object": "list", "data": [await with_habits(each) for each in listed]})

    async def with_habits(model: dict[str, Any]) -> dict[str, Any]:
        number = services.served.number_of(model["id"]) if "parent" not in model else None
        if number is None or services.served[number].openai is None:
            return model
        habits = await services.agent_continuations.habits(number)
        return model | {"agent_sessions": habits.description}

    async def get_model(call: Call, model: str) -> Response:
        if call.caller.agent_session is not None:
            return reply(models.any_name(model))
        return reply(await with_habits((await models.find(model, call.tenant)).description))

    async def completions(call: Call, body: bytes) -> Response:
        return await generating.answer(call, body, completion, ChatEncoder())

    async def generate_tokens(call: Call, body: bytes) -> Response:
        """vLLM's own route for token ids."""
        return await generating.answer(call, body, generate, ChatEncoder())

    for prefix in PREFIXES:
        routes.get(f"{prefix}/models", scope="agent")(list_models)
        routes.get(f"{prefix}/models/{{model:path}}", scope="agent")(get_model)
        body = Body(CompletionFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix}/completions", scope="sample", body=body)(completions)
        body = Body(GenerateFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix.removesuffix('/v1')}{GENERATE}", scope="sample", body=body)(generate_tokens)
    return routes


RETRY_COUNT = "x-stainless-retry-count"
"""A header of the SDKs of OpenAI and Anthropic: how often they have sent this request before."""


class AgentChats:
    def __init__(self, turns: TurnRunner, generating: Generating) -> None:
        self._turns = turns
        self._generating = generating

    async def answer(self, call: Call, request: TranslatedRequest, dialect: str, size: int, turn_id: str) -> Response:
        """The answer to a turn, whole or as a stream. Raises RequestError."""
        self._generating.check_open()
        asked = _asked(call, request.chat, dialect, size, turn_id)
        release(call)
        turn = await self._turns.begin(asked)
        if request.chat.get("stream"):
            events = self._events(turn, asked, request.encoder)
            return await self._generating.stream(call, events, request.encoder)
        body = await self._generating.while_there(call, self._turns.whole(turn, asked))
        return Delivered(request.encoder.whole(body), lambda: self._turns.delivered(turn, asked))

    async def count(self, call: Call, chat: dict[str, Any], size: int) -> int:
        """How many tokens the prompt of a chat has. Raises RequestError."""
        self._generating.check_open()
        return await self._turns.count(_asked(call, chat, "messages", size, ""))

    async def history(self, call: Call, turn_id: str, field: str) -> list[dict[str, Any]]:
        """All messages up to the answer of a turn. Raises RequestError naming `field` if the session has no such
        turn."""
        found = await self._turns.history(_session_of(call), call.tenant, turn_id)
        if found is None:
            raise RequestError("no such response in this agent session", field=field, status=404)
        return found

    async def _events(
        self, turn: RunningTurn, asked: TurnRequest, encoder: AnswerEncoder
    ) -> AsyncGenerator[bytes, None]:
        async for event in framed_events(self._turns.chunks(turn, asked), encoder):
            yield event
        self._turns.delivered(turn, asked)  # the last event was taken


class Delivered(Response):
    """A whole answer. `sent` is called after it was sent."""

    def __init__(self, body: bytes, sent: Callable[[], None]) -> None:
        super().__init__(body, media_type="application/json")
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._sent()


def _session_of(call: Call) -> str:
    session_id = call.caller.agent_session
    assert session_id is not None
    return session_id


def _asked(call: Call, chat: dict[str, Any], dialect: str, size: int, turn_id: str) -> TurnRequest:
    retried = call.received.get(RETRY_COUNT, "").lstrip("0").isdecimal()
    return TurnRequest(_session_of(call), call.tenant, chat, dialect, size, call.id, retried, turn_id)


COUNT, RESPONSES = f"{MESSAGES}/count_tokens", "/v1/responses"
RESPONSE_ID = "resp_"
LEFT_OUT = "X-Skyrl-Left-Out"
"""A header of an answer: what of the request had no effect."""


async def _read(body: bytes, read: Callable[..., Any], *more: Any) -> Any:
    """`read` of a body; of a large one in a thread."""
    return await asyncio.to_thread(read, body, *more) if len(body) > LARGE_BODY_BYTES else read(body, *more)


def chat_routes(services: Services) -> Routes:
    routes = Routes("chats", prefix="")
    generating = Generating(services)
    agents = AgentChats(services.agents, generating)

    async def chat_completions(call: Call, body: bytes) -> Response:
        """The chat is rendered with the model's own template."""
        if call.caller.agent_session is None:
            return await generating.answer(call, body, chat, ChatEncoder())
        fields = await _read(body, _chat_fields)
        return await agents.answer(call, TranslatedRequest(fields, ChatEncoder()), "chat", len(body), new_request_id())

    async def anthropic_messages(call: Call, body: bytes) -> Response:
        return await answer(call, await _read(body, messages.to_chat), "messages", len(body), new_request_id())

    async def count_tokens(call: Call, body: bytes) -> Response:
        fields = await _read(body, messages.to_count)
        if call.caller.agent_session is not None:
            count = await agents.count(call, fields, len(body))
        else:
            count = await generating.count(call, msgspec.json.encode(fields))
        return reply({"input_tokens": count})

    async def openai_responses(call: Call, body: bytes) -> Response:
        before = None
        if (previous := responses.previous_response_id(body)) is not None:
            if call.caller.agent_session is None:
                raise RequestError(
                    "needs an agent session: this server keeps no responses; send all items in input",
                    field="previous_response_id",
                )
            turn = previous.removeprefix(RESPONSE_ID)
            before = await agents.history(call, turn, "previous_response_id")
        new_id = new_request_id()
        translated = await _read(body, responses.to_chat, before, RESPONSE_ID + new_id)
        try:
            return await answer(call, translated, "responses", len(body), new_id)
        except OpenAIError as error:
            if translated.chat.get("stream") and error.code == TOO_LONG_CODE:
                # Codex compacts only where a stream says so
                return Response(translated.encoder.failed(error), media_type="text/event-stream")
            raise

    async def answer(call: Call, translated: TranslatedRequest, dialect: str, size: int, turn_id: str) -> Response:
        if call.caller.agent_session is not None:
            return _noted(await agents.answer(call, translated, dialect, size, turn_id), translated)
        if translated.chat.get("stream"):
            translated.chat["stream_options"] = {"include_usage": True}
        body = msgspec.json.encode(translated.chat)
        return _noted(await generating.answer(call, body, chat, translated.encoder), translated)

    for prefix in PREFIXES:
        body = Body(ChatFields, read_as=bytes, bound="sample")
        routes.post(f"{prefix}/chat/completions", scope="agent", body=body)(chat_completions)
    body = Body(messages.MessagesRequest, read_as=bytes, bound="sample")
    routes.post(MESSAGES, scope="agent", body=body)(anthropic_messages)
    routes.post(COUNT, scope="agent", body=body)(count_tokens)
    body = Body(responses.ResponsesRequest, read_as=bytes, bound="sample")
    routes.post(RESPONSES, scope="agent", body=body)(openai_responses)
    return routes


def _chat_fields(body: bytes) -> dict[str, Any]:
    return {name: raw_value(raw, name) for name, raw in raw_fields(body).items()}


def _noted(answer: Response, translated: TranslatedRequest) -> Response:
    if translated.left_out:
        answer.headers[LEFT_OUT] = "; ".join(translated.left_out)[:1000].encode("ascii", "replace").decode()
    return answer
