"""HTTP/1.1 from the router to a worker: one connection, and the answer that comes on it in pieces.

httptools parses the answer. `Connections` keeps unused connections, and opens new ones. `RequestHead` is what goes on
from the head of a request to a worker, and `passed_on` what goes on from the head of its answer to the client. Knows
bytes; does not know workers, policies or ASGI."""

from __future__ import annotations

import asyncio
import re
import ssl
from functools import lru_cache
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from skyrl.http.idle_connections import IdleConnections
from skyrl.router.messages import HeaderList

_OWN_HEADERS = frozenset(
    (b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
    + (b"content-length", b"expect")
)
"""Headers of a connection, not of a request: the router writes those of its own connections."""
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_HOP_BY_HOP_AND_LENGTH = _HOP_BY_HOP | {b"content-length"}
_SMG_KEY, _SESSION_KEY, _LENGTH = b"x-smg-routing-key", b"x-session-id", b"content-length"
_PLAIN = (b"keep-alive", b"close")
_NONE: frozenset[bytes] = frozenset()
_BODY_EXPECTED = (_LENGTH, b"transfer-encoding")
_NOT_IN_VALUE = re.compile(rb"[\r\n\0]")
_NOT_IN_NAME = re.compile(rb"[\0-\x20:\x7f]|^$")
_NOT_IN_TARGET = re.compile(rb"[\0-\x20\x7f]")


class BadHead(ValueError):
    """A middleware gave a request a header or a target that would end its line, and begin another."""


def check_headers(headers: HeaderList) -> None:
    """Raises BadHead."""
    for name, value in headers:
        if _NOT_IN_VALUE.search(value) or _NOT_IN_NAME.search(name):
            raise BadHead(f"a header of the request is not HTTP: {name!r}: {value!r}")


def check_target(method: str, target: bytes) -> None:
    """Raises BadHead."""
    if _NOT_IN_NAME.search(method.encode()) or _NOT_IN_TARGET.search(target):
        raise BadHead(f"the request line is not HTTP: {method!r} {target!r}")


def passed_on(status: int, headers: HeaderList) -> HeaderList:
    """The headers of a worker's answer that go on to the client."""
    without = _HOP_BY_HOP_AND_LENGTH if status in (204, 304) else _HOP_BY_HOP
    for name, value in headers:
        if name == b"connection" and value.lower() not in _PLAIN:
            without |= _tokens(value) - {b"content-length"}
    return [header for header in headers if header[0] not in without]


class RequestHead(NamedTuple):
    """What the router needs of a request's headers. `lines`: those that go on, as bytes. `length`: of the body; -1 if
    it is not known. `key`: what keeps requests on one worker."""

    lines: bytes
    length: int
    has_body: bool
    key: str | None

    @classmethod
    def of(cls, headers: HeaderList) -> RequestHead:
        lines: list[bytes] = []
        smg_key = session_key = None
        length, has_body, listed = -1, False, _NONE
        for name, value in headers:
            if name in _OWN_HEADERS:
                if name in _BODY_EXPECTED:
                    has_body = True
                    if name == _LENGTH and value.isdigit():
                        length = int(value)
                elif name == b"connection" and value.lower() not in _PLAIN:
                    listed |= _tokens(value)
                continue
            if name == _SMG_KEY:
                smg_key = value
            elif name == _SESSION_KEY:
                session_key = value
            lines += (name, b": ", value, b"\r\n")
        if listed:  # `Connection: x-foo` says that x-foo is for this connection alone
            kept = [header for header in headers if header[0] != b"connection"]
            return cls.of([header for header in kept if header[0] not in listed - _OWN_HEADERS])
        key = smg_key or session_key
        return cls(b"".join(lines), length, has_body, key.decode("latin-1") if key else None)


def _tokens(connection: bytes) -> frozenset[bytes]:
    """The names of headers in the value of a Connection header."""
    return frozenset(token.strip() for token in connection.lower().split(b","))


MAX_HEAD_BYTES = 64 * 2**10
"""Status line and headers of an answer."""
HIGH_WATER_BYTES = 256 * 2**10
"""Bytes of an answer that wait for a slow client. Beyond them the worker is read no further."""


class NotAccepted(Exception):
    """The worker cannot have accepted the request: no connection to it was made."""


class Interrupted(Exception):
    """The connection broke after the request, or a part of it, was sent. The worker may have processed it."""


class Sink(Protocol):
    """Takes an answer without a task: `advance` is called when more of it has arrived, or the connection broke."""

    def advance(self) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection to a worker. `send` begins an exchange. Its answer is read with `head`, then `read`, or, if there
    is a `sink`, by that with `take`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reusable = True
        self.busy = False
        self.sink: Sink | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Of the answer; names in lower case."""
        self.complete = False
        """The whole answer has arrived."""
        self._parser = httptools.HttpResponseParser(self)
        self._without_body = False
        self.head_complete = False
        self._head_bytes = 0
        self._has_length = False
        self._chunks: list[bytes] = []
        self._size = 0
        self.failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reading_paused = False
        self._writable: asyncio.Future[None] | None = None
        """Set while the worker reads a request's body too slowly."""

    def send(self, data: bytes, *, without_body: bool) -> None:
        """Send a request, or its head. `without_body`: the answer has no body whatever its head says (HEAD)."""
        self.busy = True
        self.status, self.headers, self.complete = 0, [], False
        self._without_body, self.head_complete, self._head_bytes = without_body, False, 0
        self._has_length = False
        if self.failure is None and self.transport is not None:
            self.transport.write(data)

    async def send_more(self, data: bytes) -> None:
        """Send a part of the request's body; waits while the worker does not read. Raises Interrupted."""
        if self.failure is not None or self.transport is None:
            raise Interrupted(self.failure or "the worker closed the connection")
        self.transport.write(data)
        if self._writable is not None:
            await self._writable

    async def head(self) -> None:
        """Wait for `status` and `headers`. Raises Interrupted."""
        while not self.head_complete:
            await self._wait()

    async def read(self) -> bytes | None:
        """The next part of the answer's body, as it came; None at its end. Raises Interrupted."""
        while not self._chunks:
            if self.complete:
                return None
            await self._wait()
        return self.take()

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
        """The whole answer has arrived and been read."""
        return self.complete and not self._chunks

    async def _wait(self) -> None:
        if self.failure is not None:
            raise Interrupted(self.failure)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abort(self, reason: str = "aborted") -> None:
        """Close the connection at once. Whoever waits for its answer gets Interrupted."""
        self.reusable = False
        self.failure = self.failure or reason
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self.sink is not None:
            self.sink.advance()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            self.abort("the worker sent bytes without a request")
            return
        if not self.head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(f"the worker's answer is not HTTP/1.1: {error}")
            return
        if not self.head_complete and self._head_bytes > MAX_HEAD_BYTES:
            self.abort("the head of the worker's answer is too long")
            return
        if self._size > HIGH_WATER_BYTES and not self._reading_paused and self.transport is not None:
            self._reading_paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self.head_complete and not self._has_length and exc is None and self.failure is None:
            self.complete = True  # an answer without a length ends when the worker closes the connection
        if self.failure is None:
            self.failure = f"{type(exc).__name__}: {exc}" if exc is not None else "the worker closed the connection"
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
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
            self.headers, self._head_bytes, self._has_length = [], 0, False
            return
        self.complete = True
        if not self._parser.should_keep_alive():
            self.reusable = False


CONNECT_TIMEOUT_S = 5.0


class Address(NamedTuple):
    """Where a base URL leads. `prefix` comes before every path; `host` is the value of the Host header."""

    name: str
    port: int
    tls: bool
    prefix: bytes
    host: bytes


@lru_cache(maxsize=4096)
def address_of(url: str) -> Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Address(
        parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.encode(), parts.netloc.encode()
    )


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class Connections(IdleConnections[Address, Upstream]):
    async def connect(self, address: Address) -> Upstream:
        """Raises NotAccepted."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    Upstream, address.name, address.port, ssl=_tls() if address.tls else None
                )
        except TimeoutError as error:
            raise NotAccepted("no connection in time") from error
        except (OSError, OverflowError, UnicodeError) as error:
            raise NotAccepted(f"{type(error).__name__}: {error}") from error
        return connection

    def give_back(self, address: Address, connection: Upstream) -> None:
        """Keep a connection whose answer has been read to its end; close any other."""
        connection.busy = False
        if connection.complete:
            self.keep(address, connection)
        else:
            connection.abort()
