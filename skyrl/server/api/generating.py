"""Answers a tenant's request for text: from the checked body to a whole answer or a stream, in the caller's dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from skyrl.chat.dialects.dialect import AnswerEncoder
from skyrl.chat.openai.errors import DoesNotFit, OpenAIError
from skyrl.chat.openai.generation import CHAT, Generation, chat, model_in
from skyrl.chat.openai.service import Asked, OpenAIService
from skyrl.server.api.call import Call
from skyrl.server.api.event_stream import EventStream, gone
from skyrl.server.api.served import ServedModel
from skyrl.server.api.services import Services
from skyrl.storage.futures.entries import LARGE_BODY_BYTES

T = TypeVar("T")


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
        self, call: Call, body: bytes, check: Callable[..., Generation], speaker: AnswerEncoder
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
            return await self._answered(call, service, asked, speaker)
        except DoesNotFit:  # a server that does not cut max_tokens by itself, as vLLM does
            fitting = await service.fitting(asked) if request.path == CHAT else asked
            if fitting is asked:
                raise
        return await self._answered(call, service, fitting, speaker)

    async def _answered(self, call: Call, service: OpenAIService, asked: Asked, speaker: AnswerEncoder) -> Response:
        if asked.request.stream:
            return await self.stream(call, spoken(service.stream(asked), speaker), speaker)
        answer = await self.while_there(call, service.answer(asked))
        return Response(speaker.whole(answer), media_type="application/json")

    async def count(self, call: Call, body: bytes) -> int:
        """How many tokens the prompt of a chat has. Raises RequestError."""
        self.check_open()
        target = await self._services.openai_models.find(model_in(body), call.tenant)
        model = self._services.served[target.number]
        request = await asyncio.to_thread(chat, body, model.watch.limits())
        return await service_of(model).count(Asked(request, target, call.tenant, call.id, len(body)))

    async def while_there(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which ends if the client goes. Raises ClientGone, and what `work` raises."""
        return await self._in_flight.run(work, gone(call.request.receive))

    async def stream(self, call: Call, events: AsyncGenerator[bytes, None], speaker: AnswerEncoder) -> Response:
        """Framed events as the answer of a call."""
        deadline_s = self._services.config.forwarding_deadline_s
        return await EventStream.begin(events, speaker.failed, self._in_flight, call.request, call.id, deadline_s)


def release(call: Call) -> None:
    """Give the memory of a large body back: the request may run for minutes, and its bytes count in the admission."""
    if call.large_body is not None:
        call.large_body.release()


def service_of(model: ServedModel) -> OpenAIService:
    """The base model's, on a server that serves completions."""
    assert model.openai is not None
    return model.openai


async def spoken(chunks: AsyncGenerator[bytes, None], speaker: AnswerEncoder) -> AsyncGenerator[bytes, None]:
    """The framed events of an answer's chunks."""
    try:
        async for chunk in chunks:
            if framed := speaker.events(chunk):
                yield framed
        yield speaker.end()
    finally:
        await chunks.aclose()
