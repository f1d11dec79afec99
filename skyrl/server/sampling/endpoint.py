"""The address of the inference server: a fixed URL, or the URL that the engine has published in its state row."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from skyrl.storage.db.engine_state import EngineState
from skyrl.storage.db.faults import DatabaseError, is_transient, reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL without a trailing slash. `generation` distinguishes endpoints published at the same URL."""

    url: str
    generation: int


class EndpointUnknown(Exception):
    """The address cannot be looked up now. The text gives the reason, without secrets: tenants read it."""


class EndpointResolver(Protocol):
    """`resolve()` for each sample, `resolve(stale=endpoint)` after that endpoint failed. Raises EndpointUnknown."""

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None: ...


class FixedEndpoint:
    """An inference server that skyrl does not manage. Its address never changes."""

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(url.rstrip("/"), 0)

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None:
        return self._endpoint


class EngineEndpoint:
    """The address in the engine's row, cached. As long as the endpoint works, the cache is read without a lock. After a
    failure one caller reads the row again for all callers that wait."""

    def __init__(self, read: Callable[[], Awaitable[EngineState]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._cached: Endpoint | None = None
        self._reads = 0
        self._away = False
        """Whether the last read failed because the database is away."""

    async def resolve(self, stale: Endpoint | None = None) -> Endpoint | None:
        """The endpoint, None while none is published. If the endpoint `stale` has just failed, the row is read again;
        the same endpoint is returned only if the row still has it.

        Raises EndpointUnknown while the database is away.
        """
        cached, reads = self._cached, self._reads
        if cached is not None and cached is not stale:
            return cached
        async with self._lock:
            # Another caller may have read the row while this one waited for the lock, also if no URL is published.
            if self._reads == reads or (self._cached is not None and self._cached is stale and not self._away):
                await self._refresh()
            if self._away:
                raise EndpointUnknown("the server's database cannot be used now")
            return self._cached

    async def _refresh(self) -> None:
        try:
            state = await self._read()
        except DatabaseError as error:
            if not is_transient(error):
                raise
            if not self._away:
                logger.error("samples wait: the inference server's address cannot be read: %s", reason(error))
            self._away = True
        else:
            self._away = False
            url = state.inference_proxy_url
            self._cached = None if url is None else Endpoint(url.rstrip("/"), state.generation)
        self._reads += 1
