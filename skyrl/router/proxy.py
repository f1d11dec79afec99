"""Sends a request to one worker and passes the answer back, byte for byte, as it comes.

The hot path of the router. Knows ASGI and workers. Does not know what the bodies mean, except the name of an adapter
where the policy wants it; has no routes of its own. A request is sent to another worker only if the first cannot have
accepted it: docs/decisions/router.md says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from skyrl.http.answers import WORKER_HEADER
from skyrl.http.client import AnswerStream, HttpClient, head_of
from skyrl.http.connection import HeaderList, Interrupted, NotAccepted, address_of
from skyrl.http.forward import RequestHead, check_headers, check_target, pass_back, passed_on
from skyrl.http.messages import Body, BodyTooLarge, ClientLeft, Receive, Scope, Send
from skyrl.router.messages import BUSY, INTERRUPTED, NO_WORKER, refusal
from skyrl.router.policies import RequestFacts
from skyrl.router.pool import Slots, TooManyWaiting, WorkerPool
from skyrl.router.worker import Worker

logger = logging.getLogger(__name__)

COLLECTED_BYTES = 2**20
"""Bodies up to this size are collected before a worker is chosen; larger ones are passed on as they come."""
MAX_TRIES = 8
CONNECT_S = 5.0

_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
CHOSEN = "skyrl.router.worker"
"""The key in the scope of a worker that was chosen before. A policy must choose once per request: with two turns for
each request, a round robin over two workers would always use the same one."""


class Truncated(Exception):
    """The answer broke off after its beginning had been sent. The client's connection must be closed."""


class _Named(msgspec.Struct):
    """The part of a body that names an adapter: `model` in vLLM's routes, `lora_path` in SGLang's."""

    model: str | None = None
    lora_path: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode
