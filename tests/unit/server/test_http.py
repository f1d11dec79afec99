"""The HTTP client of the forwarding path, over real sockets: which bytes are an answer, and which connections are
reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from skyrl.http import idle_connections
from skyrl.sampling import http
from skyrl.sampling.http import HttpTransport
from skyrl.sampling.transport import Answer, Interrupted, NotAccepted

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
async def transport() -> AsyncIterator[HttpTransport]:
    transport = HttpTransport()
    yield transport
    await transport.close()


async def post(transport: HttpTransport, server: Server, timeout_s: float = LONG_S) -> Answer:
    return await transport.post(server.url, b'{"a":1}', {"X-Session-ID": "s"}, timeout_s)


async def test_a_request_has_exactly_these_bytes(transport: HttpTransport) -> None:
    async with serving(Server(OK)) as server:
        answer = await post(transport, server)
        await transport.get(f"{server.url}?deep=1", {}, LONG_S)
    assert answer == Answer(200, "application/json", b"{}")
    authority = server.url.removeprefix("http://").partition("/")[0]
    expected = f"POST /v1/completions HTTP/1.1\r\nHost: {authority}\r\nX-Session-ID: s\r\nContent-Length: 7\r\n\r\n"
    assert server.heads[0] == expected
    assert server.heads[1].startswith("GET /v1/completions?deep=1 HTTP/1.1\r\n")
    assert server.bodies == [b'{"a":1}', b""]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
    ids=["chunked", "after 100", "empty"],
)
async def test_a_body_is_read_chunked_after_100_continue_or_empty(
    transport: HttpTransport, raw: bytes, expected: bytes
) -> None:
    async with serving(Server(raw)) as server:
        for _ in range(3):
            assert (await post(transport, server)).body == expected
    assert server.connections == 1


async def test_a_body_without_a_length_ends_with_its_connection(transport: HttpTransport) -> None:
    async with serving(Server(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)) as server:
        for _ in range(2):
            assert (await post(transport, server)).body == b"all of it"
    assert server.connections == 2


async def test_an_informational_response_alone_is_an_interruption(transport: HttpTransport) -> None:
    async with serving(Server(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", close=True)) as server:
        with pytest.raises(Interrupted):
            await post(transport, server)


async def test_retry_after_is_read_as_a_number_of_seconds(transport: HttpTransport) -> None:
    answers = [b"HTTP/1.1 429 No\r\nRetry-After: %s\r\nContent-Length: 0\r\n\r\n" % value for value in (b"1.5", b"Mon")]
    async with serving(Server(*answers)) as server:
        assert [(await post(transport, server)).retry_after_s for _ in range(2)] == [1.5, None]


async def test_retry_after_is_read_as_a_date(transport: HttpTransport) -> None:
    dates = [format_datetime(datetime.now(UTC) + timedelta(hours=hours)).encode() for hours in (1, -1)]
    answers = [b"HTTP/1.1 503 No\r\nRetry-After: %s\r\nContent-Length: 0\r\n\r\n" % date for date in dates]
    async with serving(Server(*answers)) as server:
        later, earlier = [(await post(transport, server)).retry_after_s for _ in range(2)]
    assert later is not None
    assert 3000 < later <= 3600
    assert earlier == 0.0


@pytest.mark.parametrize("value", [b"nan", b"inf", b"", b"-1", b"31 Feb 2020 99:99:99 GMT"])
async def test_an_unreadable_retry_after_is_ignored(transport: HttpTransport, value: bytes) -> None:
    answer = b"HTTP/1.1 503 No\r\nRetry-After: %s\r\nContent-Length: 0\r\n\r\n" % value
    async with serving(Server(answer)) as server:
        assert not (await post(transport, server)).retry_after_s


async def test_concurrent_requests_use_separate_connections_and_later_ones_reuse_them(
    transport: HttpTransport,
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
async def test_a_connection_is_not_reused_after_close_or_surplus_bytes(transport: HttpTransport, last: bytes) -> None:
    async with serving(Server(last, OK)) as server:
        await post(transport, server)
        assert (await post(transport, server)).body == b"{}"
        assert server.connections == 2


async def test_idle_connections_are_closed(transport: HttpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_connections, "MAX_IDLE_S", 0.05)
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
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
    ids=["short", "short chunk", "short head", "no HTTP"],
)
async def test_an_incomplete_answer_is_an_interruption(transport: HttpTransport, raw: bytes) -> None:
    async with serving(Server(raw, close=True)) as server:
        with pytest.raises(Interrupted):
            await post(transport, server)


async def test_a_request_without_an_answer_ends_at_its_deadline_and_closes_the_connection(
    transport: HttpTransport,
) -> None:
    async with serving(Server(OK, b"")) as server:
        await post(transport, server)  # opens the connection, so that only the missing answer takes time below
        with pytest.raises(Interrupted, match="no whole answer in time"):
            await post(transport, server, 0.2)
        async with asyncio.timeout(LONG_S):
            await server.closed.wait()


async def test_cancelling_a_request_closes_its_connection(transport: HttpTransport) -> None:
    async with serving(Server(b"")) as server:
        waiting = asyncio.create_task(post(transport, server))
        await server.received(1)
        waiting.cancel()
        async with asyncio.timeout(LONG_S):
            await server.closed.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_requests_wait_for_a_connection_when_the_limit_is_reached() -> None:
    transport = HttpTransport(max_connections=2)
    async with serving(Server(OK)) as server:
        answers = await asyncio.gather(*(post(transport, server) for _ in range(20)))
        assert [answer.status for answer in answers] == [200] * 20
        assert server.connections == 2
        server.answers = [b""]
        held = [asyncio.create_task(post(transport, server)) for _ in range(2)]
        await server.received(22)
        with pytest.raises(NotAccepted, match="no connection was free"):
            await post(transport, server, 0.1)
        server.answers = [OK]
        assert (await transport.get(server.url, {}, LONG_S)).status == 200, (
            "a health request does not count against the limit"
        )
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert (await post(transport, server)).status == 200, "cancelled requests free their connections"
    await transport.close()


@pytest.mark.parametrize("url", ["", "ftp://a/b", "http://", "http://a:99999/", "http://a b/", "http://a/\r\nX: y"])
async def test_an_invalid_url_is_not_accepted(transport: HttpTransport, url: str) -> None:
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
    transport: HttpTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    async with serving(Server(OK), tls=context) as server:
        with pytest.raises(NotAccepted, match="certificate verify failed"):
            await post(transport, server)
        http._address.cache_clear()
        monkeypatch.setattr(http, "_tls", lambda: ssl.create_default_context(cafile=str(file)))
        for _ in range(2):
            assert (await post(transport, server)).status == 200
        assert len(server.bodies) == 2
    http._address.cache_clear()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6's loopback address, ::1")
async def test_an_ipv6_address_is_reached(transport: HttpTransport) -> None:
    async with serving(Server(OK), "::1") as server:
        assert (await post(transport, server)).status == 200
    assert "Host: [::1]:" in server.heads[0]
