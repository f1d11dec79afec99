"""The short way of `asample` and `retrieve_future`, on real sockets: it answers as uvicorn's way does, and leaves to
uvicorn what is not one small, whole request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import zstandard
from api_harness import Api, Serve, sample_body, scrape
from fake_upstream import FakeUpstream, after, complete
from router_world import PromptServer, until

from skyrl.api import direct_http, table
from skyrl.api.app import create_app
from skyrl.api.call import IncomingHeaders
from skyrl.api.direct_http import DirectHttp, DirectRequest, protocol_with
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.http.server import HEAD_BYTES
from tests.garbage import skyrl_garbage

ANSWER_S = 60
ASAMPLE, RETRIEVE = b"/api/v1/asample", b"/api/v1/retrieve_future"
KEY = b"X-API-Key: tml-one\r\n"
LONG = b"?long"
"""A request with a query goes through uvicorn."""


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given == name), None)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        async with asyncio.timeout(ANSWER_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in head[1:] if line)]
            length = next(int(value) for name, value in headers if name == "content-length")
            return Answer(int(head[0].split()[1]), headers, await self.reader.readexactly(length))

    async def is_closed(self) -> bool:
        async with asyncio.timeout(ANSWER_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


class DatedServer(PromptServer):
    """With the `Date` of its start, which uvicorn sets in each turn of its own loop."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await super().main_loop()


@dataclass
class Front:
    """One API process on a port. `short` counts the requests that took the short way."""

    api: Api
    port: int
    server: PromptServer
    short: list[str]
    opened: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        self.opened.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.opened[-1]

    async def one(self, data: bytes) -> Answer:
        client = await self.connect()
        await client.send(data)
        return await client.answer()


@contextlib.asynccontextmanager
async def on_a_port(api: Api, monkeypatch: pytest.MonkeyPatch, drain_s: float = 0) -> AsyncIterator[Front]:
    short: list[str] = []
    make = DirectRequest.__init__

    def counted(self: DirectRequest, connection: DirectHttp, body: bytes) -> None:
        short.append(connection.url.decode())
        make(self, connection, body)

    monkeypatch.setattr(DirectRequest, "__init__", counted)
    app = create_app(api.services)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = DatedServer(app, drain_s=drain_s, http=protocol_with(app))
        serving = asyncio.create_task(server.serve([listening]))
        front = Front(api, listening.getsockname()[1], server, short)
        try:
            yield front
        finally:
            server.should_exit = True
            for client in front.opened:
                client.writer.close()
            await serving


