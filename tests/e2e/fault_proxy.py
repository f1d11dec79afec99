"""A reverse proxy on loopback that injects planned faults between an unmodified client and a real server.

The proxy knows paths, statuses and bytes, and deliberately no meaning of a request. A fault is planned for the next
request to a path and used once. Every request is recorded, with the server's answers and the status that the client
got.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

WAIT_S = 300.0
_HOP_BY_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"}
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """An answer of the server, or an answer that the client will get."""

    status: int
    body: bytes = b""
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Call:
    """One request of the client. `answers` are the server's answers, in order. `told` is the status that the client
    got; None if it has got none so far."""

    method: str
    target: str
    """Path and query as the client sent them."""
    body: bytes
    headers: CIMultiDict[str]
    _send: Callable[[Call], Awaitable[Answer]]
    answers: list[Answer] = field(default_factory=list)
    told: int | None = None

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest()

    async def forward(self) -> Answer:
        """Send the request to the server; may be called again."""
        answer = await self._send(self)
        self.answers.append(answer)
        return answer


Fault = Callable[[Call], Awaitable[Answer | None]]
"""Acts on a call; None closes the client's connection without an answer."""


async def lost_response(call: Call) -> None:
    """The server handles the request, and the client gets no answer."""
    await call.forward()


async def lost_request(_: Call) -> None:
    """The connection breaks before the server receives the request."""


async def twice(call: Call) -> Answer:
    """The network delivers the request twice at the same moment; the client gets the second answer."""
    return (await asyncio.gather(call.forward(), call.forward()))[1]


def answer(status: int, body: Any = None, **headers: str) -> Fault:
    """The server does not receive the request; the client gets this answer. Underscores in header names become
    dashes."""
    text = b"" if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def fault(_: Call) -> Answer:
        return Answer(status, text, CIMultiDict({"Content-Type": "application/json"} | named))

    return fault


def busy(status: int, **headers: str) -> Fault:
    """`answer` with a body in the server's format."""
    return answer(status, {"detail": f"{status} on purpose", "field": None}, **headers)


def edited(change: Callable[[Any], Any]) -> Fault:
    """Change the server's JSON answer on its way to the client."""

    async def fault(call: Call) -> Answer:
        original = await call.forward()
        return Answer(original.status, json.dumps(change(original.json())).encode(), original.headers)

    return fault


def late(seconds: float) -> Fault:
    async def fault(call: Call) -> Answer:
        await asyncio.sleep(seconds)
        return await call.forward()

    return fault


class Gate:
    """Holds calls until the test, on its own thread, opens the gate."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()

    async def hold(self, call: Call) -> Answer:
        await self.swallow(call)
        return await call.forward()

    async def swallow(self, _: Call) -> None:
        """Hold the call like the others, and never forward it."""
        self._reached.set()
        await asyncio.to_thread(self._open.wait, WAIT_S)

    def open(self) -> None:
        self._open.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(WAIT_S), "no call came to the gate"


def _is_end_to_end(header: str) -> bool:
    return header.lower() not in _HOP_BY_HOP


class FaultProxy:
    """A proxy that runs in its own thread inside the `with` block. With `drip_bytes` set, a body is sent in pieces of
    that size, 2 ms apart."""

    def __init__(self, upstream: str) -> None:
        self.drip_bytes = 0
        self.calls: list[Call] = []
        self.url = ""
        self._upstream = upstream
        self._planned_faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._permanent_faults: dict[str, Fault] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    def plan(self, path: str, *faults: Fault) -> None:
        """The next requests with a path that ends with `path` get these faults, one each, in order."""
        self._planned_faults[path].extend(faults)

    def always(self, path: str, fault: Fault) -> None:
        """Every request with a path that ends with `path` gets this fault, unless another fault is planned for it."""
        self._permanent_faults[path] = fault

    def seen(self, path: str) -> list[Call]:
        """The requests so far with a path that ends with `path`, in order of arrival."""
        return [call for call in self.calls if call.path.endswith(path)]

    def unused(self) -> list[str]:
        """Paths with planned faults that were not used. A test that leaves faults unused has tested less than it
        claims."""
        return [path for path, faults in self._planned_faults.items() if faults]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "the client did not send the request in time"
            time.sleep(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(), auto_decompress=False
        )
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = CIMultiDict((name, value) for name, value in request.headers.items() if _is_end_to_end(name))
        call = Call(request.method, request.raw_path, await request.read(), headers, self._send)
        self.calls.append(call)
        try:
            told = await self._fault_for(call.path)(call)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            told = None  # the server has closed the connection, so the proxy does the same
        if told is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        call.told = told.status
        response = web.StreamResponse(status=told.status, headers=told.headers)
        response.content_length = len(told.body)
        with suppress(aiohttp.ClientConnectionResetError):  # the client has disconnected
            await response.prepare(request)
            step = self.drip_bytes or max(len(told.body), 1)
            for start in range(0, len(told.body), step):
                await response.write(told.body[start : start + step])
                if self.drip_bytes:
                    await asyncio.sleep(0.002)
            await response.write_eof()
        return response

    def _fault_for(self, path: str) -> Fault:
        for suffix, faults in self._planned_faults.items():
            if faults and path.endswith(suffix):
                return faults.popleft()
        for suffix, fault in self._permanent_faults.items():
            if path.endswith(suffix):
                return fault
        return Call.forward

    async def _send(self, call: Call) -> Answer:
        url = URL(self._upstream + call.target, encoded=True)
        async with self._session.request(call.method, url, data=call.body, headers=call.headers) as response:
            kept = CIMultiDict((name, value) for name, value in response.headers.items() if _is_end_to_end(name))
            return Answer(response.status, await response.read(), kept)
