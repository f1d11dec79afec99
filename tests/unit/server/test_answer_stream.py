"""An answer that is read while it arrives, over real sockets: where it ends, and how much of it is kept unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from skyrl.sampling.http import MAX_HEAD_BYTES, UNREAD_BYTES, HttpTransport
from skyrl.sampling.transport import Interrupted, NotAccepted

LONG_S = 20.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
PIECE = b"x" * 2**16


@asynccontextmanager
async def server(answer: Callable[[asyncio.StreamWriter], object]) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server that answers one request, and an event that is set when the client has gone."""
    gone = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            answer(writer)
            while await reader.read(2**16):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            gone.set()
            writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    async with listening:
        yield f"http://{host}:{port}/v1", gone


def close_after(*parts: bytes) -> Callable[[asyncio.StreamWriter], object]:
    def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))
        writer.close()

    return answer


async def read_all(url: str, timeout_s: float = LONG_S) -> bytes:
    stream = await HttpTransport().open_stream(url, b"{}", {}, timeout_s)
    try:
        assert (stream.status, stream.head.content_type) == (200, "text/event-stream")
        return (await stream.read_all(2**30))[0]
    finally:
        stream.close()


@pytest.mark.parametrize(
    "wire",
    [
        HEAD + b"Content-Length: 5\r\n\r\nhello",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        HEAD + b"Connection: close\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 5\r\n\r\nhello",
    ],
    ids=["length", "chunks", "until it closes", "after a 100"],
)
async def test_a_whole_answer_ends_where_its_head_says(wire: bytes) -> None:
    async with server(close_after(wire)) as (url, _):
        assert await read_all(url) == b"hello"


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        HEAD,
        HEAD + b"Content-Length: 5\r\n\r\nhell",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",
        b"not HTTP at all\r\n\r\n",
        HEAD + b"X: " + b"x" * MAX_HEAD_BYTES,
    ],
    ids=["nothing", "half a head", "too short", "no last chunk", "not HTTP", "an endless head"],
)
async def test_an_answer_that_breaks_off_is_interrupted(wire: bytes) -> None:
    async with server(close_after(wire)) as (url, _):
        with pytest.raises(Interrupted):
            await read_all(url)


async def test_an_answer_that_does_not_come_in_time_is_interrupted() -> None:
    async with server(lambda _: None) as (url, _):
        with pytest.raises(Interrupted, match="in time"):
            await read_all(url, timeout_s=0.05)


async def test_what_nobody_reads_stays_with_the_server() -> None:
    writers: list[asyncio.StreamWriter] = []

    def send_much(writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (1024 * len(PIECE)))
        for _ in range(1024):
            writer.write(PIECE)

    async with server(send_much) as (url, gone):
        stream = await HttpTransport().open_stream(url, b"{}", {}, LONG_S)
        async with asyncio.timeout(LONG_S):
            while not stream._paused:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        waiting = writers[0].transport.get_write_buffer_size()
        assert waiting > 0
        assert stream._unread < UNREAD_BYTES + 2**20
        body, whole = await stream.read_all(2**30)
        assert (len(body), whole) == (1024 * len(PIECE), True)
        stream.close()
        await asyncio.wait_for(gone.wait(), LONG_S)


async def test_closing_a_stream_ends_the_connection_and_frees_its_place() -> None:
    transport = HttpTransport(max_connections=1)
    async with server(lambda writer: writer.write(HEAD + b"Content-Length: 9\r\n\r\n")) as (url, gone):
        stream = await transport.open_stream(url, b"{}", {}, LONG_S)
        with pytest.raises(NotAccepted, match="no connection was free"):
            await transport.open_stream(url, b"{}", {}, 0.01)
        stream.close()
        stream.close()
        await asyncio.wait_for(gone.wait(), LONG_S)
        (await transport.open_stream(url, b"{}", {}, LONG_S)).close()


async def test_a_server_that_cannot_be_reached_has_not_accepted_the_request() -> None:
    transport = HttpTransport(max_connections=1)
    for _ in range(2):  # the place is free again
        with pytest.raises(NotAccepted, match="Connect"):
            await transport.open_stream("http://127.0.0.1:1/", b"{}", {}, LONG_S)


async def test_a_caller_that_is_cancelled_closes_the_connection() -> None:
    async with server(lambda _: None) as (url, gone):
        opening = asyncio.create_task(HttpTransport().open_stream(url, b"{}", {}, LONG_S))
        await asyncio.sleep(0.05)
        opening.cancel()
        await asyncio.wait_for(gone.wait(), LONG_S)
