"""Many inference servers in one process, each at a port of its own, that answer in vLLM's shape and do no work.

A worker answers /v1/completions as the null upstream does, and /health, /is_sleeping and the routes of adapters at
once. The process has one more port, CONTROL: GET /control shows by path how many requests came to all workers together;
`?kill=N` and `?revive=N` make worker N refuse connections and accept them again.
Usage: python -m benchmarks.fake_workers COUNT [SPREAD_S]. Prints one line of JSON: the port CONTROL, and the workers'
ports. The workers begin to listen one after another, spread over SPREAD_S seconds.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import httpx
import uvloop

from benchmarks.null_upstream import Requests, Upstream, http_answer
from skyrl.inference.vllm_plugin.incarnation import HEADER
from skyrl.runtime.processes.supervision import dies_with_parent

_ORDER = re.compile(rb"(kill|revive)=(\d+)")
HOST = "127.0.0.1"


class Worker(Upstream):
    """One worker. `paths` counts the requests of all workers by path."""

    def __init__(self, name: str, paths: Counter[str]) -> None:
        super().__init__(0.0)
        self.port = 0
        self._paths = paths
        self.transports: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None
        health = http_answer(b"{}").replace(b"Content-Type", f"{HEADER}: {name}\r\nContent-Type".encode(), 1)
        self._ready = {b"/health": health, b"/is_sleeping": http_answer(b'{"is_sleeping":false}')}

    async def bind(self) -> None:
        """Take a port. It refuses connections until `listen`."""

        def connection() -> Requests:
            return _Counted(self)

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(connection, HOST, self.port, backlog=4096, start_serving=False)
        self.port = self._server.sockets[0].getsockname()[1]

    async def listen(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        if self._server is None:
            await self.bind()
        assert self._server is not None
        await self._server.start_serving()

    async def kill(self) -> None:
        assert self._server is not None
        self._server.close()
        self._server = None
        for transport in list(self.transports):
            transport.abort()

    def reply(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        self._paths[path.partition(b"?")[0].decode()] += 1
        if (ready := self._ready.get(path)) is not None:
            transport.write(ready)
        else:
            super().reply(transport, path, body)


class _Counted(Requests):
    """A connection that its worker can abort."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._of = worker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._of.transports.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._of.transports.discard(self._transport)


class _Control(Upstream):
    def __init__(self, workers: list[Worker], paths: Counter[str]) -> None:
        super().__init__(0.0)
        self._workers = workers
        self._paths = paths
        self._orders: set[asyncio.Task[None]] = set()

    def reply(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        if (order := _ORDER.search(path)) is not None:
            worker = self._workers[int(order[2])]
            task = asyncio.create_task(worker.kill() if order[1] == b"kill" else worker.listen())
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
        transport.write(http_answer(json.dumps(self._paths).encode()))


async def serve(count: int, spread_s: float) -> None:
    paths: Counter[str] = Counter()
    workers = [Worker(f"start-{number}", paths) for number in range(count)]
    for worker in workers:
        await worker.bind()
    control = _Control(workers, paths)
    server = await asyncio.get_running_loop().create_server(lambda: Requests(control), HOST, 0)
    ports = {"control": server.sockets[0].getsockname()[1], "workers": [worker.port for worker in workers]}
    print(json.dumps(ports), flush=True)
    await asyncio.gather(*(worker.listen(spread_s * at / count) for at, worker in enumerate(workers)))
    await server.serve_forever()


class FakeWorkers:
    """The process, from outside. `urls` are the workers' addresses."""

    def __init__(self, pid: int, control_port: int, ports: list[int]) -> None:
        self.pid = pid
        self.urls = [f"http://{HOST}:{port}" for port in ports]
        self._control = f"http://{HOST}:{control_port}/control"

    def order(self, query: str = "") -> Counter[str]:
        """Send `kill=N` or `revive=N`; returns the number of requests by path so far."""
        return Counter(httpx.get(f"{self._control}?{query}", trust_env=False, timeout=30).json())


@contextmanager
def fake_workers(count: int, spread_s: float = 0.0) -> Generator[FakeWorkers]:
    command = dies_with_parent([sys.executable, "-m", "benchmarks.fake_workers", str(count), str(spread_s)])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            yield FakeWorkers(process.pid, ports["control"], ports["workers"])
        finally:
            process.terminate()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
