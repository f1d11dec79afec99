"""A router in this process, in front of workers that do what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from skyrl.http.connection import address_of, connect
from skyrl.http.serving import Server
from skyrl.router.app import RouterApp
from skyrl.router.fast_path import FastPathRule
from skyrl.router.main import RouterOptions, connection_class, open_router
from skyrl.runtime.processes.ports import listen

CONNECTIONS = 4
"""Unused connections to each worker with which a router of `short_way` starts."""

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
"""The head of an answer in chunks."""
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Received:
    """One request as a worker got it. `raw_head` is the request line with the headers."""

    raw_head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.raw_head.partition(b"\r\n")[0].decode()

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]

    def header(self, name: str) -> list[str]:
        lines = self.raw_head.decode("latin-1").split("\r\n")[1:]
        pairs = [line.partition(":") for line in lines if line]
        return [value.strip() for key, _, value in pairs if key.lower() == name.lower()]


@dataclass
class Exchange:
    """A request that a worker has received, with the connection on which it answers."""

    request: Received
    writer: asyncio.StreamWriter
    client_closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(
        self,
        body: bytes = b"{}",
        status: str = "200 OK",
        headers: tuple[str, ...] = ("content-type: application/json",),
    ) -> None:
        lines = "".join(f"{header}\r\n" for header in headers)
        self.writer.write(f"HTTP/1.1 {status}\r\n{lines}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def break_off(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


async def echo(exchange: Exchange) -> None:
    await exchange.answer(exchange.request.body)


async def until_left(exchange: Exchange) -> None:
    """Wait until the router closes the connection."""
    await exchange.client_closed.wait()


async def break_off(exchange: Exchange) -> None:
    exchange.break_off()


def steps(*parts: bytes | asyncio.Event | Callable[..., Any]) -> Script:
    """A script that sends bytes, waits for events, runs other scripts, and calls functions, in this order."""

    async def script(exchange: Exchange) -> None:
        for part in parts:
            if isinstance(part, bytes):
                await exchange.send(part)
            elif isinstance(part, asyncio.Event):
                await part.wait()
            elif inspect.iscoroutinefunction(part):
                await part(exchange)
            else:
                part()

    return script


class FakeWorker:
    """An HTTP/1.1 server that runs `script` for each request, except for GET /health: `health` if it is `healthy`."""

    def __init__(self, script: Script = echo) -> None:
        self.script = script
        self.healthy = True
        self.health = HEALTHY
        self.probes = 0
        self.received: list[Received] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and break those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = Received(head, b"")
                request.body = await self._body(reader, request)
                exchange = Exchange(request, writer)
                if request.path == "/health":
                    self.probes += 1
                    await exchange.send(self.health if self.healthy else HEALTHY.replace(b"200 OK", b"503 Away"))
                    continue
                self.received.append(request)
                watch = asyncio.create_task(self._watch(reader, exchange))
                try:
                    await self.script(exchange)
                finally:
                    watch.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watch
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)
            self._writers.discard(writer)

    async def _body(self, reader: asyncio.StreamReader, request: Received) -> bytes:
        if length := request.header("content-length"):
            return await reader.readexactly(int(length[0]))
        if request.header("transfer-encoding") != ["chunked"]:
            return b""
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return body

    async def _watch(self, reader: asyncio.StreamReader, exchange: Exchange) -> None:
        """Notice that the router closes the connection while the script runs."""
        while not reader.at_eof():  # noqa: ASYNC110 - a StreamReader has no event for its end
            await asyncio.sleep(0.005)
        exchange.client_closed.set()


class PromptServer(Server):
    """Notices `should_exit` at once. uvicorn looks every 0.1 s."""

    async def main_loop(self) -> None:
        await until(lambda: self.should_exit)


@dataclass
class RunningRouter:
    app: RouterApp
    url: str
    session: aiohttp.ClientSession
    server: Server


@contextlib.asynccontextmanager
async def running_router(
    *workers: FakeWorker, short_way: bool = False, **options: object
) -> AsyncIterator[RunningRouter]:
    """Starts the workers and a router in front of them. Probes are fast unless `options` say otherwise. With
    `short_way`, requests that may take it do so from the first on; without, none does."""
    for worker in workers:
        await worker.start()
    defaults = RouterOptions(
        workers=tuple(worker.url for worker in workers), health_check_interval_s=0.05, health_check_failure_threshold=2
    )
    sockets = listen("127.0.0.1", 0)
    async with (
        open_router(replace(defaults, **options)) as router,  # type: ignore[arg-type]
        aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        if router.rule is not None and short_way:
            await open_connections(router.rule, workers)
        http = connection_class(router if short_way else replace(router, rule=None))
        server = PromptServer(router.app, date_header=False, drain_s=1, http=http)
        serving = asyncio.create_task(server.serve(sockets))
        try:
            await until(lambda: router.app.status()["routable"] == len(workers))
            yield RunningRouter(router.app, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", session, server)
        finally:
            await session.close()
            server.should_exit = True
            for worker in workers:
                await worker.stop()
            await serving


async def open_connections(rule: FastPathRule, workers: Sequence[FakeWorker]) -> None:
    connections = rule.proxy.client.pool
    for worker in workers:
        origin = address_of(worker.url).origin
        opened = [await connect(origin) for _ in range(CONNECTIONS)]
        for connection in opened:
            connection.complete = True
            connections.give_back(origin, connection)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. The test's own timeout ends a wait that never ends."""
    while not condition():  # noqa: ASYNC110 - the condition may be anything
        await asyncio.sleep(0.005)