@pytest.fixture
async def front(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    async with on_a_port(api, monkeypatch) as running:
        yield running


def post(path: bytes, body: bytes, headers: bytes = KEY) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (path, headers, len(body), body)


def polled(request_id: str) -> bytes:
    return json.dumps({"request_id": request_id}).encode()


async def sample(front: Front, seq_id: int) -> bytes:
    return json.dumps(sample_body(await front.api.sampler(), seq_id)).encode()


async def test_a_sample_is_asked_for_and_retrieved_on_one_connection(front: Front) -> None:
    client = await front.connect()
    for number in range(3):
        await client.send(post(ASAMPLE, await sample(front, number)))
        promise = json.loads((await client.answer()).body)
        await client.send(post(RETRIEVE, polled(promise["request_id"]), KEY + b"Accept: application/x-protobuf\r\n"))
        answer = await client.answer()
        assert answer.status == 200
        assert answer.header("content-type") == "application/x-protobuf"
        assert len(pb.SampleResponse.FromString(answer.body).sequences) == 1
    assert front.short == [ASAMPLE.decode(), RETRIEVE.decode()] * 3


def headers_alive() -> list[IncomingHeaders]:
    """The headers of all requests that this process still keeps, those of other tests among them."""
    return [each for each in gc.get_objects() if type(each) is IncomingHeaders and b"host" in each.first]


async def test_samples_leave_nothing_to_the_garbage_collector(front: Front) -> None:
    """Its passes over the cycles of 200,000 objects had stopped the event loop for a quarter of a second each."""
    of_other_tests = headers_alive()
    client = await front.connect()
    body = await sample(front, 0)
    with skyrl_garbage() as found:
        for number in range(20):
            await client.send(post(ASAMPLE, body.replace(b'"seq_id": 0', b'"seq_id": %d' % number)))
            promise = json.loads((await client.answer()).body)
            await client.send(post(RETRIEVE, polled(promise["request_id"])))
            assert (await client.answer()).status == 200
        kept = [each for each in headers_alive() if not any(each is other for other in of_other_tests)]
    assert kept == [], "an idle connection keeps no headers of its last request"
    assert len(front.short) == 40
    assert found.total() < 20, found


async def test_closed_connections_leave_nothing_to_the_garbage_collector(front: Front) -> None:
    with skyrl_garbage() as found:
        for path in [RETRIEVE, RETRIEVE + LONG] * 10:
            client = await front.connect()
            await client.send(post(path, polled("none")))
            await client.answer()
            client.writer.close()
            await client.writer.wait_closed()
        await until(lambda: not front.server.server_state.connections)
    assert len(front.short) == 10
    assert found.total() < 10, found


def comparable(answer: Answer) -> tuple[int, list[tuple[str, str]], str]:
    """Without what differs between any two requests."""
    body = re.sub(r'"request_id":"[^"]*"', '"request_id":""', answer.body.decode())
    headers = [h for h in answer.headers if h[0] not in ("date", "x-request-id", "content-length")]
    return answer.status, headers, body


BODIES = {
    "no such request": (RETRIEVE, polled("none"), KEY),
    "no such sample": (RETRIEVE, polled("none"), KEY + b"X-Tinker-Request-Type: Sample\r\n"),
    "no key": (RETRIEVE, polled("none"), b""),
    "a bearer": (RETRIEVE, polled("none"), b"Authorization: Bearer tml-one\r\n"),
    "an invalid token": (ASAMPLE, b"{}", b"X-API-Key: eyJhbGciOiJIUzI1NiJ9.e30.x\r\n"),
    "no JSON": (ASAMPLE, b"{", KEY),
    "empty": (ASAMPLE, b"", KEY),
    "wrong field": (RETRIEVE, b'{"request_id": 7}', KEY),
    "no sampling session": (ASAMPLE, b'{"prompt": {"chunks": []}, "sampling_params": {}}', KEY),
    "zstd": (RETRIEVE, zstandard.compress(polled("none")), KEY + b"Content-Encoding: zstd\r\n"),
    "gzip": (RETRIEVE, polled("none"), KEY + b"Content-Encoding: gzip\r\n"),
    "two encodings": (RETRIEVE, polled("none"), KEY + b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\n"),
    "closed after it": (RETRIEVE, polled("none"), KEY + b"Connection: close\r\n"),
    "large": (ASAMPLE, b" " * 70_000, KEY),
}


@pytest.mark.parametrize("name", BODIES)
async def test_both_ways_give_the_same_answer(front: Front, name: str) -> None:
    path, body, headers = BODIES[name]
    short = await front.one(post(path, body, headers))
    assert len(front.short) == (name not in ("zstd", "gzip", "two encodings", "large"))
    taken = len(front.short)
    long = await front.one(post(path + LONG, body, headers))
    assert len(front.short) == taken
    assert comparable(short) == comparable(long)
    assert short.header("date")
    assert short.header("x-request-id")


async def test_the_answer_has_the_id_of_the_request(front: Front) -> None:
    answer = await front.one(post(RETRIEVE, polled("none"), KEY + b"X-Request-Id: my-own\r\n"))
    assert answer.header("x-request-id") == "my-own"
    assert json.loads(answer.body)["request_id"] == "my-own"


@pytest.mark.parametrize("line", [b"GET %s HTTP/1.1", b"OPTIONS %s HTTP/1.1", b"PUT %s HTTP/1.1"])
async def test_other_methods_go_through_uvicorn(front: Front, line: bytes) -> None:
    answer = await front.one(line % ASAMPLE + b"\r\nHost: x\r\n" + KEY + b"\r\n")
    assert answer.status in (404, 405)
    assert front.short == []


async def test_a_chunked_body_and_http_1_0_go_through_uvicorn(front: Front) -> None:
    body = polled("none")
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (RETRIEVE, KEY)
    assert (await front.one(head + chunked)).status == 404
    assert (await front.one(post(RETRIEVE, body).replace(b"HTTP/1.1", b"HTTP/1.0"))).status == 404
    assert front.short == []


async def test_expect_is_answered_with_continue(front: Front) -> None:
    client = await front.connect()
    head, _, body = post(RETRIEVE, polled("none"), KEY + b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    await client.send(head + b"\r\n\r\n")
    async with asyncio.timeout(ANSWER_S):
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(body)
    assert (await client.answer()).status == 404


async def test_a_request_that_comes_byte_by_byte_is_answered(front: Front) -> None:
    client = await front.connect()
    for byte in post(RETRIEVE, polled("none")):
        await client.send(bytes([byte]))
    assert (await client.answer()).status == 404
    assert front.short == [RETRIEVE.decode()]


async def test_pipelined_requests_are_answered_in_their_order(front: Front, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    waiting = json.loads((await front.one(post(ASAMPLE, await sample(front, 1)))).body)["request_id"]
    client = await front.connect()
    requests = [polled(waiting), polled("first"), polled("second")]
    health = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    await client.send(b"".join(post(RETRIEVE, body) for body in requests[:2]) + health + post(RETRIEVE, requests[2]))
    go.set()
    answers = [await client.answer() for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 404, 200, 404]
    assert [b"'first'" in answers[1].body, b"'second'" in answers[3].body] == [True, True]
    await client.send(post(RETRIEVE, requests[1]))
    assert (await client.answer()).status == 404, "the connection goes on"


async def test_a_client_that_asked_for_it_is_disconnected_after_the_answer(front: Front) -> None:
    client = await front.connect()
    await client.send(post(RETRIEVE, polled("none"), KEY + b"Connection: close\r\n"))
    assert (await client.answer()).header("connection") == "close"
    assert await client.is_closed()


async def test_an_unused_connection_is_closed(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await front.connect()
    front.server.config.timeout_keep_alive = 0  # for connections that are made from now on
    unused = await front.connect()
    await unused.send(post(RETRIEVE, polled("none")))
    assert (await unused.answer()).status == 404
    assert await unused.is_closed()
    await client.send(post(RETRIEVE, polled("none")))
    assert (await client.answer()).status == 404


async def test_a_poll_ends_when_its_client_goes_away_and_disturbs_nobody(front: Front, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    waiting = json.loads((await front.one(post(ASAMPLE, await sample(front, 1)))).body)["request_id"]
    gone = await front.connect()
    await gone.send(post(RETRIEVE, polled(waiting)))
    await until(lambda: RETRIEVE.decode() in front.short)
    state = front.server.server_state
    assert len(state.tasks) == 1
    connections = len(state.connections)
    gone.writer.transport.abort()
    await until(lambda: len(state.connections) == connections - 1)
    await until(lambda: not state.tasks)
    go.set()
    answer = await front.one(post(RETRIEVE, polled(waiting), KEY + b"Accept: application/x-protobuf\r\n"))
    assert answer.status == 200
    await until(lambda: not state.tasks)
    polls = {series: n for series, n in (await scrape(front.api)).items() if RETRIEVE.decode() in series}
    assert {series.split("status=")[1]: n for series, n in polls.items()} == {"gone}": 1.0, "2xx}": 1.0}


@pytest.mark.parametrize("per_turn", [1, 64])
async def test_polls_that_are_cut_off_together_leave_nothing(
    api: Api, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, per_turn: int
) -> None:
    """With one in a turn, many are cut off before they begin."""
    monkeypatch.setattr(direct_http, "POLLS_PER_TURN", per_turn)
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with on_a_port(api, monkeypatch) as front:
        waiting = json.loads((await front.one(post(ASAMPLE, await sample(front, 1)))).body)["request_id"]
        state = front.server.server_state
        with skyrl_garbage() as found:
            for _ in range(2):
                clients = [await front.connect() for _ in range(30)]
                for client in clients:
                    client.writer.write(post(RETRIEVE, polled(waiting)))
                await until(lambda: front.short.count(RETRIEVE.decode()) % 30 == 0)
                for client in clients:
                    client.writer.transport.abort()
                await until(lambda: len(state.connections) == 1)
                await until(lambda: not state.tasks)
        assert found.total() < 10, found
        go.set()
        answer = await front.one(post(RETRIEVE, polled(waiting), KEY + b"Accept: application/x-protobuf\r\n"))
        assert answer.status == 200


async def test_an_answer_waits_for_a_client_that_does_not_read(front: Front) -> None:
    """Unread answers would fill the memory otherwise."""
    client = await front.connect()
    await client.send(post(RETRIEVE, polled("none")))
    assert (await client.answer()).status == 404
    (connection,) = front.server.server_state.connections
    connection.pause_writing()  # as the transport does when too much is unread
    await client.send(post(RETRIEVE, polled("none")))
    await until(lambda: len(front.short) == 2)
    assert (await front.one(post(RETRIEVE, polled("none")))).status == 404
    assert not connection.cycle.response_started  # type: ignore[union-attr]
    connection.resume_writing()
    assert (await client.answer()).status == 404


async def test_a_request_that_is_arriving_when_the_server_stops_is_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as api, on_a_port(api, monkeypatch, drain_s=30) as front:
        client = await front.connect()
        request = post(RETRIEVE, polled("none"))
        await client.send(request[:-5])
        assert (await front.one(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
        front.server.should_exit = True
        await asyncio.sleep(0.05)
        await client.send(request[-5:])
        assert (await client.answer()).status == 404
        assert await client.is_closed()


async def test_a_table_that_does_not_answer_ends_the_connection(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def silent(*_: object) -> None:
        pass

    monkeypatch.setattr(table.HttpTable, "__call__", silent)
    client = await front.connect()
    await client.send(post(RETRIEVE, polled("none")))
    assert (await client.answer()).status == 500
    assert await client.is_closed()
    assert f"a request to {RETRIEVE.decode()} ended without an answer" in caplog.text


@pytest.mark.parametrize("path", [ASAMPLE, ASAMPLE + LONG])
async def test_a_long_head_is_refused_before_its_body_has_come(front: Front, path: bytes) -> None:
    client = await front.connect()
    headers = KEY + b"X-Long: %s\r\n" % (b"a" * HEAD_BYTES)
    await client.send(post(path, b"0123456789", headers)[:-10])
    assert (await client.answer()).status == 431
    assert await client.is_closed()


async def test_an_error_that_nothing_answers_ends_the_connection(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug in the table itself")

    monkeypatch.setattr(table, "Call", broken)
    client = await front.connect()
    await client.send(post(RETRIEVE, polled("none")))
    answer = await client.answer()
    assert (answer.status, answer.body) == (500, b"Internal Server Error")
    assert await client.is_closed()
    assert "a request ended without an answer" in caplog.text
