"""What the router passes on, and what it does when a worker or a client goes away."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
from yarl import URL

from skyrl.router.proxy import Limits
from tests.component import router_world
from tests.component.router_world import (
    STREAM,
    Exchange,
    FakeWorker,
    RunningRouter,
    Script,
    break_off,
    steps,
    until,
    until_left,
)
from tests.garbage import skyrl_garbage

Start = Callable[..., AbstractAsyncContextManager[RunningRouter]]


@pytest.fixture(params=["short way", "long way"])
def running_router(request: pytest.FixtureRequest) -> Start:
    """Every test runs on both ways through the router."""
    return functools.partial(router_world.running_router, short_way=request.param == "short way")


async def raw(url: str, request: bytes) -> bytes:
    """Send bytes, and read until the router closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_method_path_query_headers_and_body_reach_the_worker_as_sent(running_router: Start) -> None:
    body = b'{"return_routed_experts": true,  "unknown": 1.50e-05, "z":"\\u00e9 \xc3\xa9"}'
    worker = FakeWorker()
    async with running_router(worker) as router:
        head = (
            "PUT /a%2Fb/c%20d?x=1&x=2&y=%2F HTTP/1.1\r\nHost: router\r\nX-Foo: a\r\nX-Foo: b\r\n"
            "Authorization: Bearer None\r\nContent-Type: application/json; charset=utf-8\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        answer = await raw(router.url, request)
    received = worker.received[0]
    assert received.line == "PUT /a%2Fb/c%20d?x=1&x=2&y=%2F HTTP/1.1"
    assert received.body == body
    assert received.header("x-foo") == ["a", "b"]
    assert received.header("authorization") == ["Bearer None"]
    assert received.header("content-type") == ["application/json; charset=utf-8"]
    assert received.header("host") == [worker.url.removeprefix("http://")]
    assert answer.endswith(b"\r\n\r\n" + body)


async def test_requests_leave_nothing_to_the_garbage_collector(running_router: Start) -> None:
    async with running_router(FakeWorker()) as router:
        await (await router.session.get(f"{router.url}/any")).read()
        with skyrl_garbage() as found:
            for _ in range(20):
                await (await router.session.get(f"{router.url}/any")).read()
    assert found.total() < 20, found


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
async def test_every_method_is_passed_on(running_router: Start, method: str) -> None:
    worker = FakeWorker()
    async with running_router(worker) as router, router.session.request(method, f"{router.url}/any") as answer:
        assert answer.status == 200
    assert worker.received[0].line == f"{method} /any HTTP/1.1"


async def test_status_headers_and_body_of_an_answer_come_back_as_sent(running_router: Start) -> None:
    body = b'{"error": {"message": "no"}, "routed_experts": "AAECAw==", "x": 1e-05}'

    async def refuse(exchange: Exchange) -> None:
        headers = ("content-type: application/json", "x-request-id: 7", "set-cookie: a=1", "set-cookie: b=2")
        await exchange.answer(body, "422 Unprocessable Entity", headers)

    async with (
        running_router(FakeWorker(refuse)) as router,
        router.session.post(f"{router.url}/x", data=b"1") as answer,
    ):
        assert answer.status == 422
        assert await answer.read() == body
        assert answer.headers.getall("set-cookie") == ["a=1", "b=2"]
        assert answer.headers["x-request-id"] == "7"
        assert "date" not in answer.headers
        assert "server" not in answer.headers


async def test_a_stream_arrives_in_the_pieces_in_which_the_worker_sends_them(running_router: Start) -> None:
    go_on = asyncio.Event()
    stream = steps(
        STREAM,
        b"9\r\ndata: 1\n\n\r\n",
        go_on,
        b"9\r\ndata: 2\n\n\r\n0\r\n\r\n",
    )
    async with running_router(FakeWorker(stream)) as router, router.session.post(f"{router.url}/generate") as answer:
        assert await answer.content.readany() == b"data: 1\n\n"
        status = router.app.status()
        assert status["workers"][0]["in_flight"] == 1, "a request is in flight until the end of its stream"  # type: ignore[index]
        go_on.set()
        assert await answer.content.read() == b"data: 2\n\n"
        await until(lambda: router.app.status()["workers"][0]["in_flight"] == 0)  # type: ignore[index]


async def test_a_large_body_is_passed_on_while_it_arrives(running_router: Start) -> None:
    worker = FakeWorker()
    body = bytes(range(256)) * 20_000
    async with running_router(worker) as router:
        async with router.session.post(f"{router.url}/big", data=io.BytesIO(body)) as answer:
            assert await answer.read() == body

        async def pieces():
            for start in range(0, len(body), 100_000):
                yield body[start : start + 100_000]

        async with router.session.post(f"{router.url}/chunked", data=pieces()) as answer:
            assert await answer.read() == body
    assert worker.received[0].header("content-length") == [str(len(body))]
    assert worker.received[1].header("transfer-encoding") == ["chunked"]


async def test_a_client_that_leaves_frees_the_worker(running_router: Start) -> None:
    started, freed = asyncio.Event(), asyncio.Event()
    async with running_router(FakeWorker(steps(started.set, until_left, freed.set))) as router:
        asking = asyncio.create_task(router.session.post(f"{router.url}/generate", data=b"{}").__aenter__())
        await started.wait()
        asking.cancel()
        await freed.wait()
        await until(lambda: router.app.status()["workers"][0]["in_flight"] == 0)  # type: ignore[index]
        assert router.app.status()["counts"]["client_left"] == 1  # type: ignore[index]


async def test_nobody_gets_what_a_client_that_left_did_not_read(running_router: Start) -> None:
    def write_paused() -> bool:
        return any(client.flow.write_paused for client in router.server.server_state.connections)  # type: ignore[union-attr]

    async def outpace(exchange: Exchange) -> None:
        if exchange.request.path == "/second":
            await exchange.answer()
            return
        await exchange.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not write_paused():
            await exchange.send(b"10000\r\n%s\r\n" % bytes(2**16))
            await asyncio.sleep(0.005)
        await exchange.send(b"4\r\ntail\r\n0\r\n\r\n")
        sent.set()

    worker, sent = FakeWorker(outpace), asyncio.Event()
    async with running_router(worker) as router:
        host, port = router.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        writer.write(b"POST /first HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}")
        await sent.wait()
        await asyncio.sleep(0.05)  # the router reads the end of the answer, which it cannot pass on
        writer.transport.abort()
        await until(lambda: router.app.status()["workers"][0]["in_flight"] == 0)  # type: ignore[index]
        async with router.session.post(f"{router.url}/second", data=b"{}") as answer:
            assert await answer.read() == b"{}"


async def test_a_refused_connection_sends_the_request_to_another_worker_and_quarantines_at_once(
    running_router: Start, caplog: pytest.LogCaptureFixture
) -> None:
    alive, dead = FakeWorker(), FakeWorker()
    async with running_router(alive, dead, policy="round_robin", health_check_interval_s=60) as router:
        await until(lambda: dead.probes > 0)
        await dead.stop()
        for number in range(6):
            async with router.session.post(f"{router.url}/x", data=str(number)) as answer:
                assert answer.status == 200
        assert [request.body for request in alive.received] == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert router.app.status()["counts"]["not_accepted"] == 1  # type: ignore[index]
        assert router.app.status()["routable"] == 1
    assert "is quarantined: it could not be reached (ConnectionRefusedError: " in caplog.text


async def test_a_revived_worker_is_used_again(running_router: Start) -> None:
    alive, dead = FakeWorker(), FakeWorker()
    async with running_router(alive, dead, policy="round_robin") as router:
        await dead.stop()
        await until(lambda: router.app.status()["routable"] == 1)
        await dead.start()
        await until(lambda: router.app.status()["routable"] == 2)
        for _ in range(4):
            async with router.session.post(f"{router.url}/x", data=b"1") as answer:
                assert answer.status == 200
        assert len(dead.received) == len(alive.received) == 2


@pytest.mark.parametrize(
    "script",
    [
        steps(break_off),
        steps(b"nonsense\r\n\r\n", until_left),
        steps(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, until_left),
    ],
)
async def test_a_request_that_a_worker_may_have_run_is_not_sent_again(running_router: Start, script: Script) -> None:
    workers = FakeWorker(script), FakeWorker(script)
    async with running_router(*workers) as router, router.session.post(f"{router.url}/x", data=b"1") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "worker_interrupted")
        assert sum(len(worker.received) for worker in workers) == 1


