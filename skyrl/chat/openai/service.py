"""OpenAI requests from their admission to their answer. A request has no row in the database: it ends with its
connection, and all requests end with the process (`InFlight`).

A request takes the same way as a sample: the gate of its base model, and the forwarding client with its failure
rules. Knows checked requests and targets; does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from skyrl.base.types.requests import new_request_id
from skyrl.base.types.weights import BaseWeights, WeightsRef
from skyrl.base.wire.errors import ErrorCategory, FailedRequest, RequestError
from skyrl.chat.openai.errors import OpenAIError, too_long
from skyrl.chat.openai.exchanges import (
    DONE,
    EventRewriter,
    PromptCount,
    Sending,
    StreamedAnswer,
    WholeAnswer,
    is_error,
    with_token_names,
)
from skyrl.chat.openai.generation import CHAT, GENERATE, Generation
from skyrl.chat.openai.messages import ChatPictures
from skyrl.chat.openai.models import Target
from skyrl.http.client import HttpClient
from skyrl.http.connection import Interrupted
from skyrl.runtime.metrics.tallies import CANCELLED, OK, SERVER_ERROR, USER_ERROR
from skyrl.runtime.processes.logs import about_request
from skyrl.runtime.tracing import current_trace
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.completion import AbortedAnswer, MalformedAnswer
from skyrl.sampling.exchanges import Exchange
from skyrl.sampling.gate import SamplingGate, Turn
from skyrl.sampling.job import FeatureGuard
from skyrl.storage.db.adapter_versions import AdapterUses

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, so nobody reads an answer."""


class InFlight:
    """Owns the tasks of the requests."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = self._ended = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], gone: Coroutine[Any, Any, None]) -> T:
        """The result of `work`. `gone` returns when the client has gone; then `work` is cancelled at once, and has
        ended when this method ends. Raises ClientGone, RequestError 503 when the process ends, and what `work` raises.
        """
        task, leaving = asyncio.create_task(work), asyncio.create_task(gone)
        self._tasks.add(task)
        if self._ended:
            task.cancel()
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            if task.cancelled():
                raise _stopping()
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            leaving.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    def check_open(self) -> None:
        """Raises RequestError 503 if the process takes no new requests."""
        if self._stopping:
            raise _stopping()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to `grace_s` until the requests have ended, then end the others."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        self._ended = True
        for task in self._tasks:
            task.cancel()


def _stopping() -> RequestError:
    return RequestError("the server is stopping; send the request again", status=503, retry_after_s=1)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A tenant's request for a model. `id` is the id of the HTTP request, `size` the bytes of its body. Requests with
    the same `prefix_key` have most of their prompts in common, as the turns of one agent session; a router sends them
    to the same replica."""

    request: Generation
    target: Target
    tenant: str
    id: str
    size: int
    prefix_key: str | None = None
    session_id = ""
    """Its usage belongs to no session."""

    @property
    def base_model(self) -> str:
        return self.target.base_model

    @property
    def weights(self) -> WeightsRef:
        return self.target.weights


