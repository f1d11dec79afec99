"""Unused connections of a client to servers, by address. Opens none, and knows nothing of what they carry."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

MAX_IDLE_S = 4.0
"""How long an unused connection is kept. uvicorn, the web server of vLLM and SGLang, closes an unused connection after
5 s; a request sent in that moment would be lost."""


class Connection(Protocol):
    idle_since: float
    reusable: bool

    def abort(self) -> None: ...


Address = TypeVar("Address", bound=Hashable)
C = TypeVar("C", bound=Connection)


class IdleConnections(Generic[Address, C]):
    """Gives the most recently used connection first. Closes connections that nothing used for MAX_IDLE_S."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[C]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, address: Address) -> C | None:
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

    def keep(self, address: Address, connection: C) -> None:
        """Keep a connection on which no request runs. One that cannot be used again is closed."""
        if not connection.reusable or self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(address, []).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Runs again while any connection is kept."""
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
        """Close all of them, and each that is given back later."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