_BEGINS_WITH_MODEL = re.compile(rb'\s*\{\s*"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_VLLMS = ("/v1/", "/inference/v1/")
"""Where the paths of vLLM's own routes for samples begin. SGLang's have no such beginning."""


@dataclass(frozen=True)
class Limits:
    """`running`: requests at workers at once. `waiting`: requests that wait for a slot. `body_bytes`: one body.
    `change_s`: how long a request waits while the weights of all workers are changed."""

    running: int = 4096
    waiting: int = 16_384
    body_bytes: int = 64 * 2**20
    change_s: float = 600.0


def is_vllms(path: str) -> bool:
    """Whether a worker with two addresses takes this path at its `completions_url`."""
    return path.startswith(_VLLMS)


class Proxy:
    """An ASGI application. `base_models` are names in `model` that are no adapters. With `names_workers` answers have
    the header WORKER_HEADER."""

    def __init__(
        self,
        pool: WorkerPool,
        limits: Limits,
        counts: Counter[str],
        base_models: Collection[str] = (),
        *,
        names_workers: bool = False,
    ) -> None:
        self.pool = pool
        self.client = HttpClient(connect_s=CONNECT_S)
        self.limits = limits
        self.slots = Slots(limits.running, limits.waiting)
        self._uses_adapter = pool.policy.uses_adapter
        self._base_models = frozenset(base_models)
        self._names_workers = names_workers
        self.counts = counts

    def answer_headers(self, worker: Worker, status: int, headers: HeaderList) -> HeaderList:
        """The headers of a worker's answer that go on to the client."""
        return [*passed_on(status, headers), *self.name_of(worker)]

    def name_of(self, worker: Worker) -> HeaderList:
        """The header that names a worker; none if workers are not named."""
        return [(WORKER_HEADER, worker.url.encode())] if self._names_workers else []

    def interrupt(self, worker: Worker, reason: str) -> None:
        """Break all exchanges with a worker that does not answer any more. Their clients get 502."""
        for connection in list(worker.exchanges):
            connection.abort(reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientLeft, Truncated when the worker breaks off in the middle of its answer, and BadHead."""
        if not self.slots.try_acquire():
            try:
                await self.slots.acquire()
            except TooManyWaiting:
                self.counts["refused_busy"] += 1
                await refusal(503, BUSY, f"{self.limits.waiting} requests wait already").send(send)
                return
        try:
            await self._forward(scope, receive, send)
        except BodyTooLarge:
            self.counts["refused_body"] += 1
            await refusal(413, "body_too_large", f"a body may have {self.limits.body_bytes} bytes").send(send)
        except ClientLeft:
            self.counts["client_left"] += 1
            raise
        finally:
            self.slots.release()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises BodyTooLarge, and as `__call__`."""
        method, path, query = scope["method"], scope["path"], scope["query_string"]
        raw_path = scope.get("raw_path") or path.encode()
        target = b"%s?%s" % (raw_path, query) if query else raw_path
        check_headers(scope["headers"])
        check_target(method, target)
        head = RequestHead.of(scope["headers"])
        body = Body(receive, self.limits.body_bytes)
        if head.length > self.limits.body_bytes:
            raise BodyTooLarge(f"the body has {head.length} bytes")
        if head.has_body or method in _WITH_BODY:
            await body.collect(COLLECTED_BYTES)
        else:
            body.complete = True
        facts = RequestFacts(head.key, self.adapter(path, body.begun, whole=body.complete))
        request = _Request(method, target, is_vllms(path), head, body)
        async with body.while_connected():
            await self._try_workers(request, facts, scope.get(CHOSEN), send)

    def adapter(self, path: str, body: bytes, *, whole: bool = True) -> str | None:
        """The adapter that a request names, if the policy wants to know it. In a body that is not `whole`, such as one
        with pictures, the name must come first."""
        if not self._uses_adapter or not (path == "/generate" or is_vllms(path)):
            return None
        if not whole:
            found = _BEGINS_WITH_MODEL.match(body)
            if found is None:
                return None
            body = b'{"model":%s}' % found[1]
        try:
            named = _decode_named(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        name = named.lora_path or named.model
        return None if name in self._base_models else name

    async def _try_workers(self, request: _Request, facts: RequestFacts, chosen: Worker | None, send: Send) -> None:
        pool, tried, trouble = self.pool, [], "no worker is routable"
        while len(tried) < MAX_TRIES:
            worker = chosen if chosen is not None and chosen.routable else pool.choose(facts, tried)
            chosen = None
            if worker is None and not tried and pool.changing:
                worker = await self._when_routable(facts)
                if pool.changing:
                    trouble = f"the weights of all workers have been changed for {self.limits.change_s:g} s"
            if worker is None:
                break
            pool.begin(worker)
            try:
                url = (request.is_vllms and worker.completions_url) or worker.url
                with closing(await self.client.reach(url)) as answer:
                    await self._exchange(worker, url, answer, request, send)
                return
            except NotAccepted as error:
                trouble = f"{worker.url} cannot be reached ({error})"
                self.counts["not_accepted"] += 1
                pool.refused(worker, f"it could not be reached ({error})")
                tried.append(worker)
            finally:
                pool.end(worker)
        self.counts["no_worker"] += 1
        await refusal(503, NO_WORKER, trouble).send(send)

    async def _when_routable(self, facts: RequestFacts) -> Worker | None:
        """Wait while the only workers have their weights changed, at most `change_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.change_s):
                while not self.pool.candidates and self.pool.changing:
                    await self.pool.next_change.wait()
        return self.pool.choose(facts)

    async def _exchange(self, worker: Worker, url: str, answer: AnswerStream, request: _Request, send: Send) -> None:
        head, body = head_of(request.method, address_of(url), request.target, request.head.lines), request.body
        if body.complete:
            length = len(body.begun) if request.head.has_body or body.begun else None
        else:
            length = request.head.length
        content = body.begun if body.complete else body.pieces()
        worker.exchanges.add(answer.connection)
        started = False
        try:
            await answer.ask(head, content, length, without_body=request.method == "HEAD")
            started = True
            await pass_back(answer, self.answer_headers(worker, answer.status, answer.headers), send)
            self.counts["answered"] += 1
        except Interrupted as error:
            if isinstance(body.error, ClientLeft) or (isinstance(body.error, BodyTooLarge) and not started):
                raise body.error from None
            if body.error is not None:  # of a middleware's `receive`
                logger.error("the body of %s could not be read", request.method, exc_info=body.error)
            self.counts["interrupted"] += 1
            if started:
                raise Truncated(f"{worker.url}: {error}") from error
            message = f"no answer from {worker.url} ({error}); it may have processed the request"
            await refusal(502, INTERRUPTED, message, self.name_of(worker)).send(send)
        finally:
            worker.exchanges.discard(answer.connection)


class _Request(NamedTuple):
    """A request on its way to a worker."""

    method: str
    target: bytes
    is_vllms: bool
    head: RequestHead
    body: Body
