"""HTTP/1.1 for the forwarding path alone: one request at a time on a kept connection, the answer up to its bound.

No redirects, cookies, proxies or content codings: what the path does not use, no sample pays for. The parser is
httptools. benchmarks/transports.py measures it beside general clients; docs/decisions/transport.md says why.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

from skyrl.sampling.answer_room import LARGE_ANSWER_BYTES, AnswerRoom, Place
from skyrl.sampling.transport import CONTROL_ANSWER_BYTES, Answer, Interrupted, NotAccepted

CONNECT_TIMEOUT_S = 10.0
MAX_IDLE_S = 4.0
"""How long an unused connection is kept: uvicorn, in front of vLLM, closes its own after 5 s, and a request that meets
such a closing on its way is lost."""
MAX_HEAD_BYTES = 64 * 2**10
"""Status line and headers of an answer."""
EXCERPT_BYTES = 4 * 2**10
"""What is read of an answer whose Content-Length is above its bound, for the message that tells of it."""
FRAMES_SHARE = 4
"""Beside head and body an answer may have this part of its body more: the frames of its chunks, and trailers."""


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
    """The origin, the request target and the Host header. Raises NotAccepted for what is no http(s) URL."""
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


class _Connection(asyncio.Protocol):
    """One connection; `exchange` may be called again once its answer is there and `reusable` says so."""

    def __init__(self, room: AnswerRoom) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reusable = True
        self._room = room
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._max_bytes = self._bound = CONTROL_ANSWER_BYTES
        self._received = 0
        """Bytes of this exchange, as they came."""
        self._place: Place | None = None
        self._paused = False
        self._begin()

    def _begin(self) -> None:
        self._body: list[bytes] = []
        self._size = 0
        self._content_type = ""
        self._content_length = 0
        self._retry_after: float | None = None
        self._framed = False
        self._begun = False
        self._too_long = False

    async def exchange(self, request: bytes, deadline: float, max_bytes: int) -> Answer:
        """`deadline` in the loop's time. Raises Interrupted when the connection breaks or no answer comes in time."""
        loop = asyncio.get_running_loop()
        if self.transport is None or not self.reusable:
            raise Interrupted("the server closed the connection")
        self._max_bytes, self._received = max_bytes, 0
        waiter = self._waiter = loop.create_future()
        self.transport.write(request)
        timer = loop.call_at(deadline, self._fail, "no whole answer in time")
        try:
            return await waiter
        except asyncio.CancelledError:
            self.abort()
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # the answer came at the same moment, and nobody gets it
            raise
        finally:
            timer.cancel()
            self._waiter = None

    def abort(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()
        if self._place is not None:
            self._place.leave()
            self._place = None

    def _fail(self, why: str) -> None:
        self.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Interrupted(why))

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            # The server sent bytes without a request: close the connection, or they are read as the next answer.
            self.abort()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP: {error}")
            return
        if self._waiter.done():
            return
        if self._too_long or self._received > MAX_HEAD_BYTES + self._size + self._size // FRAMES_SHARE:
            self._cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._begun and not self._framed and exc is None:
            self._complete()  # an answer without a length ends with its connection
        self._fail(f"{type(exc).__name__}: {exc}" if exc is not None else "the server closed the connection")

    # What the parser calls

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            self.reusable = False  # a second answer to one request
        self._begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode("latin-1").partition(";")[0].strip()
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True
            if name == b"content-length" and value.isdigit():
                self._content_length = int(value)
        elif name == b"retry-after":
            self._retry_after = _seconds(value)

    def on_headers_complete(self) -> None:
        self._begun = True
        good = 200 <= self._parser.get_status_code() < 300
        self._bound = self._max_bytes if good else min(self._max_bytes, CONTROL_ANSWER_BYTES)
        if self._content_length > self._bound:
            self._bound = EXCERPT_BYTES
        elif self._content_length > LARGE_ANSWER_BYTES:
            self._ask_for_room(self._content_length)

    def on_body(self, body: bytes) -> None:
        room = self._bound - self._size
        self._size += len(body)
        if len(body) > room:
            self._too_long, body = True, body[: max(0, room)]
        self._body.append(body)
        if self._size > LARGE_ANSWER_BYTES and self._place is None and not self._too_long:
            self._ask_for_room(self._bound)

    def on_message_complete(self) -> None:
        if self._too_long:
            return
        if self._parser.get_status_code() < 200:  # 100 Continue and the like: the answer is still to come
            self._begun = False
            return
        if not self._parser.should_keep_alive():
            self.reusable = False
        self._complete()

    def _ask_for_room(self, size: int) -> None:
        """Read no further until there is room for so many bytes."""
        assert self.transport is not None
        self._place = self._room.ask(size, self._read_on)
        if not self._place.held:
            self._paused = True
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()

    def _cut(self) -> None:
        """The answer is longer than its bound: tell its beginning, and close the connection."""
        status = self._parser.get_status_code()
        if self._waiter is not None and not self._waiter.done() and status:
            body = b"".join(self._body)[:EXCERPT_BYTES]
            self._waiter.set_result(Answer(status, self._content_type, body, self._retry_after, whole=False))
        self._body = []
        self._fail("not HTTP: the status line is too long")

    def _complete(self) -> None:
        self._begun = False
        if self._waiter is not None and not self._waiter.done():
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            status, content_type, retry_after = self._parser.get_status_code(), self._content_type, self._retry_after
            if self._place is None:
                answer = Answer(status, content_type, body, retry_after)
            else:
                answer = Answer(status, content_type, body, retry_after, release=self._place.leave)
                self._place = None
            self._waiter.set_result(answer)
        self._body = []


