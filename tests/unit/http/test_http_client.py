"""The hot HTTP client, over real sockets: which bytes are an answer, read as a whole and as a stream; which connections
are reused; how much of an answer is kept unread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from loop_clock import LoopClock

from skyrl.http import connection as connection_module
from skyrl.http.answers import Answer
from skyrl.http.client import HttpClient
from skyrl.http.connection import (
    HIGH_WATER_BYTES,
    MAX_HEAD_BYTES,
    Connection,
    Interrupted,
    NotAccepted,
    Origin,
    Pool,
    connect,
)

LONG_S = 20.0
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Sends the next of `answers` after each whole request, the last one again and again; counts connections. `closed`
    is set when a connection ends, `arrived` when a request is whole."""

    def __init__(self, *answers: bytes, close: bool = False) -> None:
        self.answers = list(answers)
        self.close = close
        self.connections = 0
        self.open = 0
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.url = ""
        self.closed = asyncio.Event()
        self.arrived = asyncio.Event()

    async def received(self, requests: int) -> None:
        async with asyncio.timeout(LONG_S):
            while len(self.bodies) < requests:
                self.arrived.clear()
                await self.arrived.wait()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.arrived.set()
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer:
                    writer.write(answer)
                    await writer.drain()
                if answer and self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            self.closed.set()
            writer.close()


@contextlib.asynccontextmanager
async def serving(server: Server, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    listening = await asyncio.start_server(server.talk, host, 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1/completions"
    async with listening:
        yield server


@pytest.fixture
async def transport() -> AsyncIterator[HttpClient]:
    transport = HttpClient()
    yield transport
    await transport.close()


async def post(transport: HttpClient, server: Server, timeout_s: float = LONG_S) -> Answer:
    return await transport.post(server.url, b'{"a":1}', {"X-Session-ID": "s"}, timeout_s)


async def test_a_request_has_exactly_these_bytes(transport: HttpClient) -> None:
    async with serving(Server(OK)) as server:
        answer = await post(transport, server)
        await transport.get(f"{server.url}?deep=1", {}, LONG_S)
    assert (answer.status, answer.content_type, answer.body, answer.whole) == (200, "application/json", b"{}", True)
    authority = server.url.removeprefix("http://").partition("/")[0]
    expected = f"POST /v1/completions HTTP/1.1\r\nHost: {authority}\r\nX-Session-ID: s\r\nContent-Length: 7\r\n\r\n"
    assert server.heads[0] == expected
    assert server.heads[1].startswith("GET /v1/completions?deep=1 HTTP/1.1\r\n")
    assert server.bodies == [b'{"a":1}', b""]


async def streamed(client: HttpClient, server: Server, timeout_s: float = LONG_S) -> Answer:
    stream = await client.open_stream(server.url, b"{}", {}, timeout_s)
    try:
        body, whole = await stream.read_all(2**30)
        return Answer(stream.status, body, whole=whole)
    finally:
        stream.close()


@pytest.fixture(params=[post, streamed], ids=["whole", "stream"])
def ask(request: pytest.FixtureRequest) -> Callable[..., Awaitable[Answer]]:
    """Both ways to read an answer."""
    return request.param


Ask = Callable[..., Awaitable[Answer]]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No\r\n\r\n", b""),
    ],
    ids=["chunked", "after 100", "empty", "204"],
)
async def test_an_answer_ends_where_its_head_says(transport: HttpClient, ask: Ask, raw: bytes, expected: bytes) -> None:
    async with serving(Server(raw)) as server:
        for _ in range(3):
            assert (await ask(transport, server)).body == expected
    assert server.connections == 1


async def test_a_body_without_a_length_ends_with_its_connection(transport: HttpClient, ask: Ask) -> None:
    async with serving(Server(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)) as server:
        for _ in range(2):
            assert (await ask(transport, server)).body == b"all of it"
    assert server.connections == 2


def retry_after(value: str) -> float | None:
    return Answer(429, b"", [(b"retry-after", value.encode())]).retry_after_s


@pytest.mark.parametrize(("value", "expected"), [("1.5", 1.5), ("-1", 0)])
def test_retry_after_is_a_number_of_seconds(value: str, expected: float) -> None:
    assert retry_after(value) == expected


@pytest.mark.parametrize(("hours", "least", "most"), [(1, 3500, 3600), (-1, 0, 0)])
def test_retry_after_is_a_date(hours: int, least: float, most: float) -> None:
    seconds = retry_after(format_datetime(datetime.now(UTC) + timedelta(hours=hours)))
    assert seconds is not None
    assert least <= seconds <= most


