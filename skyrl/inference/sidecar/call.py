"""One HTTP request to the sidecar, and its answer, over ASGI. Knows no routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from skyrl.inference.sidecar.errors import ClientLeft, SidecarError, TooLarge

T = TypeVar("T")
Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

JSON: HeaderList = [(b"content-type", b"application/json")]
PLAIN: HeaderList = [(b"content-type", b"text/plain; charset=utf-8")]
EVENTS: HeaderList = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Call:
    """`answered`: the status has been sent, so that an error cannot be answered any more."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.answered = False
        self._receive = receive
        self._send = send
        self._max = max_body_bytes

    async def body(self) -> bytes:
        """Raises TooLarge, ClientLeft."""
        chunks, size = [], 0
        async for chunk in self.body_chunks():
            size += len(chunk)
            if size > self._max:
                raise TooLarge(f"body: may have {self._max} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    async def body_chunks(self) -> AsyncIterator[bytes]:
        """Raises ClientLeft."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body", False):
                return

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. The whole body must have been read. When the client leaves, `work` is cancelled, and
        ClientLeft is raised."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self.left())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.wait({working, leaving})

    async def left(self) -> None:
        """Wait until the client leaves. The whole body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: HeaderList) -> None:
        self.answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, status: int, body: bytes = b"", headers: HeaderList | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*(headers or ()), length])
        await self.write(body, more=False)

    async def answer_json(self, value: Any, status: int = 200) -> None:
        await self.answer(status, compact(value), JSON)

    async def answer_error(self, error: SidecarError) -> None:
        await self.answer(error.status, compact(error_body(error)), [*JSON, *_error_headers(error)])

    async def answer_failure(self, error: SidecarError, status: int) -> None:
        """As `answer_error`, with SGLang's two fields of a failed change, and the outcome of each rank."""
        ranks = {} if error.rank_results is None else {"rank_results": error.rank_results}
        body = {"success": False, "message": error.message} | ranks | error_body(error)
        await self.answer(status, compact(body), [*JSON, *_error_headers(error)])


def compact(value: Any) -> bytes:
    """JSON without spaces. One of the routers in use writes JSON anew without spaces, and keeps our Content-Length."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def _error_headers(error: SidecarError) -> HeaderList:
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]


def error_body(error: SidecarError) -> dict[str, Any]:
    return {"error": {"message": error.message} | ({} if error.code is None else {"code": error.code})}
