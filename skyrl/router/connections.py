"""The router's connections to its workers: keeps unused ones, and opens new ones."""

from __future__ import annotations

import asyncio
import ssl
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from skyrl.router.upstream import NotAccepted, Upstream
from skyrl.runtime.web.idle_connections import IdleConnections

CONNECT_TIMEOUT_S = 5.0


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


class Connections(IdleConnections[Address, Upstream]):
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
        if connection.complete:
            self.keep(address, connection)
        else:
            connection.abort()
