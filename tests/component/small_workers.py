"""Small HTTP servers that stand for inference servers in tests of the router: they answer as told, hang, or refuse.

They record what they get. They do not know models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Got:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class SmallWorker:
    """`answers` maps a path to status and body; any other path is answered with 200 and no body. While `hangs` is set,
    nothing is answered."""

    port: int = 0
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    got: list[Got] = field(default_factory=list)
    hangs: bool = False
    _asked: asyncio.Condition = field(default_factory=asyncio.Condition)
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on the port of the last start, or on a new one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on, and close those that are open."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def asked(self, times: int) -> None:
        """Return when that many requests have come."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.got) >= times)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except asyncio.CancelledError:
            pass  # asyncio's server would report it; stop() has asked for it
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return
        first, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = first.split(" ")
        async with self._asked:
            self.got.append(Got(method, target, headers, body))
            self._asked.notify_all()
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        status, content = self.answers.get(target.partition("?")[0], (200, b""))
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: text/x-test\r\ncontent-length: %d\r\n\r\n" % (status, len(content))
        )
        writer.write(content)
        await writer.drain()


@asynccontextmanager
async def small_workers(count: int) -> AsyncIterator[list[SmallWorker]]:
    workers = [SmallWorker() for _ in range(count)]
    for worker in workers:
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()
