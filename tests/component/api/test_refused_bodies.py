"""A request that is refused while its body still arrives: the client gets the answer, however it sends, and the server
reads on within bounds. On real sockets, with clients as people use them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker
from api_harness import BASE, Serve
from router_world import FakeWorker, PromptServer, running_router, until
from sidecar_world import FakeVllm, answers, sidecar_before
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl.api.app import create_app
from skyrl.api.direct_http import protocol_with
from skyrl.http import server as connections
from skyrl.http.serving import Server
from skyrl.router.proxy import Limits
from tests.garbage import skyrl_garbage

LARGE = 60 * 10**6
PIECE = bytes(2**20)
ANSWER_S = 60
KEY = "tml-one"
CHAT = "/v1/chat/completions"
HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer tml-one\r\n"

Answered = tuple[int, str]
"""The status, and the text of the answer."""
Client = Callable[..., Awaitable[Answered]]


def pieces() -> Iterator[bytes]:
    for _ in range(LARGE // len(PIECE) + 1):
        yield PIECE


def with_urllib(url: str, *, chunked: bool) -> Answered:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, pieces() if chunked else bytes(LARGE), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def with_httpx(url: str, *, chunked: bool) -> Answered:
    headers = {"Authorization": f"Bearer {KEY}", "Connection": "close"}
    answer = httpx.post(url, content=pieces() if chunked else bytes(LARGE), headers=headers, timeout=ANSWER_S)
    return answer.status_code, answer.text


@dataclass
class Curl:
    program: str
    body: Path

    async def __call__(self, url: str, *, chunked: bool) -> Answered:
        framing = ["-H", "Transfer-Encoding: chunked"] if chunked else []
        running = await asyncio.create_subprocess_exec(
            self.program, "-sS", "--max-time", str(ANSWER_S), "-w", "\n%{http_code}", "--data-binary", f"@{self.body}",
            "-H", f"Authorization: Bearer {KEY}", "-H", "Connection: close", "-H", "Expect:", *framing, url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, complaint = await running.communicate()
        assert running.returncode == 0, complaint.decode()
        text, _, status = output.decode().rpartition("\n")
        return int(status), text


@contextlib.asynccontextmanager
async def on_a_port(server: Server) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def api_server(serve: Serve, **options: object) -> AsyncIterator[str]:
    async with serve(**options) as api:
        app = create_app(api.services)
        app.prepare()
        async with on_a_port(PromptServer(app, drain_s=1, http=protocol_with(app))) as url:
            yield url


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[str]:
    async with api_server(serve) as url:
        yield url


class Table:
    """An application that refuses all bodies unread, and closes the connection. A request to /waits reads its body,
    until its client leaves."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.waits = asyncio.Event()
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        if scope["path"] == "/waits":
            self.waits.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left += 1
            return
        await Response("too large", 413, {"Connection": "close"})(scope, receive, send)


@pytest.fixture
async def front_table() -> AsyncIterator[Table]:
    table = Table()
    async with on_a_port(PromptServer(table, drain_s=1)) as table.url:
        yield table


@pytest.fixture(params=["urllib", "httpx", "curl"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    if request.param == "curl":
        program = shutil.which("curl")
        if program is None:
            pytest.skip("needs curl (Debian's package)")
        body = tmp_path / "body"
        body.write_bytes(bytes(LARGE))
        return Curl(program, body)
    blocking = with_urllib if request.param == "urllib" else with_httpx

    async def ask(url: str, *, chunked: bool) -> Answered:
        return await asyncio.to_thread(blocking, url, chunked=chunked)

    return ask


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_the_clients_see_why_the_server_refuses(server: str, client: Client, chunked: bool) -> None:
    status, text = await client(server + CHAT, chunked=chunked)
    assert status == 413
    assert json.loads(text)["error"]["code"] == "request_too_large"
    status, text = await client(f"{server}/api/v1/create_session", chunked=chunked)
    assert status == 413
    assert str(2**20) in json.loads(text)["detail"]


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_the_clients_see_why_the_router_refuses(client: Client, chunked: bool) -> None:
    async with running_router(FakeWorker(), limits=Limits(body_bytes=2**20)) as router:
        for path in ("/generate", "/register"):
            status, text = await client(router.url + path, chunked=chunked)
            assert status == 413
            assert json.loads(text)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_the_clients_see_why_the_sidecar_refuses(client: Client, chunked: bool) -> None:
    async with sidecar_before(FakeVllm(answers({})), max_body_bytes=2**20) as sidecar:
        status, text = await client(f"{sidecar.url}/generate", chunked=chunked)
        assert status == 413
        assert str(2**20) in json.loads(text)["error"]["message"]


async def test_a_large_body_with_a_wrong_key_gets_a_401(server: str) -> None:
    def ask() -> int:
        connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("POST", CHAT, bytes(LARGE), {"Connection": "close"})
            return connection.getresponse().status

    assert await asyncio.to_thread(ask) == 401


async def test_the_sdk_shows_the_message(serve: Serve) -> None:
    def sample(url: str) -> None:
        sampler = (
            tinker.ServiceClient(base_url=url, api_key=KEY).create_sampling_client(base_model=BASE).result(ANSWER_S)
        )
        prompt = tinker.ModelInput.from_ints([100_000] * 2**20)
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1)).result(ANSWER_S)

    async with api_server(serve, max_body_bytes=2**20) as url:
        with pytest.raises(tinker.APIStatusError, match=f"at most {2**20} are accepted") as refused:
            await asyncio.to_thread(sample, url)
    assert refused.value.status_code == 413


