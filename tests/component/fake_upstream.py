"""A vLLM-compatible server on a real socket that answers each request as a test tells it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from skyrl.inference.remote.hand_over import CONTENT_TYPE

COMPLETIONS = "/v1/completions"
LOAD = "/v1/load_lora_adapter"


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body, or what is before the files in a message to load an adapter."""
        handed = self.headers.get("content-type") == CONTENT_TYPE
        return json.loads(self.body.partition(b"\n")[0] if handed else self.body)


Reply = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]
"""Answers one request by writing to its connection, or injects a fault into the connection."""


def completion(request: dict[str, Any]) -> dict[str, Any]:
    """A complete answer to `request` in vLLM's format; sample i starts at token i, log-probabilities are -1, -2, ..."""
    length = min(request["max_tokens"] or 4, 4)
    choices = []
    for index in range(request.get("n", 1)):
        tokens = list(range(index, index + length))
        choice: dict[str, Any] = {
            "index": index,
            "text": "...",
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": tokens,
            "logprobs": {
                "token_logprobs": [-1.0 - step for step in range(length)],
                "top_logprobs": [{f"token_id:{token}": -1.0} for token in tokens],
            },
            "prompt_logprobs": None,
        }
        if "prompt_logprobs" in request:
            rows: list[Any] = [{str(token): {"logprob": -0.5, "rank": 1}} for token in request["prompt"]]
            choice["prompt_logprobs"] = [None, *rows[1:]]
        choices.append(choice)
    return {"id": "cmpl-1", "model": request["model"], "choices": choices, "usage": {"prompt_tokens_details": None}}


def reply(
    status: int, body: bytes | str | dict[str, Any], content_type: str = "application/json", **headers: str
) -> Reply:
    """A fixed answer. Underscores in header names become dashes."""

    async def send(_: Received, writer: asyncio.StreamWriter) -> None:
        content = json.dumps(body) if isinstance(body, dict) else body
        _write(writer, status, content.encode() if isinstance(content, str) else content, content_type, headers)

    return send


def error(status: int, message: str, param: str | None = None) -> Reply:
    """A refusal in vLLM's format."""
    return reply(status, {"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}})


def complete(change: Callable[[dict[str, Any]], object] = lambda _: None) -> Reply:
    """A completion whose body `change` has damaged in place."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        body = completion(request.json)
        change(body)
        _write(writer, 200, json.dumps(body).encode(), "application/json", {})

    return send


def every_choice(**values: Any) -> Callable[[dict[str, Any]], None]:
    """A `change` for `complete`: set these fields in all choices."""

    def change(body: dict[str, Any]) -> None:
        for choice in body["choices"]:
            choice.update(values)

    return change


def after(event: asyncio.Event, then: Reply) -> Reply:
    """Reply with `then` once the event is set."""

    async def send(request: Received, writer: asyncio.StreamWriter) -> None:
        await event.wait()
        await then(request, writer)

    return send


async def hang_up(_: Received, writer: asyncio.StreamWriter) -> None:
    """Close the connection without sending a byte."""
    writer.close()


async def close_mid_body(request: Received, writer: asyncio.StreamWriter) -> None:
    body = json.dumps(completion(request.json)).encode()
    writer.write(_head(200, len(body), "application/json", {}) + body[: len(body) // 2])
    await writer.drain()
    writer.close()


async def reset_after_headers(_: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(_head(200, 1000, "application/json", {}))
    await writer.drain()
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def never(_: Received, writer: asyncio.StreamWriter) -> None:
    """Send no answer for as long as the client stays connected."""
    await asyncio.Event().wait()


def _head(status: int, length: int, content_type: str, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {length}", f"Content-Type: {content_type}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _write(writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str, headers: dict[str, str]) -> None:
    writer.write(_head(status, len(body), content_type, headers) + body)


@dataclass
class FakeUpstream:
    """A completion is answered by the next entry of `script`, then by `default`; an adapter load by `on_load`.

    With `adapters` set, a completion for an unknown model gets 404, and a successful load adds its adapter. `controls`
    maps a path (without query) to a reply, and comes before all other replies.
    """

    script: deque[Reply] = field(default_factory=deque)
    default: Reply = field(default_factory=complete)
    on_load: Reply = field(default_factory=lambda: reply(200, "Success: added", "text/plain"))
    on_get: Reply = field(default_factory=lambda: reply(200, b""))
    adapters: set[str] | None = None
    controls: dict[str, Reply] = field(default_factory=dict)
    requests: list[Received] = field(default_factory=list)
    disconnects: int = 0
    """Requests whose client disconnected before the answer."""
    busy: int = 0
    most_busy: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._stopped = False
        self._errors: list[Exception] = []

    @property
    def completions(self) -> list[Received]:
        return [request for request in self.requests if request.path == COMPLETIONS]

    @property
    def loads(self) -> list[Received]:
        return [request for request in self.requests if request.path == LOAD]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close everything. Raises the errors that replies raised."""
        assert self._server is not None
        self._stopped = True
        self._server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()
        if self._errors:
            raise ExceptionGroup("replies failed", self._errors)

    async def until(self, condition: Callable[[FakeUpstream], bool]) -> None:
        """Wait until the condition holds. It is checked again at each arrival and departure of a request."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:
            writer.close()
            return
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections.add(task)

        def done(_: asyncio.Task[None]) -> None:
            self._connections.discard(task)
            writer.close()
            if not task.cancelled() and isinstance(problem := task.exception(), Exception):
                self._errors.append(problem)

        task.add_done_callback(done)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = asyncio.ensure_future(_read_head(reader))
        try:
            while (first := await head) is not None:
                request = await _read_request(first, reader)
                # completes with the next request, or when the client leaves
                head = asyncio.ensure_future(_read_head(reader))
                self.requests.append(request)
                self.busy += 1
                self.most_busy = max(self.most_busy, self.busy)
                await self._notify()
                try:
                    await self._answer(request, writer, head)
                finally:
                    self.busy -= 1
                    await self._notify()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left, or a reply closes the connection
        finally:
            head.cancel()
            await asyncio.gather(head, return_exceptions=True)

    async def _answer(
        self, request: Received, writer: asyncio.StreamWriter, leaving: asyncio.Future[str | None]
    ) -> None:
        """Run the reply, unless the client disconnects first."""
        answering = asyncio.ensure_future(self._choose(request)(request, writer))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            else:
                self.disconnects += 1
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _choose(self, request: Received) -> Reply:
        if (control := self.controls.get(request.path.partition("?")[0])) is not None:
            return control
        if request.method == "GET":
            return self.on_get
        if request.path == LOAD:
            return self._load
        if request.path != COMPLETIONS:
            return error(404, "no such route")
        model = request.json["model"]
        if self.adapters is not None and model not in self.adapters:
            return error(404, f"The model `{model}` does not exist.", "model")
        return self.script.popleft() if self.script else self.default

    async def _load(self, request: Received, writer: asyncio.StreamWriter) -> None:
        await self.on_load(request, writer)
        if self.adapters is not None:
            self.adapters.add(request.json["lora_name"])


async def _read_head(reader: asyncio.StreamReader) -> str | None:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _read_request(head: str, reader: asyncio.StreamReader) -> Received:
    first, *lines = head.rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Received(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


@asynccontextmanager
async def fake_upstream(**options: Any) -> AsyncIterator[FakeUpstream]:
    upstream = FakeUpstream(**options)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


def closed_port() -> str:
    """The URL of a port without a listener. The system gives this port to no process that asks for a free one."""
    return "http://127.0.0.1:1"
