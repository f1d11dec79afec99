"""An HTTP/1.1 connection for one request whose answer is read while it arrives. httptools parses the answer.

Knows bytes; `skyrl.server.openai.events` knows what they say. Each stream has a connection of its own, which `close`
ends, so that the inference server stops computing what nobody reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from skyrl.server.sampling.answer_head import AnswerHead
from skyrl.server.sampling.transport import Interrupted

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
