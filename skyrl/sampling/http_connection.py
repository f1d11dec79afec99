"""One HTTP/1.1 connection: sends a request, then reads its answer up to a bound. httptools parses the answer.

All large answers of a process share `AnswerMemory`: a connection reads the rest of a large answer only after memory was
reserved for it. Small answers need no reservation. Knows neither URLs nor other connections; `http` keeps the
connections and chooses one for each request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import cast

import httptools

from skyrl.sampling.transport import CONTROL_ANSWER_BYTES, WORKER_HEADER, Answer, Interrupted, Pieces


class AnswerHead:
    """`has_length`: whether a header tells where the answer ends, by its length or because it comes in chunks.
    `worker`: the URL of the replica that the answer is about, if a router names it."""

    __slots__ = ("content_length", "content_type", "has_length", "retry_after_s", "worker")

    def __init__(self) -> None:
        self.content_type = ""
        self.content_length = 0
        self.retry_after_s: float | None = None
        self.worker: str | None = None
        self.has_length = False

    def add(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1").partition(";")[0].strip()
        elif name in (b"content-length", b"transfer-encoding"):
            self.has_length = True
            if name == b"content-length" and value.isdigit():
                self.content_length = int(value)
        elif name == b"retry-after":
            self.retry_after_s = _parse_retry_after(value)
        elif name == WORKER_HEADER:
            self.worker = value.decode("latin-1")


def _parse_retry_after(header: bytes) -> float | None:
    """Seconds from now. The header is a number or a date; None for anything else."""
    text = header.decode("latin-1")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


LARGE_ANSWER_BYTES = 2**20
"""The rest of a larger answer is only read after memory was reserved for the answer."""
MEMORY_BYTES = 256 * 2**20
"""For all large answers of a process, each until it is decoded. An answer larger than this is read while no other large
answer is in memory."""


class AnswerMemory:
    """Grants reservations in the order of arrival. Runs in one event loop."""

    def __init__(self, size: int = MEMORY_BYTES) -> None:
        self._size = size
        self._reserved = 0
        self._waiting: deque[Reservation] = deque()

    def reserve(self, size: int, on_granted: Callable[[], None]) -> Reservation:
        """A reservation of `size` bytes. Calls `on_granted` when the memory is free: at once, or later."""
        reservation = Reservation(self, size, on_granted)
        self._waiting.append(reservation)
        self._grant()
        return reservation

    def _grant(self) -> None:
        while self._waiting:
            reservation = self._waiting[0]
            if self._reserved and self._reserved + reservation.size > self._size:
                return
            self._waiting.popleft()
            self._reserved += reservation.size
            reservation.granted = True
            reservation.on_granted()

    def _release(self, reservation: Reservation) -> None:
        if reservation.granted:
            reservation.granted = False
            self._reserved -= reservation.size
        elif reservation in self._waiting:
            self._waiting.remove(reservation)
        self._grant()


class Reservation:
    """The memory that one answer holds or waits for."""

    def __init__(self, memory: AnswerMemory, size: int, on_granted: Callable[[], None]) -> None:
        self._memory = memory
        self.size = size
        self.on_granted = on_granted
        self.granted = False

    def release(self) -> None:
        """Give the memory back, or stop waiting for it. A second call does nothing."""
        self._memory._release(self)


MAX_HEAD_BYTES = 64 * 2**10
"""Status line and headers of an answer."""
EXCERPT_BYTES = 4 * 2**10
"""How much is read of an answer whose Content-Length exceeds its bound. The error message quotes these bytes."""
FRAMES_SHARE = 4
"""Chunk frames and trailers of an answer may have 1/FRAMES_SHARE of the size of its body."""


class HttpConnection(asyncio.Protocol):
    """One connection. After an answer, `exchange` may be called again if `reusable` is true."""

    def __init__(self, memory: AnswerMemory) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.reusable = True
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._max_bytes = self._bound = CONTROL_ANSWER_BYTES
        self._received = 0
        """Bytes received since the request was sent: head, body and frames."""
        self._reservation: Reservation | None = None
        self._paused = False
        self._drained: asyncio.Future[None] | None = None
        """While the server reads more slowly than this connection sends."""
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._body: list[bytes] = []
        self._size = 0
        self._head = AnswerHead()
        self._in_body = False
        """Whether the headers have ended and the body has not."""
        self._too_long = False

    async def exchange(self, request: bytes, deadline: float, max_bytes: int, rest: Pieces | None = None) -> Answer:
        """Send `request`, and then `rest`, and return the answer. `deadline` is in the event loop's time. `max_bytes`
        bounds the body of a 2xx answer. Raises Interrupted when the connection breaks or no answer comes in time."""
        if self.transport is None or not self.reusable:
            raise Interrupted("the server closed the connection")
        self._max_bytes, self._received = max_bytes, 0
        waiter = self._waiter = self._loop.create_future()
        self.transport.write(request)
        timer = self._loop.call_at(deadline, self._fail, "no whole answer in time")
        try:
            if rest is not None:
                await self._send(rest.pieces, waiter)
            return await waiter
        except asyncio.CancelledError:
            self.abort()
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # the answer came at the same moment, and nobody gets it
            raise
        finally:
            timer.cancel()
            self._waiter = None

    async def _send(self, pieces: Iterator[bytes], waiter: asyncio.Future[Answer]) -> None:
        """Write the pieces as the server reads them, and let others run after each. Stops when `waiter` is done."""
        assert self.transport is not None
        for piece in pieces:
            if waiter.done():
                self.reusable = False  # the server takes what comes next for the rest of this request
                return
            self.transport.write(piece)
            if self._drained is None:
                await asyncio.sleep(0)
            else:
                await asyncio.wait((self._drained, waiter), return_when=asyncio.FIRST_COMPLETED)

    def abort(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _fail(self, reason: str) -> None:
        self.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Interrupted(reason))

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            # The server sent bytes without a request: close the connection so that they are not read as the next answer
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
            self._end_too_long()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._in_body and not self._head.has_length and exc is None:
            self._complete()  # an answer without a length ends when the server closes the connection
        self._fail(f"{type(exc).__name__}: {exc}" if exc is not None else "the server closed the connection")

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            self.reusable = False  # a second answer to one request
        self._reset_answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.add(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        is_2xx = 200 <= self._parser.get_status_code() < 300
        self._bound = self._max_bytes if is_2xx else min(self._max_bytes, CONTROL_ANSWER_BYTES)
        if self._head.content_length > self._bound:
            self._bound = EXCERPT_BYTES
        elif self._head.content_length > LARGE_ANSWER_BYTES:
            self._reserve(self._head.content_length)

    def on_body(self, body: bytes) -> None:
        remaining = self._bound - self._size
        self._size += len(body)
        if len(body) > remaining:
            self._too_long, body = True, body[: max(0, remaining)]
        self._body.append(body)
        if self._size > LARGE_ANSWER_BYTES and self._reservation is None and not self._too_long:
            self._reserve(self._bound)

    def on_message_complete(self) -> None:
        if self._too_long:
            return
        if self._parser.get_status_code() < 200:  # such as 100 Continue: the final answer follows
            self._in_body = False
            return
        if not self._parser.should_keep_alive():
            self.reusable = False
        self._complete()

    def _reserve(self, size: int) -> None:
        """Reserve memory. Until it is granted, read nothing more from the connection."""
        assert self.transport is not None
        self._reservation = self._memory.reserve(size, self._resume_reading)
        if not self._reservation.granted:
            self._paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()

    def _end_too_long(self) -> None:
        """The answer exceeds its bound: return its beginning, and close the connection."""
        status = self._parser.get_status_code()
        if self._waiter is not None and not self._waiter.done() and status:
            body = b"".join(self._body)[:EXCERPT_BYTES]
            self._waiter.set_result(self._answer(body, whole=False))
        self._body = []
        self._fail("not HTTP: the status line is too long")

    def _complete(self) -> None:
        self._in_body = False
        if self._waiter is not None and not self._waiter.done():
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._waiter.set_result(self._answer(body))
        self._body = []

    def _answer(self, body: bytes, *, whole: bool = True) -> Answer:
        """The answer whose head was parsed. It holds the memory that was reserved for it, if it is whole."""
        status, head = self._parser.get_status_code(), self._head
        if self._reservation is None or not whole:
            return Answer(status, head.content_type, body, head.retry_after_s, whole, head.worker)
        release, self._reservation = self._reservation.release, None
        return Answer(status, head.content_type, body, head.retry_after_s, worker=head.worker, release=release)