@dataclass
class Raw:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """The status of the next answer. Reads the whole answer."""
        async with asyncio.timeout(ANSWER_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            await self.reader.readexactly(int(length))
        return int(head.split()[1])

    async def closed(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(2**16):
                    pass


@contextlib.asynccontextmanager
async def raw(url: str, sent: bytes) -> AsyncIterator[Raw]:
    address = httpx.URL(url)
    client = Raw(*await asyncio.open_connection(address.host, address.port))
    try:
        await client.send(sent)
        yield client
    finally:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
async def test_a_client_that_sends_for_ever_is_cut_off(
    server: str, close: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REFUSED_BYTES", 8 * 2**20)
    async with raw(server, HEAD % b"/api/v1/create_session" + close + b"Transfer-Encoding: chunked\r\n\r\n") as client:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 256 * 2**20:
                await client.send(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
                sent += len(PIECE)
    assert 8 * 2**20 <= sent < 128 * 2**20  # the sockets hold some of it


async def test_a_client_that_stops_sending_is_cut_off(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REFUSED_S", 0.05)
    async with raw(server, HEAD % CHAT.encode() + b"Content-Length: %d\r\n\r\nx" % LARGE) as client:
        assert await client.status() == 413
        await client.closed()


async def test_a_client_that_sends_a_little_now_and_then_is_cut_off(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REFUSED_S", 0.2)
    async with raw(server, HEAD % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % LARGE) as client:
        assert await client.status() == 413
        async with asyncio.timeout(ANSWER_S):
            with contextlib.suppress(ConnectionError):
                while not client.reader.at_eof():
                    await client.send(b"x")
                    await asyncio.sleep(0.01)


async def test_the_connection_serves_the_next_request_after_the_rest(server: str) -> None:
    async with raw(server, HEAD % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % LARGE) as client:
        assert await client.status() == 413
        await client.send(bytes(LARGE) + HEAD.replace(b"POST", b"GET") % b"/api/v1/healthz" + b"\r\n")
        assert await client.status() == 200


async def test_the_connection_is_closed_after_the_rest_if_the_client_asks_for_that(server: str) -> None:
    head = HEAD % CHAT.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % LARGE
    async with raw(server, head) as client:
        assert await client.status() == 413
        await client.send(bytes(LARGE))
        async with asyncio.timeout(ANSWER_S):
            assert await client.reader.read() == b""  # an end, and no reset


async def test_a_request_behind_the_last_one_of_a_connection_is_not_run(front_table: Table) -> None:
    head = HEAD % CHAT.encode() + b"Content-Length: 5\r\n\r\n"
    async with raw(front_table.url, head) as client:
        assert await client.status() == 413
        behind = HEAD.replace(b"POST", b"GET") % b"/behind" + b"\r\n"
        await client.send(b"abcde" + behind)
        await client.closed()
    assert front_table.asked == [CHAT]


async def test_refused_bodies_leave_nothing_to_the_garbage_collector(front_table: Table) -> None:
    head = HEAD % CHAT.encode() + b"Content-Length: 5\r\n\r\n"
    with skyrl_garbage() as found:
        for _ in range(10):
            async with raw(front_table.url, head) as client:
                assert await client.status() == 413
                await client.send(b"abcde")
                await client.closed()
            async with raw(front_table.url, head.replace(CHAT.encode(), b"/waits")) as client:
                await front_table.waits.wait()
                front_table.waits.clear()
        await until(lambda: front_table.left == 10)
    assert found.total() < 5, found