class HttpTransport:
    """Kept connections by origin, the one used last first. `max_connections` bounds posts at once; None is unlimited.

    Header values are the caller's to check: they come from the configuration, and from ids that the server made."""

    def __init__(self, max_connections: int | None = None) -> None:
        self._idle: dict[Origin, list[_Connection]] = {}
        self._slots = None if max_connections is None else asyncio.Semaphore(max_connections)
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._room = AnswerRoom()

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer:
        origin, request = self._request("POST", url, body, headers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._slots is None:
            return await self._exchange(origin, request, deadline, max_bytes)
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError as error:
            raise NotAccepted("no connection was free in time") from error
        try:
            return await self._exchange(origin, request, deadline, max_bytes)
        finally:
            self._slots.release()

    async def get(
        self, url: str, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer:
        """On a connection beside `max_connections`: whether a server is well is asked when it has all it can take."""
        origin, request = self._request("GET", url, b"", headers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await self._exchange(origin, request, deadline, max_bytes)

    @staticmethod
    def _request(method: str, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[Origin, bytes]:
        origin, target, host = _address(url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = b"%s %s HTTP/1.1\r\nHost: %s\r\n%sContent-Length: %d\r\n\r\n" % (
            method.encode(),
            target,
            host,
            lines.encode("latin-1"),
            len(body),
        )
        return origin, head + body

    async def _exchange(self, origin: Origin, request: bytes, deadline: float, max_bytes: int) -> Answer:
        connection = self._kept(origin) or await self._connect(origin, deadline)
        answer = await connection.exchange(request, deadline, max_bytes)
        if connection.reusable and not self._closed:
            self._keep(origin, connection)
        else:
            connection.abort()
        return answer

    async def _connect(self, origin: Origin, deadline: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + CONNECT_TIMEOUT_S)):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._room), origin.host, origin.port, ssl=origin.tls
                )
        except TimeoutError as error:
            raise NotAccepted("no connection in time") from error
        except (OSError, OverflowError, UnicodeError) as error:
            raise NotAccepted(f"{type(error).__name__}: {error}") from error
        return connection

    def _kept(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        oldest = asyncio.get_running_loop().time() - MAX_IDLE_S
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _keep(self, origin: Origin, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long; comes again while anything is kept."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - MAX_IDLE_S
        for origin, idle in list(self._idle.items()):
            kept = [connection for connection in idle if connection.reusable and connection.idle_since > oldest]
            for connection in set(idle).difference(kept):
                connection.abort()
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep) if self._idle else None

    async def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()


def _seconds(header: bytes) -> float | None:
    """Seconds from now, of a number or a date. None when it is neither."""
    text = header.decode("latin-1")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
