"""HTTP/1.1 from the router to a worker: one connection, and the answer that comes on it in pieces.

httptools parses the answer. Knows bytes; does not know workers, policies or ASGI. `Connections` keeps connections.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

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
