"""A reverse proxy that records every HTTP status of the server, with the feature that caused it.

The proxy stands between an SDK and the server, so it sees every sender of requests: httpx, a Rust library, another
process. It changes no request, and of the API it knows only which parts of a path are names.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

from .catalogue import ANNOUNCEMENT, QUESTION

MAX_BODY = 256 * 2**20
SAID = 300
"""The number of characters kept of a refusal's body."""
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "te", "upgrade"}
NAMES = (
    (re.compile(r"^(/api/v1/(?:training_runs|sessions|samplers)/)(?!search$)[^/]+"), r"\1{id}"),
    (re.compile(r"(/checkpoints/)[^/]+/[^/]+"), r"\1{kind}/{name}"),
    (re.compile(r"^(/api/v1/downloads/[^/]+/).*"), r"\1..."),
)


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    feature: str
    route: str
    """Method and path, with placeholders such as `{id}` for names."""
    status: int
    said: str
    """The beginning of the body, for statuses of 400 and above."""


def route_of(method: str, path: str) -> str:
    for names, placeholder in NAMES:
        path = names.sub(placeholder, path)
    return f"{method} {path}"


class Recorder:
    """The proxy. It runs in its own thread inside the `with` block."""

    def __init__(self, server: str) -> None:
        self.answers: list[Answer] = []
        self.url = ""
        self._server = server
        self._feature = ""
        self._asked: Counter[str] = Counter()
        """By route: requests since the feature began."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        # If a client disconnects, the proxy closes its request to the server too.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        # One connection per request: the server could close an idle connection in the moment of its next use.
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(
            connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False
        ) as self._client:
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(ANNOUNCEMENT):
            self._feature = request.path.removeprefix(ANNOUNCEMENT)
            self._asked.clear()
            return web.Response()
        if request.path.startswith(QUESTION):
            return web.json_response(self._asked[request.path.removeprefix(QUESTION)])
        feature = self._feature
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        # The server builds links from the address of the request. The links must lead to this proxy.
        headers.append(("Host", request.host))
        body = await request.read()
        url = URL(self._server + request.raw_path, encoded=True)
        route = route_of(request.method, request.path)
        self._asked[route] += 1
        try:
            async with self._client.request(
                request.method,
                url,
                headers=headers,
                data=body,
                allow_redirects=False,
                skip_auto_headers=("User-Agent",),
            ) as answer:
                content = await answer.read()
        except ClientError as error:
            self.answers.append(Answer(feature, route, web.HTTPBadGateway.status_code, f"no answer: {error!r}"))
            raise web.HTTPBadGateway from error
        said = content[:SAID].decode(errors="replace") if answer.status >= 400 else ""
        self.answers.append(Answer(feature, route, answer.status, said))
        kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP]
        return web.Response(status=answer.status, body=content, headers=dict(kept))