@pytest.mark.parametrize("value", [b"nan", b"inf", b"", b"Mon", b"31 Feb 2020 99:99:99 GMT"])
def test_an_unreadable_retry_after_is_ignored(value: bytes) -> None:
    assert Answer(503, b"", [(b"retry-after", value)]).retry_after_s is None


async def test_concurrent_requests_use_separate_connections_and_later_ones_reuse_them(
    transport: HttpClient,
) -> None:
    async with serving(Server(OK)) as server:
        for _ in range(3):
            await asyncio.gather(*(post(transport, server) for _ in range(5)))
        assert server.connections == 5
        await post(transport, server)
        assert server.connections == 5


@pytest.mark.parametrize(
    "last",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
    ],
    ids=["told to close", "two answers"],
)
async def test_a_connection_is_not_reused_after_close_or_surplus_bytes(transport: HttpClient, last: bytes) -> None:
    async with serving(Server(last, OK)) as server:
        await post(transport, server)
        assert (await post(transport, server)).body == b"{}"
        assert server.connections == 2


async def test_idle_connections_are_closed(transport: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_IDLE_S", 0.05)
    async with serving(Server(OK)) as server:
        await asyncio.gather(*(post(transport, server) for _ in range(3)))
        async with asyncio.timeout(LONG_S):
            while server.open:
                server.closed.clear()
                await server.closed.wait()
        assert (await post(transport, server)).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 O",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"x" * MAX_HEAD_BYTES,
    ],
    ids=["short", "short chunk", "short head", "informational alone", "no HTTP", "an endless status line"],
)
async def test_an_incomplete_answer_is_an_interruption(transport: HttpClient, ask: Ask, raw: bytes) -> None:
    async with serving(Server(raw, close=True)) as server:
        with pytest.raises(Interrupted):
            await ask(transport, server)


async def test_a_stream_with_an_endless_head_is_interrupted(transport: HttpClient) -> None:
    async with serving(Server(b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES)) as server:
        with pytest.raises(Interrupted, match="too long"):
            await streamed(transport, server)


async def test_a_request_without_an_answer_ends_at_its_deadline_and_closes_the_connection(
    transport: HttpClient, ask: Ask
) -> None:
    async with serving(Server(b"")) as server:
        with pytest.raises(Interrupted, match="no whole answer in time"):
            await ask(transport, server, 0.5)
        async with asyncio.timeout(LONG_S):
            await server.closed.wait()


