"""A cheap HTTP/1.1 client: one keep-alive connection with one request at a time."""

from __future__ import annotations

import asyncio
from typing import cast

CONNECT_S = 5.0
"""How long connecting may take, as in the Tinker SDK."""
_LENGTH = b"\r\ncontent-length:"


class Connection(asyncio.Protocol):
    """A connection to one server. It connects at the first request, and at the next request after it was lost.

    `post` and `get` raise ConnectionError for an answer without Content-Length.
    """

    def __init__(self, host: str, port: int, headers: bytes) -> None:
        """`headers`: complete lines with their line ends, sent with every request."""
        self._host, self._port = host, port
        self._rest = b" HTTP/1.1\r\nHost: bench\r\n" + headers + b"Content-Length: "
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = b""
        self._head, self._end = -1, 0
        self._closed = 0

    async def post(self, path: bytes, body: bytes) -> tuple[int, bytes]:
        """Send a request; returns status and body of the answer. Raises ConnectionError, OSError."""
        return await self._send(b"POST", path, body)

    async def get(self, path: bytes) -> tuple[int, bytes]:
        """As `post`."""
        return await self._send(b"GET", path, b"")

    async def _send(self, method: bytes, path: bytes, body: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._buffer, self._head = b"", -1
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: self, self._host, self._port)
        if self._transport is None:
            raise ConnectionError("the connection was lost at once")
        self._answer = answer = loop.create_future()
        self._transport.write(b"%s %s%s%d\r\n\r\n%s" % (method, path, self._rest, len(body), body))
        return await answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            self._closed += 1

    def lose(self) -> None:
        """Break the connection, as a proxy between would: a request that waits for its answer fails."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed:  # `close` gave this connection up, and a new one may exist already
            self._closed -= 1
            return
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection was lost before the answer was whole"))

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if self._head < 0 and not self._read_head():
            return
        if len(self._buffer) < self._end:
            return
        status, body = int(self._buffer[9:12]), self._buffer[self._head + 4 : self._end]
        self._buffer, self._head = self._buffer[self._end :], -1
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def _read_head(self) -> bool:
        """Whether the head is complete; then sets the ends of head and body."""
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return False
        lines = self._buffer[: head + 2].lower()
        at = lines.find(_LENGTH)
        if at < 0:
            if self._transport is not None:
                self._transport.abort()
            return False
        begin = at + len(_LENGTH)
        self._head = head
        self._end = head + 4 + int(lines[begin : lines.find(b"\r\n", begin)])
        return True
