"""HTTP/1.1 for the forwarding path alone: keeps connections to inference servers, and sends each request on a free one.

An `AnswerStream` is a connection of its own for one request whose answer is read while it arrives. Closing the stream
ends the connection, so that the inference server stops computing what nobody reads.

No redirects, cookies, proxies or content codings: the path does not need them, and no sample pays for them.
docs/decisions/own-code.md says why, with figures of this client beside general ones.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools

from skyrl.http.idle_connections import IdleConnections
from skyrl.sampling.http_connection import AnswerHead, AnswerMemory, HttpConnection
from skyrl.sampling.transport import CONTROL_ANSWER_BYTES, Answer, Interrupted, NotAccepted, Pieces

MAX_HEAD_BYTES = 64 * 2**10
UNREAD_BYTES = 256 * 2**10
"""When so many bytes wait to be read, the connection is not read further."""


class AnswerStream(asyncio.Protocol):
    """`send` returns when the head of the answer is there. `read` then returns the body piece by piece."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        self.head = AnswerHead()
        self._on_close: Callable[[], None] | None = on_close
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._unread = self._received = 0
        self._paused = False
        self._headers_complete = False
        self._ended = False
        self._failure: Interrupted | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    async def send(self, request: bytes, deadline: float) -> None:
        """Send the request. `deadline`, in the event loop's time, holds for the whole answer. Raises Interrupted."""
        if self._transport is None:
            raise Interrupted("the server closed the connection")
        self._timer = asyncio.get_running_loop().call_at(deadline, self._fail, "no whole answer in time")
        self._transport.write(request)
        while not self._headers_complete:
            await self._wait()

    async def read(self) -> bytes:
        """The next piece of the body; empty at its end. Raises Interrupted if the connection broke before its end."""
        while not self._pieces:
            if self._ended:
                return b""
            await self._wait()
        piece = self._pieces.popleft()
        self._unread -= len(piece)
        if self._paused and not self._unread and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    async def read_all(self, max_bytes: int) -> tuple[bytes, bool]:
        """The rest of the body, and whether it is whole: at most its first `max_bytes` are read."""
        pieces: list[bytes] = []
        size = 0
        while (piece := await self.read()) and size <= max_bytes:
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)[:max_bytes], size <= max_bytes

    def close(self) -> None:
        """End the connection. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    async def _wait(self) -> None:
        """Until something has arrived. Raises Interrupted."""
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = Interrupted(reason)
        self._wake()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._headers_complete:
            self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP: {error}")
            return
        if not self._headers_complete and self._received > MAX_HEAD_BYTES:
            self._fail("not HTTP: the head of the answer is too long")
        elif self._unread > UNREAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._headers_complete and not self.head.has_length and exc is None:
            self.on_message_complete()  # an answer without a length ends when the server closes the connection
        self._fail(f"{type(exc).__name__}: {exc}" if exc is not None else "the server closed the connection")

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head.add(name, value)

    def on_headers_complete(self) -> None:
        if self.status < 200:  # such as 100 Continue: the final answer follows
            self.head = AnswerHead()
            return
        self._headers_complete = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._unread += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        if self._headers_complete:
            self._ended = True
            self._wake()


P = TypeVar("P", bound=asyncio.Protocol)

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect. `tls` None is plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@lru_cache(maxsize=256)
def _address(url: str) -> tuple[Origin, bytes, bytes]:
    """The origin, the request target and the Host header. Raises NotAccepted if `url` is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotAccepted(f"invalid URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        raise NotAccepted(f"invalid URL {url!r}")
    tls = _tls() if parts.scheme == "https" else None
    origin = Origin(parts.hostname, port or (80 if tls is None else 443), tls)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    return origin, target.encode(), parts.netloc.rpartition("@")[2].encode()


class HttpTransport:
    """Keeps unused connections by origin and takes the most recently used first. At most `max_connections` posts run at
    once; None is unlimited.

    Header values are not checked: they come from the configuration, and from ids that the server made."""

    def __init__(self, max_connections: int | None = None) -> None:
        self._idle: IdleConnections[Origin, HttpConnection] = IdleConnections()
        self._slots = None if max_connections is None else asyncio.Semaphore(max_connections)
        self._memory = AnswerMemory()

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        max_bytes: int = CONTROL_ANSWER_BYTES,
        rest: Pieces | None = None,
    ) -> Answer:
        origin, request = self._encode("POST", url, body, headers, 0 if rest is None else rest.size)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._slots is None:
            return await self._exchange(origin, request, deadline, max_bytes, rest)
        await self._take_slot(deadline)
        try:
            return await self._exchange(origin, request, deadline, max_bytes, rest)
        finally:
            self._slots.release()

    async def open_stream(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> AnswerStream:
        """Post a request, and return its answer once the head is there. The caller must close the stream, whose
        connection is one of `max_connections`. Raises NotAccepted and Interrupted."""
        origin, request = self._encode("POST", url, body, headers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self._take_slot(deadline)
        stream = AnswerStream(self._give_slot)
        try:
            await self._open(origin, lambda: stream, deadline)
            await stream.send(request, deadline)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _take_slot(self, deadline: float) -> None:
        if self._slots is None:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError as error:
            raise NotAccepted("no connection was free in time") from error

    def _give_slot(self) -> None:
        if self._slots is not None:
            self._slots.release()

    async def get(
        self, url: str, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer:
        """Not bounded by `max_connections`: a health check must not wait until a post has ended."""
        origin, request = self._encode("GET", url, b"", headers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await self._exchange(origin, request, deadline, max_bytes)

    @staticmethod
    def _encode(
        method: str, url: str, body: bytes, headers: Mapping[str, str], rest_bytes: int = 0
    ) -> tuple[Origin, bytes]:
        origin, target, host = _address(url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        values = method.encode(), target, host, lines.encode("latin-1"), len(body) + rest_bytes
        head = b"%s %s HTTP/1.1\r\nHost: %s\r\n%sContent-Length: %d\r\n\r\n" % values
        return origin, head + body

    async def _exchange(
        self, origin: Origin, request: bytes, deadline: float, max_bytes: int, rest: Pieces | None = None
    ) -> Answer:
        connection = self._idle.take(origin) or await self._open(origin, lambda: HttpConnection(self._memory), deadline)
        answer = await connection.exchange(request, deadline, max_bytes, rest)
        self._idle.keep(origin, connection)
        return answer

    @staticmethod
    async def _open(origin: Origin, make: Callable[[], P], deadline: float) -> P:
        """Connect a protocol. Raises NotAccepted."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + CONNECT_TIMEOUT_S)):
                _, connection = await loop.create_connection(make, origin.host, origin.port, ssl=origin.tls)
        except TimeoutError as error:
            raise NotAccepted("no connection in time") from error
        except (OSError, OverflowError, UnicodeError) as error:
            raise NotAccepted(f"{type(error).__name__}: {error}") from error
        return connection

    async def close(self) -> None:
        self._idle.close()