async def test_cancelling_a_request_closes_its_connection(transport: HttpClient, ask: Ask) -> None:
    async with serving(Server(b"")) as server:
        waiting = asyncio.ensure_future(ask(transport, server))
        await server.received(1)
        waiting.cancel()
        async with asyncio.timeout(LONG_S):
            await server.closed.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_closing_a_stream_ends_the_connection(transport: HttpClient) -> None:
    async with serving(Server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")) as server:
        stream = await transport.open_stream(server.url, b"{}", {}, LONG_S)
        stream.close()
        stream.close()
        await asyncio.wait_for(server.closed.wait(), LONG_S)


async def test_an_empty_piece_does_not_end_a_body_that_is_sent_in_chunks(transport: HttpClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a", b"", b"b"):
            yield piece

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(OK)
        writer.close()

    body: list[bytes] = []
    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        stream = await transport.open("POST", f"http://127.0.0.1:{port}/", b"", b"", pieces(), -1, timeout_s=LONG_S)
        await stream.read_all(2**10)
        stream.close()
    assert body == [b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"]


async def test_a_server_that_cannot_be_reached_has_not_accepted_the_request(transport: HttpClient) -> None:
    with pytest.raises(NotAccepted, match="Connect") as caught:
        await transport.open_stream("http://127.0.0.1:1/", b"{}", {}, LONG_S)
    assert caught.value.refused


async def test_what_nobody_reads_stays_with_the_server(transport: HttpClient) -> None:
    size = 64 * 2**20
    async with serving(Server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)) as server:
        stream = await transport.open_stream(server.url, b"{}", {}, LONG_S)
        async with asyncio.timeout(LONG_S):
            while stream.connection.unread <= HIGH_WATER_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert stream.connection.unread < HIGH_WATER_BYTES + 2**20
        body, whole = await stream.read_all(2**30)
        assert (len(body), whole) == (size, True)
        stream.close()
        await asyncio.wait_for(server.closed.wait(), LONG_S)


@pytest.mark.parametrize("url", ["", "ftp://a/b", "http://", "http://a:99999/", "http://a b/", "http://a/\r\nX: y"])
async def test_an_invalid_url_is_not_accepted(transport: HttpClient, url: str) -> None:
    with pytest.raises(NotAccepted):
        await transport.get(url, {}, LONG_S)


def certificate(directory: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate_of_loopback = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = directory / "certificate.pem"
    file.write_bytes(certificate_of_loopback.public_bytes(pem) + private)
    return file


async def test_the_servers_certificate_is_verified(
    transport: HttpClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    async with serving(Server(OK), tls=context) as server:
        with pytest.raises(NotAccepted, match="certificate verify failed"):
            await post(transport, server)
        monkeypatch.setattr(connection_module, "_tls", lambda: ssl.create_default_context(cafile=str(file)))
        for _ in range(2):
            assert (await post(transport, server)).status == 200
        assert len(server.bodies) == 2


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6's loopback address, ::1")
async def test_an_ipv6_address_is_reached(transport: HttpClient) -> None:
    async with serving(Server(OK), "::1") as server:
        assert (await post(transport, server)).status == 200
    assert "Host: [::1]:" in server.heads[0]


# Which unused connection a client takes next, and which are closed. No bytes.

SERVER = Origin("server", 80, False)


class Unused(Connection):
    """A connection after a whole answer."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = True

    @property
    def closed(self) -> bool:
        return self.failure is not None


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "REFRESH_S", 1_000.0)
    monkeypatch.setattr(connection_module, "MAX_IDLE_S", 2_000.0)


@pytest.mark.usefixtures("short")
async def test_connections_that_a_peak_needed_stay_open_while_there_is_traffic() -> None:
    clock, kept = LoopClock(), Pool()
    peak = [Unused() for _ in range(5)]
    for connection in peak:
        kept.give_back(SERVER, connection)
    for _ in range(30):  # three times MAX_IDLE_S, one request at a time
        clock.advance(200.0)
        for _ in range(2):
            await asyncio.sleep(0)  # what is due runs before the next request
        taken = kept.take(SERVER)
        assert taken in peak
        kept.give_back(SERVER, taken)
    assert not any(connection.closed for connection in peak)
    kept.close()


@pytest.mark.usefixtures("short")
async def test_after_a_burst_a_few_unused_connections_are_closed_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "SWEPT_PER_TURN", 2)
    clock, kept = LoopClock(), Pool()
    unused = [Unused() for _ in range(5)]
    for connection in unused:
        kept.give_back(SERVER, connection)
    clock.advance(2_001.0)
    closed = [0]
    while closed[-1] < 5:
        await asyncio.sleep(0)
        closed.append(sum(connection.closed for connection in unused))
    assert sorted({*closed}) == [0, 2, 4, 5]


async def test_a_connection_breaks_when_its_servers_machine_is_gone_without_a_word() -> None:
    """Else a request would wait for its answer until its deadline."""
    async with serving(Server(OK)) as server:
        connection = await connect(connection_module.address_of(server.url).origin)
        assert connection.transport is not None
        link = connection.transport.get_extra_info("socket")
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        assert [link.getsockopt(socket.IPPROTO_TCP, option) for option in tcp] == [15, 5, 3]
        connection.abort()


async def test_the_most_recently_used_connection_is_taken_while_no_other_is_about_to_be_too_old() -> None:
    kept = Pool()
    older, newer = Unused(), Unused()
    kept.give_back(SERVER, older)
    kept.give_back(SERVER, newer)
    assert kept.take(SERVER) is newer
    kept.close()
    assert older.closed


@pytest.mark.usefixtures("short")
async def test_connections_that_are_too_old_are_closed_and_not_given() -> None:
    kept = Pool()
    old = [Unused(), Unused()]
    for connection in old:
        kept.give_back(SERVER, connection)
    for connection in old:
        connection.idle_since -= 10_000.0
    fresh = Unused()
    kept.give_back(SERVER, fresh)
    assert kept.take(SERVER) is fresh
    assert all(connection.closed for connection in old)
    assert kept.take(SERVER) is None
    kept.close()


async def test_a_connection_whose_answer_was_not_taken_to_its_end_is_closed() -> None:
    kept = Pool()
    left = Unused()
    left.complete = False
    left.on_body(b"of another client")
    left.complete = True
    kept.give_back(SERVER, left)
    assert left.closed
    assert kept.take(SERVER) is None
    kept.close()
