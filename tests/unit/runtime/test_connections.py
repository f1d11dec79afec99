"""Bounds on the bytes and the time of a connection before its client has shown a key. The tests use real sockets and
uvicorn's own server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
import uvicorn
from loop_clock import LoopClock
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl.http import server as connections
from skyrl.http import shared_memory
from skyrl.http.server import HEAD_BYTES, MOST_HEADERS, BoundedHttp
from skyrl.http.shared_memory import STALLED_BYTES_PER_S, UnreadAnswers
from skyrl.runtime.processes.logs import LimitedLog

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
SOON_S = 0.05
GET_LARGE, LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", 32 * 2**20
ANSWER_S = 60


class Server:
    """An application that answers with the length of the body. A request to /held gets its answer after `released`.
    The answer to /endless has no end, that to /large LARGE bytes: more than the sockets hold."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.left = asyncio.Event()
        self.requests = 0
        self.port = 0
        self.opened: list[Connection] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        request = Request(scope, receive)
        if request.url.path == "/large":
            await Response(bytes(LARGE))(scope, receive, send)
            return
        if request.url.path == "/held":
            await self.released.wait()
        if request.url.path == "/endless":
            await self._answer_without_end(receive, send)
            return
        await Response(str(len(await request.body())))(scope, receive, send)

    async def _answer_without_end(self, receive: Receive, send: Send) -> None:
        """Send, as long as the client is there. Then `left` is set."""
        await receive()  # the request
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send_all() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
                await asyncio.sleep(0)

        sending = asyncio.create_task(send_all())
        assert (await receive())["type"] == "http.disconnect"
        sending.cancel()
        self.left.set()

    async def open(self, sent: bytes = b"") -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        await writer.drain()
        self.opened.append(Connection(reader, writer))
        return self.opened[-1]

    async def close(self) -> None:
        self.released.set()
        for connection in self.opened:
            connection.writer.close()
            with suppress(ConnectionError):
                await connection.writer.wait_closed()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_until_closed(self) -> bytes:
        """All bytes that the server sends until it closes the connection."""
        received = b""
        async with asyncio.timeout(ANSWER_S):
            with suppress(ConnectionError):
                while part := await self.reader.read(65536):
                    received += part
        return received

    async def answer(self) -> bytes:
        """The body of one answer."""
        async with asyncio.timeout(ANSWER_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            return await self.reader.readexactly(int(length))


@asynccontextmanager
async def serving(keep_alive_s: float = 5) -> AsyncIterator[Server]:
    server = Server()
    config = uvicorn.Config(server, port=0, http=BoundedHttp, lifespan="off", log_level="error", ws="none")
    config.timeout_keep_alive = keep_alive_s  # pyright: ignore[reportAttributeAccessIssue]  # whole seconds
    web = uvicorn.Server(config)
    config.load()
    web.lifespan = config.lifespan_class(config)
    await web.startup()
    server.port = web.servers[0].sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        await server.close()
        web.force_exit = True
        await web.shutdown()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.mark.parametrize(
    "endless",
    [
        GET + b"X: ",
        b"GET /",
        GET + b"X-1: " + b"a" * 1000 + b"\r\n" + b"X-2: ",
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;",
    ],
    ids=["header", "url", "headers", "trailer", "chunk extension"],
)
async def test_bytes_outside_a_body_are_bounded(server: Server, endless: bytes) -> None:
    connection = await server.open(endless)
    await connection.send(b"a" * (HEAD_BYTES - len(endless)))  # exactly the bound: the server waits for more
    await connection.send(b"a")
    answer = await connection.read_until_closed()
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:80]
    assert b'"detail":"a request may have' in answer


