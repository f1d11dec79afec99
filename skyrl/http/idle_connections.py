"""Unused connections of a client to servers, by address. Opens none, and knows nothing of what they carry."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

MAX_IDLE_S = 4.0
"""How long an unused connection is kept. uvicorn, the web server of vLLM and SGLang, closes an unused connection after
5 s; a request sent in that moment would be lost."""

REFRESH_S = 2.0
"""A connection that was unused for so long is given before the most recently used one. With 2,048 samples in flight,
peaks need more connections than the time between them: without this, up to one connection for ten samples was closed
and opened again, at 60 µs of CPU each."""


class Connection(Protocol):
    idle_since: float
    reusable: bool

    def abort(self) -> None: ...


Address = TypeVar("Address", bound=Hashable)
C = TypeVar("C", bound=Connection)


class IdleConnections(Generic[Address, C]):
    """Gives the most recently used connection first, or one that would soon be too old: as many connections as the
    traffic can keep in use stay open. Closes connections that nothing used for MAX_IDLE_S."""

    def __init__(self) -> None:
        self._idle: dict[Address, deque[C]] = {}
        """The connections of each address, in the order of their last use."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, address: Address) -> C | None:
        idle = self._idle.get(address)
        if not idle:
            return None
        now = asyncio.get_running_loop().time()
        while idle:
            connection = idle.popleft() if idle[0].idle_since < now - REFRESH_S else idle.pop()
            if connection.reusable and connection.idle_since > now - MAX_IDLE_S:
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
        self._idle.setdefault(address, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(MAX_IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Runs again while any connection is kept."""
        loop = asyncio.get_running_loop()
        too_old = loop.time() - MAX_IDLE_S
        for address, idle in list(self._idle.items()):
            kept = deque(each for each in idle if each.reusable and each.idle_since > too_old)
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
