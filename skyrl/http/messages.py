"""Requests and answers of all ASGI servers here: bodies within a bound, clients that leave, whole answers.

Knows no route, and no dialect of errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from functools import cached_property
from typing import Any, NamedTuple

from skyrl.http.connection import HeaderList

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = (b"content-type", b"application/json")


class ClientLeft(Exception):
    """The client closed its connection: there is nobody to answer."""


class BodyTooLarge(Exception):
    """A body exceeds its bound."""


class Body:
    """The body of a request, read as a whole or as it comes. `most` bounds its bytes. Raises BodyTooLarge, ClientLeft
    where it is read."""

    def __init__(self, receive: Receive, most: float) -> None:
        self._receive = receive
        self._most = most
        self.begun = b""
        """What `collect` has read."""
        self.complete = False
        """All of the body has come."""
        self.error: Exception | None = None
        """What ended the reading of it."""

    @cached_property
    def _read(self) -> asyncio.Event:
        """Set when `pieces` have been read to the end."""
        return asyncio.Event()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        self.complete = not message.get("more_body", False)
        return message.get("body", b"")

    def _check(self, size: int) -> None:
        if size > self._most:
            raise BodyTooLarge(f"this body may have {self._most} bytes")

    async def collect(self, up_to: float = float("inf")) -> bytes:
        """The body, or its beginning of more than `up_to` bytes."""
        chunks, size = [self.begun] if self.begun else [], len(self.begun)
        while not self.complete and size <= up_to:
            chunks.append(await self._next())
            size += len(chunks[-1])
            self._check(size)
        self.begun = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self.begun

    async def pieces(self) -> AsyncIterator[bytes]:
        """The whole body as it comes, from its beginning."""
        try:
            size = len(self.begun)
            yield self.begun
            while not self.complete:
                piece = await self._next()
                size += len(piece)
                self._check(size)
                yield piece
            self._read.set()
        except Exception as error:
            self.error = error
            raise

    async def left(self) -> None:
        """Wait until the client leaves. While `pieces` are read, their reader sees it."""
        if not self.complete:
            await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def while_connected(self) -> WhileConnected:
        """Cancels what is in the `async with` when the client leaves, and then raises ClientLeft."""
        return WhileConnected(self)


class WhileConnected:
    """See `Body.while_connected`. No generator: every request that is passed on pays for it."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._left = False

    async def __aenter__(self) -> None:
        self._working = asyncio.current_task()
        self._watching = asyncio.create_task(self._body.left())
        self._watching.add_done_callback(self._on_left)

    def _on_left(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and self._working is not None:
            self._left = True
            self._working.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        working, self._working = self._working, None  # an `_on_left` that is scheduled already then does nothing
        if not self._watching.done():
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        elif kind is asyncio.CancelledError and self._left and working and working.uncancel() <= 0:
            self._watching.result()
            raise ClientLeft from None


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body once, and then waits until the client leaves."""
    unsent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        if unsent:
            return unsent.pop()
        while (message := await receive())["type"] == "http.request":
            pass  # what is left of the body in whose place this one is
        return message

    return again


async def pass_changed(app: AsgiApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> int | None:
    """Pass a request on with another body. The status of its answer; None if there is none."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    sent = WatchedSend(send)
    scope = {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}
    await app(scope, replayed(body, receive), sent)
    return sent.status


class WatchedSend:
    """A `send` that knows the status that was sent; None before the answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class Reply(NamedTuple):
    """A whole answer. `headers` has no length."""

    status: int
    headers: HeaderList
    body: bytes

    async def send(self, send: Send) -> None:
        headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def encoded(value: Any) -> bytes:
    """JSON without spaces. One of the routers in use writes JSON anew without spaces, and keeps our Content-Length."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object; none for another body, which somebody else refuses."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def json_reply(status: int, value: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> Reply:
    return Reply(status, [JSON, *headers], encoded(value))
