"""The router's connections to its workers: keeps unused ones, and opens new ones."""

from __future__ import annotations

import asyncio
import ssl
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from skyrl.router.upstream import NotAccepted, Upstream

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_S = 4.0
"""How long an unused connection is kept. uvicorn, the web server of vLLM and SGLang, closes an unused connection after
5 s; a request sent in that moment would be lost."""


class Address(NamedTuple):
    """Where a base URL leads. `prefix` comes before every path; `host` is the value of the Host header."""

    name: str
    port: int
    tls: bool
    prefix: bytes
    host: bytes


@lru_cache(maxsize=4096)
def address_of(url: str) -> Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Address(
        parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.encode(), parts.netloc.encode()
    )


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class Connections:
    """Takes the most recently used connection first. Closes connections that nothing used for MAX_IDLE_S."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[Upstream]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, address: Address) -> Upstream | None:
        idle = self._idle.get(address)
        if not idle:
            return None
        too_old = asyncio.get_running_loop().time() - MAX_IDLE_S
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since > too_old:
                return connection
            connection.abort()
        return None

    async def connect(self, address: Address) -> Upstream:
        """Raises NotAccepted."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    Upstream, address.name, address.port, ssl=_tls() if address.tls else None
                )
        except TimeoutError as error:
            raise NotAccepted("no connection in time") from error
        except (OSError, OverflowError, UnicodeError) as error:
            raise NotAccepted(f"{type(error).__name__}: {error}") from error
        return connection

    def give_back(self, address: Address, connection: Upstream) -> None:
        """Keep a connection whose answer has been read to its end; close any other."""
        connection.busy = False
        if not connection.complete or not connection.reusable or self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(address, []).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        too_old = loop.time() - MAX_IDLE_S
        for address, idle in list(self._idle.items()):
            kept = [connection for connection in idle if connection.reusable and connection.idle_since > too_old]
            for connection in set(idle).difference(kept):
                connection.abort()
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]
        self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep) if self._idle else None

    def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
