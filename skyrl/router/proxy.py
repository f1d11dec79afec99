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
from dataclasses import dataclass

import msgspec

from skyrl.http.client import AnswerStream
from skyrl.http.connection import Address, Connection, Interrupted, NotAccepted, Pool, address_of, connect
from skyrl.router import messages
from skyrl.router.heads import RequestHead, check_headers, check_target, passed_on
from skyrl.router.messages import ClientLeft, HeaderList, Message, Receive, Scope, Send
from skyrl.router.policies import RequestFacts
from skyrl.router.pool import Slots, TooManyWaiting, WorkerPool
from skyrl.router.worker import Worker

logger = logging.getLogger(__name__)

COLLECTED_BYTES = 2**20
"""Bodies up to this size are collected before a worker is chosen; larger ones are passed on as they come."""
MAX_TRIES = 8

WORKER_HEADER = b"x-skyrl-worker"
"""The URL of the worker that an answer is about. Only where the router names workers."""
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
        connections: Pool,
        limits: Limits,
        counts: Counter[str],
        base_models: Collection[str] = (),
        *,
        names_workers: bool = False,
    ) -> None:
        self.pool = pool
        self.connections = connections
        self.limits = limits
        self.slots = Slots(limits.running, limits.waiting)
        self._uses_adapter = pool.policy.uses_adapter
        self._base_models = frozenset(base_models)
        self._names_workers = names_workers
        self.counts = counts
        self.at_workers: dict[Worker, set[Connection]] = {}

    @property
    def waiting(self) -> int:
        return self.slots.waiting

    def answer_headers(self, worker: Worker, status: int, headers: HeaderList) -> HeaderList:
        """The headers of a worker's answer that go on to the client."""
        return [*passed_on(status, headers), *self.name_of(worker)]

    def name_of(self, worker: Worker) -> HeaderList:
        """The header that names a worker; none if workers are not named."""
        return [(WORKER_HEADER, worker.url.encode())] if self._names_workers else []

    def interrupt(self, worker: Worker, reason: str) -> None:
        """Break all exchanges with a worker that does not answer any more. Their clients get 502."""
        for connection in list(self.at_workers.get(worker, ())):
            connection.abort(reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ClientLeft, Truncated when the worker breaks off in the middle of its answer, and BadHead."""
        if not self.slots.try_acquire():
            try:
                await self.slots.acquire()
            except TooManyWaiting:
                self.counts["refused_busy"] += 1
                waiting = f"{self.limits.waiting} requests wait already"
                await messages.refuse(send, 503, messages.BUSY, waiting)
                return
        try:
            await self._forward(scope, receive, send)
        finally:
            self.slots.release()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = RequestHead.of(scope["headers"])
        check_headers(scope["headers"])
        if head.length > self.limits.body_bytes:
            await self._refuse_body(send)
            return
        body, more = b"", False
        if head.has_body or scope["method"] in _WITH_BODY:
            body, more = await self._collect(receive)
        if len(body) > self.limits.body_bytes:
            await self._refuse_body(send)
            return
        if not more:
            framing = b"content-length: %d\r\n" % len(body) if head.has_body or body else b""
        else:
            framing = b"content-length: %d\r\n" % head.length if head.length >= 0 else b"transfer-encoding: chunked\r\n"
        facts = RequestFacts(head.key, self.adapter(scope["path"], body, whole=not more))
        lines = b"%s%s\r\n" % (head.lines, framing)
        request = _Request(scope, lines, body, more, chunked=more and head.length < 0)
        await self._try_workers(request, facts, scope, receive, send)

    async def _refuse_body(self, send: Send) -> None:
        self.counts["refused_body"] += 1
        limit = f"a body may have {self.limits.body_bytes} bytes"
        await messages.refuse(send, 413, "body_too_large", limit)

    async def _collect(self, receive: Receive) -> tuple[bytes, bool]:
        """The body, or its beginning, and whether more follows. Raises ClientLeft."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk, more = message.get("body", b""), message.get("more_body", False)
            if not chunks and not more:
                return chunk, False
            chunks.append(chunk)
            size += len(chunk)
            if not more or size > COLLECTED_BYTES:
                return b"".join(chunks), more

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
        except msgspec.MsgspecError:
            return None
        name = named.lora_path or named.model
        return None if name in self._base_models else name

    async def _try_workers(
        self, request: _Request, facts: RequestFacts, scope: Scope, receive: Receive, send: Send
    ) -> None:
        pool, tried = self.pool, []
        chosen: Worker | None = scope.get(CHOSEN)
        while len(tried) < MAX_TRIES:
            worker = chosen if chosen is not None and chosen.routable else pool.choose(facts, tried)
            chosen = None
            if worker is None and not tried and pool.changing:
                await self._until_routable(request, receive)
                worker = pool.choose(facts, tried)
            if worker is None:
                break
            pool.begin(worker)
            try:
                address = address_of(
                    worker.completions_url if request.is_vllms and worker.completions_url else worker.url
                )
                try:
                    connection = self.connections.take(address.origin) or await connect(address.origin)
                except NotAccepted as error:
                    request.trouble = f"{worker.url} cannot be reached ({error})"
                    self.counts["not_accepted"] += 1
                    pool.refused(worker)
                    tried.append(worker)
                    continue
                exchanges = self.at_workers.setdefault(worker, set())
                exchanges.add(connection)
                try:
                    await self._exchange(worker, address, connection, request, receive, send)
                finally:
                    exchanges.discard(connection)
                    if not exchanges:
                        self.at_workers.pop(worker, None)
                return
            finally:
                pool.end(worker)
        self.counts["no_worker"] += 1
        await messages.refuse(send, 503, messages.NO_WORKER, request.trouble or "no worker is routable")

    async def _until_routable(self, request: _Request, receive: Receive) -> None:
        """Wait while the only workers have their weights changed, at most `change_s`. Raises ClientLeft."""
        leaving = asyncio.ensure_future(_left(receive)) if request.sent else None
        try:
            async with asyncio.timeout(self.limits.change_s):
                while not self.pool.candidates and self.pool.changing:
                    changing = asyncio.ensure_future(self.pool.next_change.wait())
                    try:
                        await asyncio.wait(
                            {changing, leaving} if leaving is not None else {changing},
                            return_when=asyncio.FIRST_COMPLETED,
                        )
                    finally:
                        changing.cancel()
                    if leaving is not None and leaving.done():
                        self.counts["client_left"] += 1
                        raise ClientLeft
        except TimeoutError:
            request.trouble = f"the weights of all workers have been changed for {self.limits.change_s:g} s"
        finally:
            if leaving is not None:
                leaving.cancel()
                await asyncio.wait([leaving])

    async def _exchange(
        self,
        worker: Worker,
        address: Address,
        connection: Connection,
        request: _Request,
        receive: Receive,
        send: Send,
    ) -> None:
        started = False
        answer = AnswerStream(connection)
        head = request.head(address)
        connection.send(head + request.body if not request.chunked else head, without_body=request.method == "HEAD")
        pump = asyncio.create_task(self._pump(request, connection, receive))
        try:
            await answer.head()
            status = connection.status
            headers = self.answer_headers(worker, status, connection.headers)
            started = True
            await send({"type": "http.response.start", "status": status, "headers": headers})
            while True:
                body = await answer.read()
                last = connection.at_end
                if last:
                    pump.cancel()  # it would take the end of the exchange for a client that has left
                    if not request.sent:
                        connection.reusable = False
                message: Message = {"type": "http.response.body", "body": body, "more_body": not last}
                await send(message)
                if last:
                    break
            self.counts["answered"] += 1
        except Interrupted as error:
            if request.client_left:
                self.counts["client_left"] += 1
                raise ClientLeft from None
            if request.too_large and not started:
                await self._refuse_body(send)
                return
            self.counts["interrupted"] += 1
            if started:
                raise Truncated(f"{worker.url}: {error}") from error
            message_ = f"no answer from {worker.url} ({error}); it may have processed the request"
            await messages.refuse(send, 502, messages.INTERRUPTED, message_, self.name_of(worker))
        finally:
            if not pump.done():
                pump.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pump
            self.connections.give_back(address.origin, connection)

    async def _pump(self, request: _Request, connection: Connection, receive: Receive) -> None:
        """Send what is left of the body, then wait for the client to leave: then the worker need not answer."""
        try:
            if request.chunked and request.body:
                await connection.send_more(b"%x\r\n%s\r\n" % (len(request.body), request.body))
            size = len(request.body)
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    request.client_left = True
                    connection.abort("the client left")
                    return
                if request.sent:
                    continue
                body = message.get("body", b"")
                size += len(body)
                if size > self.limits.body_bytes:
                    request.too_large = True
                    connection.abort("the body is too large")
                    return
                if body:
                    await connection.send_more(b"%x\r\n%s\r\n" % (len(body), body) if request.chunked else body)
                if not message.get("more_body", False):
                    request.sent = True
                    if request.chunked:
                        await connection.send_more(b"0\r\n\r\n")
        except Interrupted:
            return  # the exchange meets the same failure
        except Exception:  # of a middleware's `receive`: without the rest of the body the worker would wait for ever
            logger.exception("the body of %s could not be read", request.method)
            connection.abort("the body of the request could not be read to its end")


async def _left(receive: Receive) -> None:
    """Wait until the client leaves. The whole body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Request:
    """A request on its way: what is sent to a worker, and what has happened to it."""

    __slots__ = (
        "_lines",
        "_target",
        "body",
        "chunked",
        "client_left",
        "is_vllms",
        "method",
        "sent",
        "too_large",
        "trouble",
    )

    def __init__(self, scope: Scope, lines: bytes, body: bytes, more: bool, chunked: bool) -> None:
        self.method: str = scope["method"]
        self.is_vllms = is_vllms(scope["path"])
        query = scope["query_string"]
        path = scope.get("raw_path") or scope["path"].encode()
        self._target = b"%s?%s" % (path, query) if query else path
        check_target(self.method, self._target)
        self._lines = lines
        self.body = body
        """The whole body, or its beginning."""
        self.chunked = chunked
        self.sent = not more
        """The client has sent the whole body."""
        self.client_left = False
        self.too_large = False
        self.trouble: str | None = None
        """Why the last worker did not accept it."""

    def head(self, address: Address) -> bytes:
        return b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%s" % (
            self.method.encode(),
            address.path,
            self._target,
            address.host,
            self._lines,
        )
