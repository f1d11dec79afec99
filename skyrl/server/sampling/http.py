"""HTTP/1.1 for the forwarding path alone: keeps connections to inference servers, and sends each request on a free one.

No redirects, cookies, proxies or content codings: the path does not need them, and no sample pays for them.
docs/decisions/sample-path.md has figures of this client beside general ones.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlsplit

from skyrl.runtime.web.idle_connections import IdleConnections
from skyrl.server.sampling.answer_memory import AnswerMemory
from skyrl.server.sampling.answer_stream import AnswerStream
from skyrl.server.sampling.http_connection import HttpConnection
from skyrl.server.sampling.transport import CONTROL_ANSWER_BYTES, Answer, NotAccepted, Pieces

P = TypeVar("P", bound=asyncio.Protocol)

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect. `tls` None is plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@lru_cache(maxsize=256)
def _address(url: str) -> tuple[Origin, bytes, bytes]:
    """The origin, the request target and the Host header. Raises NotAccepted if `url` is no http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotAccepted(f"invalid URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        raise NotAccepted(f"invalid URL {url!r}")
    tls = _tls() if parts.scheme == "https" else None
    origin = Origin(parts.hostname, port or (80 if tls is None else 443), tls)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    return origin, target.encode(), parts.netloc.rpartition("@")[2].encode()


class HttpTransport:
    """Keeps unused connections by origin and takes the most recently used first. At most `max_connections` posts run at
    once; None is unlimited.

    Header values are not checked: they come from the configuration, and from ids that the server made."""

    def __init__(self, max_connections: int | None = None) -> None:
        self._idle: IdleConnections[Origin, HttpConnection] = IdleConnections()
        self._slots = None if max_connections is None else asyncio.Semaphore(max_connections)
        self._memory = AnswerMemory()

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        max_bytes: int = CONTROL_ANSWER_BYTES,
        rest: Pieces | None = None,
    ) -> Answer:
        origin, request = self._encode("POST", url, body, headers, 0 if rest is None else rest.size)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._slots is None:
            return await self._exchange(origin, request, deadline, max_bytes, rest)
        await self._take_slot(deadline)
        try:
            return await self._exchange(origin, request, deadline, max_bytes, rest)
        finally:
            self._slots.release()

    async def open_stream(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> AnswerStream:
        """Post a request, and return its answer once the head is there. The caller must close the stream, whose
        connection is one of `max_connections`. Raises NotAccepted and Interrupted."""
        origin, request = self._encode("POST", url, body, headers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self._take_slot(deadline)
        stream = AnswerStream(self._give_slot)
        try:
            await self._open(origin, lambda: stream, deadline)
            await stream.send(request, deadline)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _take_slot(self, deadline: float) -> None:
        if self._slots is None:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError as error:
            raise NotAccepted("no connection was free in time") from error

    def _give_slot(self) -> None:
        if self._slots is not None:
            self._slots.release()

    async def get(
        self, url: str, headers: Mapping[str, str], timeout_s: float, max_bytes: int = CONTROL_ANSWER_BYTES
    ) -> Answer:
        """Not bounded by `max_connections`: a health check must not wait until a post has ended."""
        origin, request = self._encode("GET", url, b"", headers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await self._exchange(origin, request, deadline, max_bytes)

    @staticmethod
    def _encode(
        method: str, url: str, body: bytes, headers: Mapping[str, str], rest_bytes: int = 0
    ) -> tuple[Origin, bytes]:
        origin, target, host = _address(url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        values = method.encode(), target, host, lines.encode("latin-1"), len(body) + rest_bytes
        head = b"%s %s HTTP/1.1\r\nHost: %s\r\n%sContent-Length: %d\r\n\r\n" % values
        return origin, head + body

    async def _exchange(
        self, origin: Origin, request: bytes, deadline: float, max_bytes: int, rest: Pieces | None = None
    ) -> Answer:
        connection = self._idle.take(origin) or await self._open(origin, lambda: HttpConnection(self._memory), deadline)
        answer = await connection.exchange(request, deadline, max_bytes, rest)
        self._idle.keep(origin, connection)
        return answer

    @staticmethod
    async def _open(origin: Origin, make: Callable[[], P], deadline: float) -> P:
        """Connect a protocol. Raises NotAccepted."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + CONNECT_TIMEOUT_S)):
                _, connection = await loop.create_connection(make, origin.host, origin.port, ssl=origin.tls)
        except TimeoutError as error:
            raise NotAccepted("no connection in time") from error
        except (OSError, OverflowError, UnicodeError) as error:
            raise NotAccepted(f"{type(error).__name__}: {error}") from error
        return connection

    async def close(self) -> None:
        self._idle.close()
