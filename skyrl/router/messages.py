"""Requests and answers in the router.

`Request` and `Response` are what a middleware of the router sees. It may change both before they travel on. `refusal`
is an answer in one form, {"error": {"message", "type", "code"}}: `code` tells a client whether the request may have run
(docs/reference/router.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any
from urllib.parse import quote

from skyrl.http.connection import HeaderList
from skyrl.http.messages import (
    AsgiApp,
    Body,
    Message,
    Receive,
    Reply,
    Scope,
    Send,
    json_reply,
    replayed,
)

QUEUED_CHUNKS = 16
"""Chunks of an answer that wait for a slow reader. The worker is read no faster."""
_PATH_CHARACTERS = "/!$&'()*+,;=:@"
"""Those that a path may have as they are, beside letters and digits."""
_FRAMING = (b"content-length", b"transfer-encoding")


class Headers:
    """Headers in their order. Names are compared without case; a name may come several times."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self.raw: HeaderList = list(raw)

    def get(self, name: str) -> str | None:
        wanted = name.lower().encode("latin-1")
        return next((value.decode("latin-1") for key, value in self.raw if key.lower() == wanted), None)

    def set(self, name: str, value: str) -> None:
        self.remove(name)
        self.raw.append((name.lower().encode("latin-1"), value.encode("latin-1")))

    def remove(self, *names: str) -> None:
        gone = {name.lower().encode("latin-1") for name in names}
        self.raw = [(key, value) for key, value in self.raw if key.lower() not in gone]

    def set_length(self, length: int) -> None:
        self.raw = [(key, value) for key, value in self.raw if key.lower() not in _FRAMING]
        self.raw.append((b"content-length", str(length).encode()))


class Request:
    """`scope` and `receive` are ASGI's. `max_body_bytes` bounds `body`."""

    def __init__(self, scope: Scope, receive: Receive, max_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers = Headers(scope["headers"])
        self._scope = scope
        self._receive = receive
        self._max_body_bytes = max_body_bytes
        self._body: bytes | None = None

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge, ClientLeft."""
        if self._body is None:
            self._body = await Body(self._receive, self._max_body_bytes).collect()
        return self._body

    async def json(self) -> Any:
        """The body as JSON. Raises ValueError, BodyTooLarge, ClientLeft."""
        return json.loads(await self.body())

    async def client_leaves(self, within_s: float) -> bool:
        """Wait `within_s` seconds, or less if the client closes its connection. The body must have been read."""
        try:
            async with asyncio.timeout(within_s):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        return True

    def set_body(self, body: bytes) -> None:
        self._body = body
        self.headers.set_length(len(body))

    def set_json(self, value: Any) -> None:
        self.set_body(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())

    def to_asgi(self) -> tuple[Scope, Receive]:
        """What the next application is called with. Each call begins with the whole body again, if it was read."""
        scope = self._scope
        if self.path != scope["path"]:
            scope = {**scope, "path": self.path, "raw_path": quote(self.path, safe=_PATH_CHARACTERS).encode()}
        scope = {**scope, "method": self.method, "query_string": self.query, "headers": list(self.headers.raw)}
        return scope, self._receive if self._body is None else replayed(self._body, self._receive)


async def _chunks(content: bytes | AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    async for chunk in content:
        yield chunk


class Response:
    """An answer: the status, the headers, and the body as a whole (`body`) or in chunks as they come (`chunks`)."""

    def __init__(
        self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes | AsyncIterator[bytes] = b""
    ) -> None:
        self.status = status
        self.headers = Headers(headers)
        self._content = body

    @classmethod
    def of_json(cls, status: int, value: Any) -> Response:
        response = cls(status, [(b"content-type", b"application/json")])
        response.set_json(value)
        return response

    async def body(self) -> bytes:
        if not isinstance(self._content, bytes):
            self._content = b"".join([chunk async for chunk in self._content])
        return self._content

    async def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(await self.body())

    def chunks(self) -> AsyncGenerator[bytes]:
        """The body in the chunks in which it comes. May be called once. `set_chunks` may wrap the result."""
        return _chunks(self._content)

    def set_chunks(self, chunks: AsyncIterator[bytes]) -> None:
        """Replace the body with a stream."""
        self._content = chunks
        self.headers.remove("content-length")

    def set_body(self, body: bytes) -> None:
        self._content = body
        self.headers.set_length(len(body))

    def set_json(self, value: Any) -> None:
        self.set_body(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers.raw})
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class AppCall:
    """One call of an application in a task. `response` is its answer, whose body comes while the application runs."""

    def __init__(self, app: AsgiApp, request: Request) -> None:
        scope, receive = request.to_asgi()
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_CHUNKS)
        self._task = asyncio.create_task(self._run(app, scope, receive))

    async def _run(self, app: AsgiApp, scope: Scope, receive: Receive) -> None:
        try:
            await app(scope, receive, self._queue.put)
        finally:
            if self._task is asyncio.current_task() and not self._task.cancelling():
                await self._queue.put(None)

    async def response(self) -> Response:
        """Wait for the head of the answer. Raises what the application raises before its answer begins."""
        start = await self._queue.get()
        if start is None:
            await self._task
            raise RuntimeError("the application returned without an answer")
        return Response(start["status"], start.get("headers", ()), self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        while (message := await self._queue.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return
        await self._task  # it ended in the middle of its answer: raise its error
        raise RuntimeError("the application returned in the middle of its answer")

    async def close(self) -> None:
        """End the application if it still runs, and wait for its end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def error_reply(status: int, code: str, message: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Reply:
    """`error` is an object with `message`, the form that clients of SGLang, vLLM and the gateways read."""
    return json_reply(status, {"error": {"type": code, "code": status, "message": message}}, headers)


def not_allowed(method: str, methods: Sequence[str]) -> Reply | None:
    """The refusal of a method that a route does not take."""
    if method in methods:
        return None
    allowed = ", ".join(methods)
    return error_reply(405, "MethodNotAllowed", f"this route takes {allowed}", [(b"allow", allowed.encode())])


NO_WORKER = "no_available_workers"
"""No worker is routable. No worker has seen the request."""
BUSY = "router_busy"
"""Too many requests wait. No worker has seen the request."""
INTERRUPTED = "worker_interrupted"
"""The connection to the worker broke. The worker may have run the request, so the router does not send it again."""
RETRY_AFTER = [(b"retry-after", b"1")]


def refusal(status: int, code: str, message: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Reply:
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    by_status = {503: RETRY_AFTER, 401: [(b"www-authenticate", b"Bearer")]}
    more = [(b"x-smg-error-code", code.encode()), *by_status.get(status, ()), *headers]
    return json_reply(status, {"error": {"message": message, "type": kind, "code": code}}, more)
