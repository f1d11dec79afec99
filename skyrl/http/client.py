"""HTTP/1.1 requests on kept connections: an answer as a whole up to a bound, or as a stream while it arrives.

All large answers of a client share memory: the rest of a large answer is read only after memory was reserved
for it. Small answers need no reservation. Closing an `AnswerStream` before its end ends the connection, so that the
server stops computing what nobody reads.

No redirects, cookies, proxies or content codings: what asks here does not need them, and no sample pays for them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

import msgspec

from skyrl.http.answers import (
    LARGE_ANSWER_BYTES,
    MEMORY_BYTES,
    Answer,
    content_type_of,
    header_of,
    hold_nothing,
)
from skyrl.http.connection import (
    HEAD_TOO_LONG,
    MAX_HEAD_BYTES,
    Address,
    Connection,
    HeaderList,
    Interrupted,
    Pool,
    address_of,
    connect,
)
from skyrl.http.shared_memory import Reservation, SharedMemory

CONTROL_ANSWER_BYTES = 2**20
"""The bound of answers that are not 2xx, and of answers for which the caller gives no bound (health, adapter loads)."""


class Pieces(msgspec.Struct):
    """The end of a long body, which is made while it is sent. `size`: the bytes of all pieces together."""

    size: int
    pieces: Iterator[bytes]


EXCERPT_BYTES = 4 * 2**10
"""How much is read of an answer whose Content-Length exceeds its bound. The error message quotes these bytes."""
FRAMES_SHARE = 4
"""Chunk frames and trailers of an answer may have 1/FRAMES_SHARE of the size of its body."""


class _WholeAnswer:
    """Takes an answer from its connection to its end. `max_bytes` bounds the body of a 2xx answer."""

    __slots__ = ("_bound", "_connection", "_held", "_memory", "_parts", "_reservation", "_size", "answer", "max_bytes")

    def __init__(self, connection: Connection, memory: SharedMemory, max_bytes: int) -> None:
        self._connection = connection
        self._memory = memory
        self.max_bytes = max_bytes
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._bound = -1
        """Of the body; -1 before the head is there."""
        self._parts: list[bytes] = []
        self._size = 0
        self._reservation: Reservation | None = None
        self._held = False
        """Memory has not been granted yet."""

    async def exchange(self, request: bytes, deadline: float, rest: Pieces | None) -> Answer:
        """Send `request`, and then `rest`, and return the answer. `deadline` is in the event loop's time. Raises
        Interrupted when the connection breaks or no answer comes in time."""
        connection = self._connection
        if connection.failure is not None:
            raise Interrupted(connection.failure)
        connection.sink = self
        connection.send(request)
        timer = None
        if deadline < math.inf:
            timer = asyncio.get_running_loop().call_at(deadline, connection.abort, "no whole answer in time")
        try:
            if rest is not None:
                await self._send(rest.pieces)
            return await self.answer
        except BaseException:
            if self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None:
                self.answer.result().release()  # the answer came at the same moment, and nobody gets it
            self.answer.cancel()
            connection.abort()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if self._reservation is not None:
                self._reservation.release()

    async def _send(self, pieces: Iterator[bytes]) -> None:
        """Write the pieces as the server reads them, and let others run after each. Stops when the answer is there."""
        connection = self._connection
        assert connection.transport is not None
        for piece in pieces:
            if self.answer.done():
                connection.reusable = False  # the server takes what comes next for the rest of this request
                return
            connection.transport.write(piece)
            if connection.writable is None:
                await asyncio.sleep(0)
            else:
                await asyncio.wait((connection.writable, self.answer), return_when=asyncio.FIRST_COMPLETED)

    def advance(self) -> None:
        connection = self._connection
        if self.answer.done() or (self._held and connection.failure is None):
            return
        if not connection.head_complete:
            if connection.failure is HEAD_TOO_LONG and connection.status:
                self._end(whole=False)
            elif connection.failure is not None:
                self.answer.set_exception(Interrupted(connection.failure))
            return
        body = connection.take()
        self._size += len(body)
        if self._bound < 0:
            is_2xx = 200 <= connection.status < 300
            self._bound = self.max_bytes if is_2xx else min(self.max_bytes, CONTROL_ANSWER_BYTES)
            if not connection.complete:
                self._read_length()
        if connection.complete and self._size <= self._bound:
            self._end(body)
            return
        self._parts.append(body)
        beside = MAX_HEAD_BYTES + self._size // FRAMES_SHARE
        if self._size > self._bound or connection.received > self._size + beside:
            self._end(whole=False)
        elif connection.failure is not None:
            self.answer.set_exception(Interrupted(connection.failure))
        elif self._size > LARGE_ANSWER_BYTES and self._reservation is None:
            self._reserve(self._bound)

    def _read_length(self) -> None:
        length = header_of(self._connection.headers, b"content-length") or ""
        if not length.isdigit():
            return
        if int(length) > self._bound:
            self._bound = min(self._bound, EXCERPT_BYTES)
        elif int(length) > LARGE_ANSWER_BYTES:
            self._reserve(int(length))

    def _reserve(self, size: int) -> None:
        """Reserve memory. Until it is granted, read nothing more from the connection."""
        self._reservation = self._memory.reserve(size, self._go_on)
        if not self._reservation.granted:
            self._held = True
            self._connection.pause()

    def _go_on(self) -> None:
        if self._held:
            self._held = False
            self.advance()

    def _end(self, last: bytes = b"", *, whole: bool = True) -> None:
        """`whole`: the answer is complete, with `last`, and holds the memory that was reserved for it. Else it exceeds
        its bound: the connection is closed."""
        connection = self._connection
        body = b"".join((*self._parts, last)) if self._parts else last
        self._parts = []
        release = hold_nothing
        if not whole:
            body = body[: min(self._bound, EXCERPT_BYTES)]
        elif self._reservation is not None:
            release, self._reservation = self._reservation.release, None
        self.answer.set_result(Answer(connection.status, body, connection.headers, whole, release))
        if not whole:
            connection.abort("the answer exceeds its bound")


class AnswerStream:
    """Reads an answer while it arrives: its head, then its body piece by piece, as an iterator or with `read`. `close`
    calls `on_close`, once and at once; what still sends the request's body is cancelled, and its connection closed."""

    def __init__(self, connection: Connection, on_close: Callable[[], None] | None = None) -> None:
        self.connection = connection
        connection.sink = self
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    @property
    def status(self) -> int:
        return self.connection.status

    @property
    def headers(self) -> HeaderList:
        return self.connection.headers

    @property
    def content_type(self) -> str:
        return content_type_of(self.headers)

    async def ask(
        self, request: bytes, body: bytes | AsyncIterator[bytes], length: int | None, *, without_body: bool
    ) -> None:
        """Send a request, and wait for `status` and `headers` of its answer. `request` is its head but for the length.
        `length`: of the body; negative: the body is sent in chunks; None: there is none. `without_body`: the answer has
        none (HEAD). Raises Interrupted."""
        chunked = length is not None and length < 0
        if length is not None:
            request += b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % length
        if isinstance(body, bytes):
            self.connection.send(b"%s\r\n%s" % (request, body), without_body=without_body)
        else:
            self.connection.send(b"%s\r\n" % request, without_body=without_body)
            self._sending = asyncio.create_task(self._send(body, chunked))
        while not self.connection.head_complete:
            await self._wait()

    async def _send(self, body: AsyncIterator[bytes], chunked: bool) -> None:
        connection = self.connection
        try:
            async for chunk in body:
                if not chunk:
                    continue  # an empty chunk would end the body
                await connection.send_more(b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunked else chunk)
            if chunked:
                await connection.send_more(b"0\r\n\r\n")
        except Interrupted:
            return  # whoever reads the answer meets the same failure
        except Exception as error:  # without the rest of the body the server would wait for ever
            connection.abort(f"the body of the request could not be read to its end: {type(error).__name__}: {error}")

    def end_at(self, deadline: float) -> None:
        """Close the connection if the whole answer has not been read at this time of the event loop."""
        self._timer = asyncio.get_running_loop().call_at(deadline, self.connection.abort, "no whole answer in time")

    def advance(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> bytes:
        """What has arrived of the body, at least one byte; empty at its end. Raises Interrupted if the connection broke
        before its end."""
        while not self.connection.unread:
            if self.connection.complete:
                return b""
            await self._wait()
        return self.connection.take()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The rest of the body, in the pieces in which it comes. Raises Interrupted."""
        while piece := await self.read():
            yield piece

    async def read_all(self, max_bytes: int) -> tuple[bytes, bool]:
        """The rest of the body, and whether it is whole: at most its first `max_bytes` are kept."""
        pieces: list[bytes] = []
        size = 0
        while size <= max_bytes and (piece := await self.read()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)[:max_bytes], size <= max_bytes

    async def _wait(self) -> None:
        """Until something has arrived. Raises Interrupted."""
        if self.connection.failure is not None:
            raise Interrupted(self.connection.failure)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """End the connection, unless the whole answer has been read. A second call does nothing."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None and not self._sending.done():
            self._sending.cancel()
            self.connection.reusable = False  # the server takes what comes next for the rest of this request
        self.connection.sink = None
        if not self.connection.at_end:
            self.connection.abort()
        on_close()


CONNECT_TIMEOUT_S = 10.0


class HttpClient:
    """Keeps unused connections by origin and takes the most recently used first. `memory_bytes` is for all large
    answers together. `max_bytes` bounds the body of a 2xx answer: no more is read, and the connection of a longer one
    is closed. So is that of a caller that is cancelled: the server learns that nobody needs the answer.

    Header values are not checked: they come from the configuration, from ids that the server made, or from a request
    that was parsed."""

    def __init__(self, *, memory_bytes: float = MEMORY_BYTES, connect_s: float = CONNECT_TIMEOUT_S) -> None:
        self.pool = Pool()
        self._memory = SharedMemory(memory_bytes)
        self._connect_s = connect_s

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        max_bytes: int = CONTROL_ANSWER_BYTES,
        rest: Pieces | None = None,
    ) -> Answer:
        """The body is `body`, followed by the pieces of `rest`. They are taken no faster than the server reads, and not
        to their end if the server answers before. Raises NotAccepted and Interrupted."""
        address = address_of(url)
        request = _encode("POST", address, body, headers, 0 if rest is None else rest.size)
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await self._exchange(address, request, deadline, max_bytes, rest)

    async def get(
        self, url: str, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer:
        """Raises NotAccepted and Interrupted."""
        address = address_of(url)
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await self._exchange(address, _encode("GET", address, b"", headers), deadline, max_bytes)

    async def open_stream(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> AnswerStream:
        """Post a request, and return its answer once the head is there. The caller must close the stream.
        Raises NotAccepted and Interrupted."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")
        return await self.open("POST", url, b"", lines, body, len(body), timeout_s=timeout_s)

    async def open(
        self,
        method: str,
        url: str,
        target: bytes,
        lines: bytes,
        body: bytes | AsyncIterator[bytes] = b"",
        length: int | None = None,
        *,
        timeout_s: float = math.inf,
    ) -> AnswerStream:
        """As `open_stream`, for any request. `target`, path and query, is appended to those of `url`. `lines` are the
        headers but for the length. `length`: see `AnswerStream.ask`."""
        stream = await self.reach(url, timeout_s)
        try:
            head = head_of(method, address_of(url), target, lines)
            await stream.ask(head, body, length, without_body=method == "HEAD")
        except BaseException:
            stream.close()
            raise
        return stream

    async def reach(self, url: str, timeout_s: float = math.inf) -> AnswerStream:
        """A connection for one request, which the caller sends with `ask`. Raises NotAccepted."""
        address = address_of(url)
        deadline = asyncio.get_running_loop().time() + timeout_s
        connection = self.pool.take(address.origin) or await self._connect(address, deadline)
        stream = AnswerStream(connection, lambda: self.pool.give_back(address.origin, connection))
        if deadline < math.inf:
            stream.end_at(deadline)
        return stream

    async def _exchange(
        self, address: Address, request: bytes, deadline: float, max_bytes: int, rest: Pieces | None = None
    ) -> Answer:
        connection = self.pool.take(address.origin) or await self._connect(address, deadline)
        answer = await _WholeAnswer(connection, self._memory, max_bytes).exchange(request, deadline, rest)
        self.pool.give_back(address.origin, connection)
        return answer

    async def _connect(self, address: Address, deadline: float) -> Connection:
        left_s = deadline - asyncio.get_running_loop().time()
        return await connect(address.origin, min(self._connect_s, left_s))

    async def close(self) -> None:
        self.pool.close()


async def ask_once(
    method: str, url: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, connect_s: float, max_bytes: int
) -> Answer:
    """One request on a connection of its own: an answer shows that the server accepts connections. Raises NotAccepted
    and Interrupted."""
    address = address_of(url)
    connection = await connect(address.origin, connect_s)
    try:
        head = head_of(method, address, b"", lines_of((*headers, (b"Connection", b"close"))))
        request = b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)
        return await _WholeAnswer(connection, SharedMemory(MEMORY_BYTES), max_bytes).exchange(request, math.inf, None)
    finally:
        connection.sink = None
        connection.abort()


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


def head_of(method: str, address: Address, target: bytes, lines: bytes) -> bytes:
    """The head of a request but for its length and the empty line."""
    path = address.path + target or b"/"
    return b"%s %s HTTP/1.1\r\nHost: %s\r\n%s" % (method.encode(), path, address.host, lines)


def _encode(method: str, address: Address, body: bytes, headers: Mapping[str, str], rest_bytes: int = 0) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")
    head = head_of(method, address, b"", lines)
    return b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body) + rest_bytes, body)
