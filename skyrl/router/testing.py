"""A test kit for authors of middleware: one middleware in front of a worker that the test writes, without a network.

async def worker(request: Request) -> Response:
    return Response.of_json(200, {"text": "hello"})

bench = MiddlewareBench(MyMiddleware, worker)
answer = await bench.post("/generate", {"text": "hi"})
assert bench.received[0].headers.get("x-mine") == "1"
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from skyrl.http.messages import AsgiApp, Message, Receive, Scope, Send
from skyrl.router.messages import AppCall, Request, Response
from skyrl.router.middleware import MAX_BODY_BYTES, RouterContext, made

WorkerFunction = Callable[[Request], Awaitable[Response]]


class MiddlewareBench:
    """`plugin` is the middleware's class. `received` holds the requests that reached the worker, in order. `options` is
    what `--middleware-options` gives. The middleware object itself is `plugin`."""

    def __init__(
        self,
        plugin: Callable[..., Any],
        worker: WorkerFunction,
        *,
        tokenizer_dir: Path | None = None,
        options: dict[str, object] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.received: list[Request] = []
        self._worker = worker
        context = RouterContext(tokenizer_dir=tokenizer_dir, options=options, max_body_bytes=max_body_bytes)
        self.plugin: Any = made(plugin, self._serve, context)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, MAX_BODY_BYTES)
        await request.body()
        self.received.append(request)
        response = await self._worker(request)
        await response.send(send)

    async def post(self, path: str, value: Any, headers: dict[str, str] | None = None) -> Response:
        """POST `value` as JSON; the whole answer. Raises what the middleware raises."""
        return await self.ask("POST", path, json.dumps(value).encode(), headers)

    async def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Response:
        """Any request; the whole answer. Raises what the middleware raises."""
        target, _, query = path.partition("?")
        given = {"content-length": str(len(body)), **(headers or {})}
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # this client never leaves
            raise AssertionError

        app: AsgiApp = self.plugin
        call = AppCall(app, Request(scope, receive, MAX_BODY_BYTES))
        try:
            response = await call.response()
            await response.body()
        finally:
            await call.close()
        return response
