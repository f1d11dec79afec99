"""How completion requests travel: a small protocol, and aiohttp behind it.

aiohttp because plain httpx collapses above some 64 concurrent requests (benchmarks/transports.py measures both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import aiohttp


class NotAccepted(Exception):
    """The request cannot have reached the server: nobody was listening, or the address is wrong."""


class Interrupted(Exception):
    """The connection broke after the request was sent; whether it was processed is unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, whole."""

    status: int
    content_type: str
    body: bytes
    retry_after_s: float | None = None


class CompletionTransport(Protocol):
    """Sends a request, returns the whole answer. Raises NotAccepted or Interrupted, nothing else."""

    async def post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer: ...

    async def get(self, url: str, headers: dict[str, str], timeout_s: float) -> Answer: ...

    async def close(self) -> None: ...


class AiohttpTransport:
    """One connection pool; `max_connections` None is unlimited."""

    def __init__(self, max_connections: int | None = None) -> None:
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections or 0, limit_per_host=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),  # a balancer's cookie would tie all samples to one replica
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=True,
                raise_for_status=False,
                read_bufsize=2**20,
            )
        return self._session

    async def post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
        return await self._send("POST", url, body, headers, timeout_s)

    async def get(self, url: str, headers: dict[str, str], timeout_s: float) -> Answer:
        return await self._send("GET", url, None, headers, timeout_s)

    async def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> Answer:
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=10)
        try:
            async with self._client().request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                content = await response.read()
                return Answer(
                    response.status,
                    response.content_type,
                    content,
                    _seconds(response.headers.get("Retry-After")),
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise NotAccepted(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None