@pytest.mark.parametrize(
    ("begin", "body"),
    [(STREAM, b"9\r\ndata: 1\n\n\r\n"), (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"only this")],
)
async def test_an_answer_that_breaks_off_is_not_completed(running_router: Start, begin: bytes, body: bytes) -> None:
    worker = FakeWorker(steps(begin, body, break_off))
    async with running_router(worker) as router:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with router.session.post(f"{router.url}/x", data=b"1") as answer:
                await answer.read()


async def test_an_early_answer_to_a_large_body_comes_back(running_router: Start) -> None:
    early = socket.create_server(("127.0.0.1", 0))

    async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer_at_once, sock=early)
    async with running_router(workers=(f"http://127.0.0.1:{early.getsockname()[1]}",)) as router:
        request = b"POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 9000000\r\n\r\n" + bytes(2_000_000)
        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        writer.write(request)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413")
        writer.transport.abort()
    server.close()
    await server.wait_closed()


async def test_without_a_worker_the_answer_is_503_with_retry_after(running_router: Start) -> None:
    async with running_router() as router:
        async with router.session.post(f"{router.url}/generate", data=b"{}") as answer:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert (await answer.json())["error"]["code"] == "no_available_workers"
        async with router.session.get(f"{router.url}/readyz") as answer:
            assert answer.status == 503


