"""A sidecar in this process, in front of a vLLM that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from skyrl.inference.sidecar.app import Sidecar, open_sidecar
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.runtime.processes.ports import listen
from tests.component.router_world import Exchange, FakeWorker, PromptServer

Completion = Callable[[Exchange], Awaitable[None]]
CONTEXT = 100


def choice(tokens: list[int], **fields: Any) -> dict[str, Any]:
    """A choice as vLLM answers it, with a logprob of -0.5 for each token."""
    return {
        "index": 0,
        "text": "".join(f"<{token}>" for token in tokens),
        "token_ids": tokens,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-0.5] * len(tokens),
            "top_logprobs": [{f"token_id:{token}": -0.5} for token in tokens],
        },
        "finish_reason": "length",
        "stop_reason": None,
    } | fields


def completion(one: dict[str, Any], prompt_tokens: int = 3) -> dict[str, Any]:
    count = len(one["token_ids"])
    return {
        "id": "cmpl-x",
        "choices": [one],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": count + prompt_tokens},
    }


def answers(value: Any, status: str = "200 OK") -> Completion:
    """Answer every completion with this."""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(value).encode(), status)

    return script


def events(*values: Any, done: bool = True) -> bytes:
    """The whole answer of a stream, without the chunk that ends it unless `done`."""
    data = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)
    data += b"data: [DONE]\n\n" if done else b""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if done else b"")


class FakeVllm(FakeWorker):
    """`complete` answers `/v1/completions`. `aborted` collects the ids of `/abort_requests`, in the order of calls.
    `answer` overrides the answers of paths. Without `dev_mode`, development endpoints are unknown routes."""

    def __init__(self, complete: Completion, *, dev_mode: bool = True) -> None:
        super().__init__(self._script)
        self.complete = complete
        self.dev_mode = dev_mode
        self.aborted: list[list[str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.answer: dict[str, Completion] = {}
        self.version = "default"

    async def _script(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if path in self.answer:
            await self.answer[path](exchange)
        elif path == "/v1/completions":
            self.bodies.append(json.loads(exchange.request.body))
            await self.complete(exchange)
        elif path == "/v1/models":
            model = {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": CONTEXT}
            await answers({"data": [model]})(exchange)
        elif path == "/tokenize":
            text = json.loads(exchange.request.body)["prompt"]
            await answers({"tokens": [1, *map(len, text.split())]})(exchange)
        elif not self.dev_mode:
            await answers({"detail": "Not Found"}, "404 Not Found")(exchange)
        elif path == "/is_paused":
            await answers({"is_paused": False})(exchange)
        elif path == "/weight_info":
            await answers({"weight_version": self.version})(exchange)
        elif path == "/abort_requests":
            self.aborted.append(json.loads(exchange.request.body).get("request_ids", []))
            await answers({"status": "aborted"})(exchange)
        else:
            await answers({"detail": "Not Found"}, "404 Not Found")(exchange)


@dataclass
class RunningSidecar:
    app: Sidecar
    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """The status, and the body: as JSON if it is."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **options) as answer:
            content = await answer.read()
            return answer.status, json.loads(content) if answer.content_type == "application/json" else content

    async def generate(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/generate", {"input_ids": [5, 6, 7]} | body)

    async def total(self) -> int:
        """What a trainer waits for to become 0."""
        _, loads = await self.post("/v1/loads?include=core")
        return loads["aggregate"]["total_reqs"]


@contextlib.asynccontextmanager
async def running_sidecar(vllm_url: str, **options: Any) -> AsyncIterator[RunningSidecar]:
    sockets = listen("127.0.0.1", 0)
    async with (
        open_sidecar(SidecarSettings(vllm_url, **options)) as app,
        aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        server = PromptServer(app, date_header=False, drain_s=1)
        serving = asyncio.create_task(server.serve(sockets))
        try:
            yield RunningSidecar(app, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", session)
        finally:
            await session.close()
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def sidecar_before(vllm: FakeVllm, **options: Any) -> AsyncIterator[RunningSidecar]:
    await vllm.start()
    try:
        async with running_sidecar(vllm.url, **options) as sidecar:
            yield sidecar
    finally:
        await vllm.stop()


V = TypeVar("V", bound=FakeVllm)


@contextlib.asynccontextmanager
async def sidecar_and(vllm: V, **options: Any) -> AsyncIterator[tuple[RunningSidecar, V]]:
    async with sidecar_before(vllm, **options) as sidecar:
        yield sidecar, vllm
