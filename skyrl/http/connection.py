"""HTTP/1.1 to servers: one connection, the answer that comes on it, and the unused connections that a client keeps.

httptools parses an answer. A `Sink` takes it as it arrives, without a task. `Pool` opens connections and keeps unused
ones. Knows bytes; does not know whole answers (`client`), routes, workers or ASGI. docs/decisions/sample-path.md
has figures of this client beside general ones."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from functools import lru_cache
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

HeaderList = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 2**10
"""Status line and headers of an answer."""
HEAD_TOO_LONG = "the head of the server's answer is too long"
NOT_HTTP = "the server's answer is not HTTP/1.1"
"""How a failure begins for which the server is to blame, and not the connection."""
HIGH_WATER_BYTES = 256 * 2**10
"""Bytes of an answer that wait for a slow reader. Beyond them the server is read no further."""

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A server's machine or a network link that is gone without a word breaks the connection within 30 s, however long an
answer may take. Linux alone would take two hours."""


class NotAccepted(Exception):
    """The server cannot have accepted the request: no connection was made, or the address is wrong. `refused`: the
    server's machine refused the connection."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Interrupted(Exception):
    """The connection broke after the request, or a part of it, was sent. The server may have processed it."""


class Sink(Protocol):
    """Takes an answer without a task: `advance` is called when more of it has arrived, or the connection broke."""

    def advance(self) -> None: ...


class Connection(asyncio.Protocol):
    """One connection to a server. `send` begins an exchange; the `sink`, which is set before, reads the answer from the
    attributes and with `take`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reusable = True
        self.busy = False
        self.sink: Sink | None = None
        self.status = 0
        self.headers: HeaderList = []
        """Of the answer; names in lower case."""
        self.head_complete = False
        self.complete = False
        """The whole answer has arrived."""
        self.received = 0
        """Bytes of the answer: head, body and frames."""
        self.failure: str | None = None
        self.writable: asyncio.Future[None] | None = None
        """Set while the server reads a request's body too slowly."""
        self._parser = httptools.HttpResponseParser(self)
        self._without_body = False
        self._has_length = False
        self._chunks: list[bytes] = []
        self._size = 0
        self._reading_paused = False

    def send(self, data: bytes, *, without_body: bool = False) -> None:
        """Send a request, or its head. `without_body`: the answer has no body whatever its head says (HEAD)."""
        self.busy = True
        self.status, self.headers, self.complete = 0, [], False
        self._without_body, self.head_complete, self.received = without_body, False, 0
        self._has_length = False
        if self.failure is None and self.transport is not None:
            self.transport.write(data)

    async def send_more(self, data: bytes) -> None:
        """Send a part of the request's body; waits while the server does not read. Raises Interrupted."""
        if self.failure is not None or self.transport is None:
            raise Interrupted(self.failure or "the server closed the connection")
        self.transport.write(data)
        if self.writable is not None:
            await self.writable

    def take(self) -> bytes:
        """What has arrived of the answer's body since the last call."""
        chunks = self._chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks, self._size = [], 0
        if self._reading_paused and self.transport is not None:
            self._reading_paused = False
            self.transport.resume_reading()
        return body

    @property
    def at_end(self) -> bool:
        """The whole answer has arrived and been taken."""
        return self.complete and not self._chunks

    @property
    def unread(self) -> int:
        """Bytes of the answer's body that have arrived and have not been taken."""
        return self._size

    def pause(self) -> None:
        """Read nothing more from the server until the next `take`."""
        if not self._reading_paused and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()

    def abort(self, reason: str = "aborted") -> None:
        """Close the connection at once, and tell the sink."""
        self.reusable = False
        self.failure = self.failure or reason
        if self.transport is not None:
            self.transport.abort()
        if self.sink is not None:
            self.sink.advance()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        made: socket.socket = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            made.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            self.abort("the server sent bytes without a request")
            return
        self.received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"{NOT_HTTP}: {error}")
            return
        if not self.head_complete and self.received > MAX_HEAD_BYTES:
            self.status = self._parser.get_status_code()
            self.abort(HEAD_TOO_LONG)
            return
        if self.sink is not None:
            self.sink.advance()
        if self._size > HIGH_WATER_BYTES:
            self.pause()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self.head_complete and not self._has_length and exc is None and self.failure is None:
            self.complete = True  # an answer without a length ends when the server closes the connection
        if self.failure is None:
            self.failure = f"{type(exc).__name__}: {exc}" if exc is not None else "the server closed the connection"
        self.resume_writing()
        if self.sink is not None:
            self.sink.advance()

    def pause_writing(self) -> None:
        self.writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self.writable = self.writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Called by the parser

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False  # the beginning of a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_complete:
            return  # a trailer, or the head of a second answer
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._has_length = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200:  # such as 100 Continue: the final answer follows
            return
        self.status = status
        self.head_complete = True
        if self._without_body or status in (204, 304):
            self.complete = True
            if self._without_body or self._has_length:
                self.reusable = False  # the parser may take the next answer for the body of this one
            self._has_length = True

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        self._chunks.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if not self.head_complete:
            self.headers, self.received, self._has_length = [], 0, False
            return
        self.complete = True
        if not self._parser.should_keep_alive():
            self.reusable = False


