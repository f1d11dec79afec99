"""What the router does with clients and workers that use HTTP in odd ways, or go away at a bad moment."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest

from skyrl.http.forward import RequestHead
from skyrl.router.messages import Request, Response
from skyrl.router.middleware import CallNext, RouterMiddleware
from skyrl.router.pool import Slots
from skyrl.router.proxy import Limits
from tests.component import router_world
from tests.component.router_world import Exchange, FakeWorker, RunningRouter, steps, until, until_left

Start = Callable[..., AbstractAsyncContextManager[RunningRouter]]
ONE = b"POST /one HTTP/1.1\r\nhost: r\r\ncontent-length: 1\r\n\r\n1"
TWO = b"POST /two HTTP/1.1\r\nhost: r\r\ncontent-length: 1\r\n\r\n2"


@pytest.fixture(params=["short way", "long way"])
def running_router(request: pytest.FixtureRequest) -> Start:
    return functools.partial(router_world.running_router, short_way=request.param == "short way")


async def connect(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def in_flight(router: RunningRouter) -> int:
    return sum(worker["in_flight"] for worker in router.app.status()["workers"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "trailing",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-evil: 1\r\n\r\nwrong",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-evil: 1\r\n\r\nwr",
        b"HT",
        b"noise",
    ],
)
async def test_bytes_behind_an_answer_reach_no_client(running_router: Start, trailing: bytes) -> None:
    async def answer_and_more(exchange: Exchange) -> None:
        body = exchange.request.body
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s%s" % (len(body), body, trailing))

    async with running_router(FakeWorker(answer_and_more)) as router:
        for number in range(3):
            async with router.session.post(f"{router.url}/x", data=f"body {number}") as answer:
                assert (answer.status, await answer.read()) == (200, b"body %d" % number)
                assert "x-evil" not in answer.headers


@pytest.mark.parametrize("head", ["204 No Content\r\ncontent-length: 5", "304 Not Modified\r\ncontent-length: 500"])
async def test_an_answer_without_a_body_ends_with_its_head_whatever_its_length(
    running_router: Start, head: str
) -> None:
    async def bodiless(exchange: Exchange) -> None:
        if exchange.request.path == "/bodiless":
            await exchange.send(f"HTTP/1.1 {head}\r\n\r\n".encode())
            await exchange.client_closed.wait()
        else:
            await exchange.answer(b"next")

    async with running_router(FakeWorker(bodiless)) as router:
        async with router.session.post(f"{router.url}/bodiless", data=b"1") as answer:
            assert str(answer.status) == head[:3]
        async with router.session.post(f"{router.url}/x", data=b"1") as answer:
            assert await answer.read() == b"next"
        assert in_flight(router) == 0


async def test_trailers_do_not_become_headers(running_router: Start) -> None:
    with_trailers = steps(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n0\r\nx-late: 1\r\n\r\n"
    )
    worker = FakeWorker(with_trailers)
    async with running_router(worker) as router:
        reader, writer = await connect(router)
        writer.write(
            b"POST /x HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-late: 1\r\n\r\n" + ONE
        )
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"x-late" not in head
            assert await reader.readuntil(b"0\r\n\r\n") == b"5\r\nhello\r\n0\r\n\r\n"
        writer.transport.abort()
    assert [request.body for request in worker.received] == [b"a", b"1"]
    assert worker.received[0].header("x-late") == []


@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 2\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 2",
        b"content-length: 2\r\ncontent-length: 3",
    ],
)
async def test_two_lengths_are_refused_on_both_sides(running_router: Start, headers: bytes) -> None:
    worker = FakeWorker(steps(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n0\r\n\r\n" % headers))
    async with running_router(worker) as router:
        async with router.session.post(f"{router.url}/x", data=b"1") as answer:
            assert answer.status == 502
        reader, writer = await connect(router)
        writer.write(b"POST /smuggled HTTP/1.1\r\nhost: r\r\n%s\r\n\r\n0\r\n\r\n" % headers)
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert [request.path for request in worker.received] == ["/x"]


async def test_headers_that_connection_lists_stay_on_their_connection(running_router: Start) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"{}", headers=("connection: keep-alive, X-Hop", "x-hop: 1", "x-end: 1"))

    worker = FakeWorker(answer)
    async with running_router(worker) as router:
        headers = {"Connection": "keep-alive, X-Hop, Content-Length", "X-Hop": "1", "X-End": "1"}
        async with router.session.post(f"{router.url}/x", data=b"body", headers=headers) as response:
            assert "x-hop" not in response.headers
            assert response.headers["x-end"] == "1"
    assert worker.received[0].header("x-hop") == []
    assert worker.received[0].header("x-end") == ["1"]
    assert worker.received[0].body == b"body"


async def test_pipelined_requests_are_answered_in_their_order(running_router: Start) -> None:
    worker = FakeWorker()
    async with running_router(worker) as router:
        reader, writer = await connect(router)
        writer.write(ONE + TWO + ONE.replace(b"1.1\r\n", b"1.1\r\nconnection: close\r\n"))
        answers = await reader.read()
        assert [part[-1:] for part in answers.split(b"HTTP/1.1 200 OK")[1:]] == [b"1", b"2", b"1"]
        writer.close()


async def test_a_slow_client_with_a_request_in_the_queue_gets_both_answers(running_router: Start) -> None:
    size = 12 * 2**20

    async def big(exchange: Exchange) -> None:
        await exchange.answer(bytes(size) if exchange.request.path == "/one" else b"second")

    worker = FakeWorker(big)
    async with running_router(worker) as router:
        reader, writer = await connect(router)
        writer.write(ONE + TWO)
        await until(lambda: len(worker.received) == 1)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(size)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(6) == b"second"
        writer.transport.abort()


async def test_what_comes_behind_an_upgrade_is_not_taken_for_requests(running_router: Start) -> None:
    worker = FakeWorker()
    async with running_router(worker) as router:
        reader, writer = await connect(router)
        writer.write(b"GET /up HTTP/1.1\r\nhost: r\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPOST /lost HT")
        assert b"connection: close" in (await reader.read()).lower()
        writer.close()
    assert [request.path for request in worker.received] == ["/up"]


async def test_a_hanging_worker_that_is_removed_does_not_end_the_router(running_router: Start) -> None:
    hang = steps(until_left)
    workers = [FakeWorker(hang), FakeWorker(hang)]
    async with running_router(*workers, hang_s=0.1) as router:
        asking = [asyncio.create_task(router.session.post(f"{router.url}/x", data=b"1").__aenter__()) for _ in "123"]
        await until(lambda: sum(len(worker.received) for worker in workers) == 3)
        for worker in workers:
            worker.healthy = False
        await until(lambda: router.app.status()["routable"] == 0)
        for worker in workers:
            async with router.session.post(f"{router.url}/remove_worker", params={"url": worker.url}) as answer:
                assert answer.status == 200
        assert [(await answer).status for answer in asking] == [502, 502, 502]
        await until(lambda: router.app.status()["workers"] == [])


async def test_aborts_and_routes_of_the_router_need_no_slot(running_router: Start) -> None:
    async def wait(exchange: Exchange) -> None:
        if exchange.request.path == "/abort_request":
            await exchange.answer()
        else:
            await exchange.client_closed.wait()

    worker = FakeWorker(wait)
    async with running_router(worker, limits=Limits(running=1, waiting=0)) as router:
        asking = asyncio.create_task(router.session.post(f"{router.url}/x", data=b"1").__aenter__())
        await until(lambda: len(worker.received) == 1)
        async with router.session.post(f"{router.url}/abort_request", json={"abort_all": True}) as answer:
            assert answer.status == 200
        for path in ("/workers", "/statusz", "/readyz"):
            async with router.session.get(router.url + path) as answer:
                assert answer.status == 200
        asking.cancel()
        await until(lambda: in_flight(router) == 0)


async def test_a_waiter_that_is_cancelled_as_a_slot_comes_leaves_it_to_others() -> None:
    slots = Slots(1, 5)
    assert slots.try_acquire()
    waiting = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    waiting.cancel()
    slots.release()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slots.try_acquire()


class Injects(RouterMiddleware):
    async def handle(self, request: Request, call_next: CallNext) -> Response:
        kind = request.query.decode()
        if kind == "header":
            request.headers.set("x-user", "a\r\ncontent-length: 0\r\n\r\nGET /smuggled HTTP/1.1")
        elif kind == "path":
            request.path = "/a b\r\n?é%"
        elif kind == "query":
            request.query = b"x HTTP/1.1\r\n\r\n"
        response = await call_next(request)
        if kind == "answer":
            response.headers.set("x-answer", "a\r\n\r\nHTTP/1.1 200 OK")
        return response


async def test_middleware_cannot_end_the_line_of_a_header() -> None:
    worker = FakeWorker()
    async with router_world.running_router(worker, middleware=(f"{__name__}.Injects",)) as router:
        for kind in ("header", "query"):
            async with router.session.post(f"{router.url}/x?{kind}", data=b"1") as answer:
                assert answer.status == 500
        with pytest.raises(aiohttp.ClientError):
            await router.session.post(f"{router.url}/x?answer", data=b"1")
        assert [request.path for request in worker.received] == ["/x?answer"]
        async with router.session.post(f"{router.url}/x?path", data=b"1") as answer:
            assert answer.status == 200
    assert worker.received[-1].path == "/a%20b%0D%0A%3F%C3%A9%25?path"


def test_a_list_in_connection_cannot_remove_the_length() -> None:
    head = RequestHead.of([(b"connection", b"close, content-length, x"), (b"content-length", b"5"), (b"x", b"1")])
    assert (head.lines, head.length, head.has_body) == (b"", 5, True)


async def test_with_random_faults_each_request_gets_its_own_answer_or_an_error(running_router: Start) -> None:
    dice = random.Random(7)

    async def moody(exchange: Exchange) -> None:
        body = exchange.request.body
        fault = dice.randrange(12)
        if fault == 0:
            exchange.break_off()
        elif fault == 1:
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body) + 1, body))
            exchange.break_off()
        elif fault == 2:
            await exchange.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body)
            exchange.writer.close()
            await exchange.writer.wait_closed()
        elif fault == 3:
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%sHTTP/1.1 2" % (len(body), body))
        elif fault < 7:
            await exchange.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for part in (body[:3], body[3:]):
                await exchange.send(b"%x;a=b\r\n%s\r\n" % (len(part), part))
            await exchange.send(b"0\r\nx-trailer: 1\r\n\r\n")
        else:
            await exchange.answer(body)

    workers = [FakeWorker(moody), FakeWorker(moody)]
    outcomes: dict[str, int] = {"own": 0, "error": 0, "left": 0}

    async def client(router: RunningRouter, name: int) -> None:
        for number in range(30):
            body = b"request %d of client %d" % (number, name)
            try:
                async with asyncio.timeout(0.001 if dice.random() < 0.05 else None):
                    async with router.session.post(f"{router.url}/x", data=body) as answer:
                        content = await answer.read()
            except TimeoutError:
                outcomes["left"] += 1
            except aiohttp.ClientError:
                outcomes["error"] += 1
            else:
                assert answer.status == 502 or content == body
                outcomes["own" if answer.status == 200 else "error"] += 1

    async with running_router(*workers, health_check_interval_s=60, limits=Limits(running=6)) as router:
        await asyncio.gather(*(client(router, name) for name in range(8)))
        await until(lambda: in_flight(router) == 0 and router.app.status()["waiting"] == 0)
        proxy = router.app.proxy
        assert not any(worker.exchanges for worker in proxy.pool.workers)
        assert all(proxy.slots.try_acquire() for _ in range(6))
        assert not proxy.slots.try_acquire()
    assert sum(outcomes.values()) == 240
    assert outcomes["own"] > 120