class OpenAIService:
    """`has_system_role`: the base model's chat template takes system messages; `takes_documents`: and documents;
    `efforts`: of `reasoning_effort` these values alone, if there are some. `renderer_note`: how it differs from the
    cookbook's renderers."""

    def __init__(
        self,
        client: ForwardingClient,
        transport: HttpClient,
        gate: SamplingGate,
        guard: FeatureGuard,
        uses: AdapterUses,
        pictures: ChatPictures,
        *,
        has_system_role: bool = True,
        takes_documents: bool = True,
        efforts: Sequence[str] = (),
        renderer_note: str | None = None,
    ) -> None:
        self._client = client
        self._transport = transport
        self._gate = gate
        self._guard = guard
        self._uses = uses
        self._pictures = pictures
        self._has_system_role = has_system_role
        self._takes_documents = takes_documents
        self.efforts = efforts
        self._renderer_note = renderer_note
        """None once it was logged."""

    async def answer(self, asked: Asked) -> bytes:
        """The whole answer. Raises RequestError."""
        async with self._counted(), self._turn(asked) as (sending, turn):
            exchange = WholeAnswer(sending, self._transport)
            body, turn.used = await self._forward(exchange, asked)
            turn.server = exchange.server
            return body

    async def stream(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        """The chunks of the answer, as JSON. Raises RequestError: before the first chunk, or because the stream broke
        off."""
        async with self._counted(), self._turn(asked) as (sending, turn):
            exchange = StreamedAnswer(sending, self._transport)
            events = await self._forward(exchange, asked)
            turn.server = exchange.server
            span = None if (trace := current_trace.get()) is None else trace.child("stream")
            error: str | None = "the client has gone"
            request = asked.request
            rewriter = EventRewriter(
                asked.target.name,
                request.size.n,
                include_usage=request.include_usage,
                continuous_usage=request.continuous_usage,
            )
            try:
                data = events.first
                while data != DONE:
                    if is_error(data):
                        raise _broken(asked, data.decode(errors="replace"))
                    if request.path == GENERATE:
                        data = with_token_names(data)
                    if (shown := rewriter.rewrite(data)) is not None:
                        yield shown
                    data = await events.next()
                error = None
            except (Interrupted, MalformedAnswer, AbortedAnswer) as broken:
                error = type(broken).__name__
                raise _broken(asked, str(broken)) from broken
            except OpenAIError as broken:
                error = broken.code
                raise
            finally:
                if span is not None:
                    span.end({"skyrl.sampled_tokens": rewriter.used.sampled_tokens}, error)
                turn.used = rewriter.used
                events.close()

    async def count(self, asked: Asked) -> int:
        """How many tokens the prompt of a chat has, pictures left out. Raises RequestError."""
        return await self._forward(PromptCount(self._sending(asked), self._transport), asked)

    async def fitting(self, asked: Asked) -> Asked:
        """The same chat, whose answer ends at the latest where the context does. Raises RequestError."""
        request = asked.request
        wanted, context = request.size.max_tokens, request.limits.max_context
        if context is None or wanted is None or request.size.most_prompt + wanted <= context:
            return asked
        prompt = await self.count(asked)
        if prompt >= context:
            raise too_long(prompt, request.limits)
        return replace(asked, request=request.at_most(min(wanted, context - prompt)))

    def _sending(self, asked: Asked, priority: int | None = None) -> Sending:
        request = asked.request.with_effort(self.efforts)
        request = request if self._has_system_role else request.without_system_role()
        return Sending(request, asked.target, priority, asked.tenant, asked.id, asked.prefix_key)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count the request as in flight, and how it ends."""
        key, began, outcome = new_request_id(), time.perf_counter(), CANCELLED
        self._gate.ages.begin(key, began)
        try:
            yield
            outcome = OK
        except RequestError as error:
            outcome = None if error.status == 429 else SERVER_ERROR if error.status >= 500 else USER_ERROR
            raise
        except Exception:  # counted, and raised again
            outcome = SERVER_ERROR
            raise
        finally:
            self._gate.ages.end(key)
            if outcome == CANCELLED:
                self._gate.metrics.cancelled()
            elif outcome is not None:
                self._gate.metrics.ended(outcome, time.perf_counter() - began)

    @asynccontextmanager
    async def _turn(self, asked: Asked) -> AsyncIterator[tuple[Sending, Turn]]:
        """The request as it is sent, and its turn at the gate. Raises RequestError."""
        request = asked.request
        if request.scores_prompt:
            self._guard.check_prompt_logprobs()
        if self._renderer_note is not None:
            self._note_renderer(asked)
        if "documents" in request.fields and not self._takes_documents:
            raise RequestError("the model's chat template has no place for them", field="documents")
        entry = self._gate.enter(asked.tenant, asked.size)
        try:
            if request.pictures:
                request = request.with_pictures(await self._pictures.tokens(request.pictures))
            async with self._uses.using(asked.weights):
                # The id is not the request's own: clients choose that, and two tenants may choose the same.
                entry.charge(new_request_id(), request.size.most_tokens)
                async with self._gate.turn(entry, request, asked) as turn:
                    yield self._sending(replace(asked, request=request), turn.priority), turn
        except FailedRequest as error:  # its turn did not come
            raise _broken(asked, error.message) from error
        finally:
            entry.leave()

    def _note_renderer(self, asked: Asked) -> None:
        """Log once that chats of checkpoints are not rendered as the cookbook has trained them."""
        if asked.request.path == CHAT and not isinstance(asked.target.weights, BaseWeights):
            logger.warning(
                "a chat of a checkpoint of %s: if tinker-cookbook trained it, it sees other prompts here than in "
                "training, because %s (docs: Use a checkpoint from an OpenAI client)",
                asked.target.base_model,
                self._renderer_note,
            )
            self._renderer_note = None

    async def _forward(self, exchange: Exchange[T], asked: Asked) -> T:
        try:
            return await self._client.exchange(exchange)
        except FailedRequest as error:
            if error.category is ErrorCategory.USER:
                raise OpenAIError(error.message) from error
            raise _broken(asked, error.message, final=True) from error


def _broken(asked: Asked, reason: str, *, final: bool = False) -> OpenAIError:
    """The inference server's failure. The reason may hold names and addresses that only the operator may see."""
    logger.warning("an OpenAI request failed: %s", reason, extra=about_request(asked.id))
    message = (
        f"The inference server did not complete this request; the server's log says why, under request {asked.id}."
    )
    return OpenAIError(message, status=503, code="inference_failed", final=final)