class Origin(NamedTuple):
    """Where to connect."""

    name: str
    port: int
    tls: bool


class Address(NamedTuple):
    """Where a URL leads. `path`, with a query if there is one, is empty if the URL has none; `host` is the value of the
    Host header."""

    origin: Origin
    path: bytes
    host: bytes


@lru_cache(maxsize=4096)
def address_of(url: str) -> Address:
    """Raises NotAccepted if `url` is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotAccepted(f"invalid URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        raise NotAccepted(f"invalid URL {url!r}")
    tls = parts.scheme == "https"
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path
    host = parts.netloc.rpartition("@")[2]
    return Address(Origin(parts.hostname, port or (443 if tls else 80), tls), path.encode(), host.encode())


CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_S = 4.0
"""How long an unused connection is kept. uvicorn, the web server of vLLM and SGLang, closes an unused connection after
5 s; a request sent in that moment would be lost."""
SWEPT_PER_TURN = 100
"""How many of them are closed in one turn of the event loop: after a burst of answers there are thousands."""
REFRESH_S = 2.0
"""A connection that was unused for so long is given before the most recently used one. With 2,048 samples in flight,
peaks need more connections than the time between them: without this, up to one connection for ten samples was closed
and opened again, at 60 µs of CPU each."""


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def connect(origin: Origin, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
    """A new connection. Raises NotAccepted."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                Connection, origin.name, origin.port, ssl=_tls() if origin.tls else None
            )
    except TimeoutError as error:
        raise NotAccepted("no connection in time") from error
    except (OSError, OverflowError, UnicodeError) as error:
        # asyncio tells several failures, of several addresses of one name, in the text of one OSError
        refused = isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}]" in str(error)
        raise NotAccepted(f"{type(error).__name__}: {error}", refused=refused) from error
    return connection


class Pool:
    """The unused connections of a client, by origin. Gives the most recently used one first, or one that would soon be
    too old: as many connections as the traffic can keep in use stay open. Closes connections that nothing used for
    MAX_IDLE_S."""

    def __init__(self) -> None:
        self._idle: dict[Origin, deque[Connection]] = {}
        """The connections of each origin, in the order of their last use."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        if not idle:
            return None
        now = asyncio.get_running_loop().time()
        while idle:
            connection = idle.popleft() if idle[0].idle_since < now - REFRESH_S else idle.pop()
            if connection.reusable and connection.idle_since > now - MAX_IDLE_S:
                return connection
            connection.abort()
        return None

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection whose answer has arrived to its end and been taken; close any other: the next request on it
        would get the rest of this answer."""
        connection.busy, connection.sink = False, None
        if not connection.at_end or not connection.reusable or self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(origin, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Close what was unused for too long, a few connections in a turn. Runs again while any connection is kept."""
        loop = asyncio.get_running_loop()
        left, too_old = SWEPT_PER_TURN, loop.time() - MAX_IDLE_S
        for origin, idle in list(self._idle.items()):
            while idle and left and (idle[0].idle_since <= too_old or not idle[0].reusable):
                idle.popleft().abort()
                left -= 1
            if not idle:
                del self._idle[origin]
        self._sweeper = loop.call_later(MAX_IDLE_S if left else 0, self._sweep) if self._idle else None

    def close(self) -> None:
        """Close all of them, and each that is given back later."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