async def test_requests_beyond_the_limit_wait_and_beyond_the_queue_are_refused(running_router: Start) -> None:
    go_on = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await go_on.wait()
        await exchange.answer(exchange.request.body)

    worker = FakeWorker(wait)
    async with running_router(worker, limits=Limits(running=1, waiting=1)) as router:

        async def ask(number: int) -> tuple[int, bytes]:
            async with router.session.post(f"{router.url}/x", data=str(number)) as answer:
                return answer.status, await answer.read()

        first = asyncio.create_task(ask(1))
        await until(lambda: len(worker.received) == 1)
        second = asyncio.create_task(ask(2))
        await until(lambda: router.app.status()["waiting"] == 1)
        status, body = await ask(3)
        assert (status, json.loads(body)["error"]["code"]) == (503, "router_busy")
        assert len(worker.received) == 1
        go_on.set()
        assert await first == (200, b"1")
        assert await second == (200, b"2")


@pytest.mark.parametrize("most", [100, 2**21])
async def test_a_body_beyond_the_limit_is_refused(running_router: Start, most: int) -> None:
    worker = FakeWorker()
    async with running_router(worker, limits=Limits(body_bytes=most)) as router:
        for size, status in ((most, 200), (most + 1, 413)):
            async with router.session.post(f"{router.url}/x", data=io.BytesIO(bytes(size))) as answer:
                assert answer.status == status
    assert len(worker.received) == 1


@pytest.mark.parametrize("removed", [False, True])
async def test_requests_at_a_worker_that_hangs_are_broken_off(running_router: Start, removed: bool) -> None:
    worker = FakeWorker(steps(until_left))
    async with running_router(worker, hang_s=0.1) as router:
        asking = asyncio.create_task(router.session.post(f"{router.url}/x", data=b"1").__aenter__())
        await until(lambda: len(worker.received) == 1)
        if removed:
            router.app.pool.remove(worker.url)
        worker.healthy = False
        answer = await asking
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == "worker_interrupted"
        assert (router.app.pool.workers == []) == removed


@pytest.mark.parametrize("path", ["/%68ealth", "/list%5Fworkers"])
async def test_a_route_of_its_own_is_found_under_an_encoded_name(path: str, running_router: Start) -> None:
    async with running_router(FakeWorker()) as router:
        async with router.session.get(URL(router.url + path, encoded=True)) as answer:
            assert answer.status == 200
        assert router.app.counts["internal_errors"] == 0


async def test_a_fragment_leads_past_no_key(running_router: Start) -> None:
    """A worker drops it from the target."""
    worker = FakeWorker()
    async with running_router(worker, admin_key="admin") as router:
        request = b"POST /pause_generation#x HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        assert (await raw(router.url, request)).startswith(b"HTTP/1.1 401 ")
    assert worker.received == []


@pytest.mark.parametrize("body", [b'{"model":"\xff"}', b'{"x":%s%s}' % (b"[" * 5000, b"]" * 5000)])
async def test_a_body_that_cannot_be_read_goes_on_and_holds_no_slot(running_router: Start, body: bytes) -> None:
    worker = FakeWorker()
    async with running_router(worker, policy="adapter_affinity", limits=Limits(running=1, waiting=0)) as router:
        for sent in (body, b'{"model":"a"}'):
            async with router.session.post(f"{router.url}/v1/completions", data=sent) as answer:
                assert (answer.status, await answer.read()) == (200, sent)


async def test_with_a_key_only_health_is_open(running_router: Start) -> None:
    worker = FakeWorker()
    async with running_router(worker, key="secret") as router:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for method, path in (("POST", "/x"), ("GET", "/workers"), ("GET", "/statusz"), ("POST", "/abort_request")):
                async with router.session.request(method, router.url + path, headers=headers) as answer:
                    assert answer.status == 401, path
        assert worker.received == []
        for path in ("/health", "/live", "/liveness", "/readiness", "/ready", "/readyz"):
            async with router.session.get(router.url + path) as answer:
                assert answer.status == 200, path
        async with router.session.post(f"{router.url}/x", headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 200
        assert worker.received[0].header("authorization") == ["Bearer secret"]


async def test_requests_that_outlast_the_end_of_the_router_are_answered(running_router: Start) -> None:
    """The router waits a while for them. Then they get an answer that says what is known, not a bare 500."""
    started = asyncio.Event()
    never = steps(started.set, until_left)
    async with running_router(
        FakeWorker(never), middleware=("tests.component.router.test_router_middleware.Marks",)
    ) as router:
        asking = asyncio.create_task(router.session.post(f"{router.url}/x", data=b"[]").__aenter__())
        await started.wait()
        router.server.should_exit = True
        answer = await asking
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == "worker_interrupted"
