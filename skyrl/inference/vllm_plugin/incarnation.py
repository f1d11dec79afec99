"""The incarnation of a vLLM server (which start of it answers), as a header of every answer of `/health`.

vLLM adds the middleware by its option `--middleware`. The middleware runs in the API server. It imports nothing of
vLLM, so it works in any version. Knows nothing of the rest of skyrl.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = "x-skyrl-incarnation"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class IncarnationHeader:
    """ASGI middleware. The header's value is drawn when the server builds its application: each start has another."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._header = (HEADER.encode(), secrets.token_hex(8).encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/health":
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, receive, send_with_header)