@pytest.mark.parametrize("before", [GET, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"], ids=["head", "trailers"])
async def test_headers_are_counted(server: Server, before: bytes) -> None:
    room = MOST_HEADERS - (before == GET)  # it has the header Host
    connection = await server.open(before + b"a:\r\n" * room + b"\r\n")
    assert await connection.answer() == b"0"
    await connection.send(before + b"a:\r\n" * (room + 1) + b"\r\n")
    assert b'{"detail":"a request may have 256 headers"' in await connection.read_until_closed()


@pytest.mark.parametrize("pieces", [1, 3000])
async def test_long_bodies_are_accepted(server: Server, pieces: int) -> None:
    """In one chunk, and in so many chunks that their frames are longer than the bound of a head."""
    piece = b"b" * (6_000_000 // pieces)
    head = POST + b"X-Long: " + b"a" * (HEAD_BYTES - 1000) + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = await server.open(head + (b"%x\r\n%s\r\n" % (len(piece), piece)) * pieces + b"0\r\n\r\n")
    assert await connection.answer() == b"6000000"
    await connection.send(POST + b"Content-Length: 2\r\n\r\nbb" + POST + b"Content-Length: 3\r\n\r\nbbb")
    assert [await connection.answer(), await connection.answer()] == [b"2", b"3"], (
        "the count starts anew with each request"
    )


async def test_bytes_that_are_not_http_get_a_400_in_json(server: Server) -> None:
    answer = await (await server.open(b"\x16\x03\x01\x02\x00")).read_until_closed()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b'{"detail":"the request is not HTTP/1.1 as this server accepts it","field":null}')


@pytest.mark.parametrize(
    "behind",
    [
        b"\x00garbage\r\n\r\n",
        GET + b"X: " + b"a" * 2 * HEAD_BYTES,
        b"GET /broken HTTP/9\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
    ids=["garbage", "endless head", "no version", "broken chunk"],
)
async def test_a_broken_request_behind_a_running_one_gets_no_answer(server: Server, behind: bytes) -> None:
    """The client would take a 400 for the answer of its running request."""
    connection = await server.open(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await answers_another_connection(server)
    with suppress(ConnectionError):
        await connection.send(behind)
    assert await connection.read_until_closed() == b""


@pytest.mark.parametrize("behind", [b"\x00garbage\r\n\r\n", b"GET /broken HTTP/9\r\n\r\n"])
async def test_a_broken_request_behind_an_answered_one_gets_a_400(server: Server, behind: bytes) -> None:
    connection = await server.open(GET + b"\r\n")
    assert await connection.answer() == b"0"
    await connection.send(behind)
    assert (await connection.read_until_closed()).startswith(b"HTTP/1.1 400 ")


async def answers_another_connection(server: Server) -> bool:
    """Ask on a new connection. When the answer comes, the server has read all earlier bytes of other connections."""
    return await (await server.open(GET + b"\r\n")).answer() == b"0"


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"\r\n",
        GET,
        POST + b"Content-Length: 5\r\n\r\nab",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb",
    ],
    ids=["nothing", "blank lines", "head", "body", "chunk"],
)
async def test_a_request_that_stays_incomplete_is_closed(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete request may take longer."""
    async with serving() as server:
        held = await server.open(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        monkeypatch.setattr(connections, "IDLE_S", SOON_S)
        monkeypatch.setattr(connections, "REST_S", SOON_S)
        await (await server.open(part)).read_until_closed()
        server.released.set()
        assert await held.answer() == b"0"


async def test_an_unused_connection_is_closed_some_time_after_its_last_answer() -> None:
    """The first answer starts the clock. A request that comes or runs meanwhile starts it anew."""
    async with serving(keep_alive_s=1_000) as server:
        clock, connection = LoopClock(), await server.open(GET + b"\r\n")
        assert await connection.answer() == b"0"
        for _ in range(3):
            clock.advance(600)
            assert await answers_another_connection(server)
            await connection.send(GET + b"\r\n")
            assert await connection.answer() == b"0"
        clock.advance(1_001)
        assert await connection.read_until_closed() == b""


async def test_a_connection_is_not_unused_while_its_request_runs() -> None:
    async with serving(keep_alive_s=SOON_S) as server:
        connection = await server.open(GET + b"\r\n" + b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await connection.answer() == b"0"
        assert await (await server.open(GET + b"\r\n")).read_until_closed(), "by now an unused one has been closed"
        server.released.set()
        assert await connection.answer() == b"0"
        assert await connection.read_until_closed() == b""


async def test_a_connection_is_not_unused_while_its_answer_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 1e6)
    async with serving(keep_alive_s=1_000) as server:
        clock, connection = LoopClock(), await server.open(GET + b"\r\n")
        assert await connection.answer() == b"0"
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(GET_LARGE)
        for _ in range(2):
            assert await answers_another_connection(server)
            clock.advance(1_001)
        assert await answers_another_connection(server)
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await connection.answer()) == LARGE
        await connection.send(GET + b"\r\n")
        assert await connection.answer() == b"0"


async def test_a_head_that_comes_line_by_line_is_closed_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REST_S", SOON_S)
    connection = await server.open(GET)
    closed = asyncio.create_task(connection.read_until_closed())
    while not closed.done():
        connection.writer.write(b"X: y\r\n")
        await asyncio.sleep(SOON_S / 10)
    assert await closed == b""


async def test_a_connection_above_the_limit_is_closed_without_an_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 2)
    monkeypatch.setattr(connections, "_refusals", LimitedLog(connections.logger))
    first, second = await server.open(GET), await server.open()
    for _ in range(3):
        assert await (await server.open(GET + b"\r\n")).read_until_closed() == b""
    assert caplog.text.count("connections are refused: 2 are open") == 1
    second.writer.close()
    await first.send(b"\r\n")
    assert await first.answer() == b"0"


async def test_a_head_behind_unanswered_requests_may_wait(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not read the head before the two earlier requests are answered; closing the connection would lose
    them."""
    monkeypatch.setattr(connections, "REST_S", SOON_S)
    connection = await server.open(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n" + GET + b"\r\n" + GET)
    assert await (await server.open(GET)).read_until_closed() == b"", "by now a head that is read has been closed"
    server.released.set()
    assert [await connection.answer() for _ in range(2)] == [b"0", b"0"]
    await connection.send(b"\r\n")
    assert await connection.answer() == b"0"


async def test_an_answer_that_nobody_reads_ends_with_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", SOON_S)
    connection = await server.open(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(ANSWER_S):
        await server.left.wait()


async def test_answers_that_nobody_reads_are_bounded_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "unread", UnreadAnswers(LARGE))
    monkeypatch.setattr(shared_memory, "NEW_S", 1e6)
    unread = [await server.open() for _ in range(3)]
    for connection in unread:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(GET_LARGE)
        assert await answers_another_connection(server)
    for connection in unread:
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert [len(await connection.read_until_closed()) < LARGE for connection in unread[1:]] == [True, True]
    assert len(await unread[0].answer()) == LARGE, "one may wait alone"


class Taking:
    """A transport whose answer is taken."""

    def __init__(self, size: int = 100) -> None:
        self.left, self.aborted = size, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.aborted = True


def test_the_connection_is_cut_whose_client_takes_least() -> None:
    waiting = UnreadAnswers(200)
    slow, none, fast, new, last = transports = [Taking() for _ in range(5)]

    def cut_by(transport: Taking, now: float) -> list[Taking]:
        waiting.add(cast(asyncio.Transport, transport), 100, now)
        return [each for each in transports if each.aborted]

    assert cut_by(slow, 0.0) == cut_by(none, 2.0) == []
    slow.left = 99
    assert cut_by(fast, 10.0) == [none]
    fast.left = 20
    assert cut_by(new, 20.0) == [slow, none], "the newest has had no time yet"
    waiting.remove(cast(asyncio.Transport, fast))
    assert cut_by(last, 20.5) == [slow, none], "what was taken does not count"


def test_of_clients_that_all_go_on_reading_the_newest_is_cut() -> None:
    waiting, size = UnreadAnswers(3 * STALLED_BYTES_PER_S), 2 * STALLED_BYTES_PER_S
    old, new = (Taking(size) for _ in range(2))
    waiting.add(cast(asyncio.Transport, old), size, 0.0)
    old.left = size // 4
    waiting.add(cast(asyncio.Transport, new), size, 1.2)
    assert (old.aborted, new.aborted) == (False, True)


async def test_a_request_behind_an_answer_that_nobody_reads_waits(server: Server) -> None:
    connection = await server.open()
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await connection.send(GET_LARGE * 2)
    assert await answers_another_connection(server)
    await connection.send(GET_LARGE)
    assert await answers_another_connection(server)
    assert server.requests == 3, "one of the three, and two of other connections"
    connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert [len(await connection.answer()) for _ in range(3)] == [LARGE] * 3


async def test_a_slow_reader_keeps_its_connection_while_it_reads(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 1.0)
    connection = await server.open(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(ANSWER_S):
        for _ in range(20):
            await connection.reader.readexactly(400_000)
            await asyncio.sleep(0.1)
    assert not server.left.is_set()
