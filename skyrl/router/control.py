"""Small requests of the router itself to workers: probes and broadcasts. Requests of clients do not pass here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import aiohttp

CONNECT_S = 1.0
MAX_ANSWER_BYTES = 64 * 2**20
"""The checksums of a large model have a few megabytes."""


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = "application/json"


class Unreachable(Exception):
    """No complete answer came in time. The text says why."""


class Refused(Unreachable):
    """The worker refused the connection."""


Fetch = Callable[[str, str, Iterable[tuple[bytes, bytes]], bytes, float], Awaitable[Answer]]
"""method, url, headers, body, timeout in seconds -> the answer. Raises Unreachable."""


class ControlClient:
    """Each request has a connection of its own, so a probe also shows that the worker accepts connections. Use as an
    asynchronous context manager."""

    def __init__(self, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._max_answer_bytes = max_answer_bytes

    async def __aenter__(self) -> ControlClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def fetch(
        self, method: str, url: str, headers: Iterable[tuple[bytes, bytes]], body: bytes, timeout_s: float
    ) -> Answer:
        """Raises Unreachable, also for an answer over `max_answer_bytes`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        try:
            async with self._session.request(
                method, url, headers=sent, data=body or None, timeout=timeout, allow_redirects=False
            ) as response:
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > self._max_answer_bytes:
                        raise Unreachable(f"the answer exceeds {self._max_answer_bytes} bytes")
                return Answer(response.status, bytes(content), response.headers.get("content-type", ""))
        except TimeoutError as error:
            raise Unreachable(f"no answer within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise (Refused if refused else Unreachable)(str(error)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error
