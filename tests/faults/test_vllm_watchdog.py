"""When the watchdog treats vLLM as hung and when not: a scripted server on a real socket, and a server handle without a
process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing

import pytest

from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.watchdog import Watchdog
from skyrl.runtime.processes.ports import HeldPort

INTERVAL_S = 0.05
LONG_S = 1000.0
SILENCE = None
WELL, DEAD = 200, 503
GARBAGE = -1
"""An answer that cannot be decoded."""

Answer = Callable[[int], int | None]
"""The status for the n-th request (from 0); `SILENCE` accepts the request and never answers."""


class Upstream:
    """Answers by path; counts the requests per path."""

    def __init__(self, **answers: Answer) -> None:
        self.url = ""
        self.requests_by_path: Counter[str] = Counter()
        self._answers = answers
        self._connections: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.read(65_536):
                path = head.split()[1].decode().removeprefix("/")
                status = self._answers[path](self.requests_by_path[path])
                self.requests_by_path[path] += 1
                if status == GARBAGE:
                    head = b"HTTP/1.1 200 x\r\ncontent-encoding: gzip\r\ncontent-length: 7\r\n\r\n"
                    writer.write(head + b"no gzip")
                elif status is not SILENCE:
                    writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode())
        finally:
            writer.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self._serve(reader, writer)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)


class Server:
    """A server handle for the watchdog."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.restarts = 0
        self.running_s = 0.0
        self.looked = 0
        self.killed = asyncio.Event()

    @property
    def incarnation(self) -> str:
        self.looked += 1
        return f"start {self.restarts}"

    def restart(self, incarnation: str) -> bool:
        if incarnation != f"start {self.restarts}":
            return False
        self.killed.set()
        return True

    def log_tail(self, lines: int = 20) -> str:
        return ""

    def give_up(self) -> None: ...

    async def supervised(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, grace_s: float = 10.0) -> None: ...


@asynccontextmanager
async def watched(url: str, *, health_s: float = LONG_S, step_s: float = LONG_S) -> AsyncIterator[Server]:
    server, client = Server(url), VllmClient(url, "key")
    watchdog = Watchdog(client, server, {"/health": health_s, "/is_sleeping": step_s}, interval_s=INTERVAL_S)
    watching = asyncio.create_task(watchdog.run())
    try:
        yield server
        assert not watching.done(), "the watchdog has not ended"
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the test's own time limit ends it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("health", [SILENCE, DEAD], ids=["accepts requests and never answers", "stays 503"])
async def test_a_hanging_api_server_is_killed(health: int | None) -> None:
    upstream = Upstream(health=lambda _: health, is_sleeping=lambda _: WELL)
    async with upstream.running(), watched(upstream.url, health_s=0.3) as server:
        await server.killed.wait()


async def test_an_undecodable_answer_does_not_end_the_watchdog() -> None:
    upstream = Upstream(health=lambda n: GARBAGE if n < 3 else WELL, is_sleeping=lambda _: WELL)
    async with upstream.running(), watched(upstream.url) as server:
        await until(lambda: upstream.requests_by_path["health"] > 5)
        assert not server.killed.is_set()
    upstream = Upstream(health=lambda _: GARBAGE, is_sleeping=lambda _: WELL)
    async with upstream.running(), watched(upstream.url, health_s=0.3) as server:
        await server.killed.wait()


async def test_a_hanging_engine_behind_a_healthy_api_server_is_killed() -> None:
    upstream = Upstream(health=lambda _: WELL, is_sleeping=lambda _: SILENCE)
    async with upstream.running(), watched(upstream.url, step_s=0.3) as server:
        await server.killed.wait()


async def test_a_long_step_is_allowed_beyond_the_bound_for_health() -> None:
    upstream = Upstream(health=lambda _: WELL, is_sleeping=lambda _: SILENCE)
    bound_s = 2.0
    async with upstream.running(), watched(upstream.url, health_s=bound_s) as server:
        await until(lambda: upstream.requests_by_path["health"] > 1.5 * bound_s / INTERVAL_S)
        assert upstream.requests_by_path["is_sleeping"] == 1, "the watchdog still waits for the first answer"
        assert not server.killed.is_set()


async def test_one_unanswered_probe_is_not_a_hang() -> None:
    upstream = Upstream(health=lambda n: WELL if n else SILENCE, is_sleeping=lambda _: WELL)
    async with upstream.running(), watched(upstream.url, health_s=4.0) as server:
        await until(lambda: upstream.requests_by_path["health"] > 5)
        assert not server.killed.is_set()


async def test_a_server_that_does_not_listen_yet_is_not_killed() -> None:
    with closing(HeldPort.any()) as port:
        async with watched(f"http://127.0.0.1:{port.number}", health_s=4.0, step_s=4.0) as server:
            await until(lambda: server.looked > 10)
            assert not server.killed.is_set()


async def test_a_server_that_stopped_listening_and_does_not_exit_is_killed() -> None:
    upstream = Upstream(health=lambda _: WELL, is_sleeping=lambda _: WELL)
    async with AsyncExitStack() as stack:
        async with upstream.running():
            server = await stack.enter_async_context(watched(upstream.url, health_s=4.0))
            await until(lambda: upstream.requests_by_path["health"] > 1)
            assert not server.killed.is_set()
        await server.killed.wait()


async def test_the_server_after_a_hung_one_is_not_killed() -> None:
    upstream = Upstream(health=lambda n: SILENCE if n < 2 else WELL, is_sleeping=lambda _: WELL)
    async with upstream.running(), watched(upstream.url, health_s=4.0) as server:
        await until(lambda: upstream.requests_by_path["health"] == 1)
        server.restarts = 1
        await until(lambda: upstream.requests_by_path["health"] > 5)
        assert not server.killed.is_set()


async def test_a_server_without_development_endpoints_does_not_sleep() -> None:
    upstream = Upstream(is_sleeping=lambda _: 404)
    async with upstream.running():
        client = VllmClient(upstream.url, "key")
        assert not await client.is_sleeping()
        await client.close()
