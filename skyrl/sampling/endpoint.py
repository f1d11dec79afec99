"""Where completions go: a fixed URL, or the one that the engine has published in its state row."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from skyrl.db.engine_state import EngineState


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL without a trailing slash; `generation` tells one published endpoint from the next at the same URL."""

    url: str
    generation: int


class EndpointResolver(Protocol):
    """`resolve()` on the hot path; `resolve(stale=endpoint)` after it failed."""

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None: ...


class FixedEndpoint:
    """Somebody else's server: it has one address, whatever happens."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url.rstrip("/"), 0)

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None:
        return self._endpoint


class EngineEndpoint:
    """The engine's row, cached. Without a failure the cache is read without a lock; after one, one reader refreshes."""

    def __init__(self, read: Callable[[], Awaitable[EngineState]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._cached: Endpoint | None = None
        self._reads = 0

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None:
        """The endpoint, None while there is none. `stale` is one that just failed: it makes the row be read again,
        and is returned again only if the row still says so."""
        cached, reads = self._cached, self._reads
        if cached is not None and cached is not stale:
            return cached
        async with self._lock:
            # Somebody else read it meanwhile; also when there still is none, or everybody would read in turn.
            if self._reads != reads and (self._cached is None or self._cached is not stale):
                return self._cached
            state = await self._read()
            self._reads += 1
            url = state.inference_proxy_url
            self._cached = None if url is None else Endpoint(url.rstrip("/"), state.generation)
            return self._cached
