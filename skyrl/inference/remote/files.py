"""The node's cache for one event loop: all who ask for a save at once wait for one download, and no call keeps the
process from ending."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from skyrl.inference.remote.cache import NodeCache
from skyrl.inference.remote.daemons import Daemons
from skyrl.storage.checkpoint_store.base import NotStored, StoreError

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE, LINKS_AT_ONCE = 8, 4


class NodeFiles:
    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._fetches, self._links = Daemons(FETCHES_AT_ONCE), Daemons(LINKS_AT_ONCE)
        self._opening: asyncio.Task[OSError | None] | None = None
        self._bringing: dict[str, asyncio.Task[Path]] = {}
        self.releasing: dict[str, asyncio.Task[None]] = {}
        """By key, the task that deletes this vLLM's files."""

    def open(self) -> None:
        """Begin to open the cache, also when it was open: somebody may have deleted it."""
        self._opening = asyncio.create_task(self._open())

    async def bring(self, key: str) -> Path:
        """This vLLM's directory of a save. All requests for the same save wait for one fetch, which goes on if a client
        gives up. Raises StoreError, NotStored and OSError."""
        task = self._bringing.get(key)
        if task is None:
            task = self._bringing[key] = asyncio.create_task(self._cached_or_fetched(key))
            task.add_done_callback(lambda ended: self._brought(key, ended))
        return await asyncio.shield(task)

    def release(self, key: str) -> None:
        """Begin to delete this vLLM's files of a key. A failure is logged."""
        if key not in self.releasing:
            task = self.releasing[key] = asyncio.create_task(self._release(key))
            task.add_done_callback(lambda _: self.releasing.pop(key))

    def _brought(self, key: str, task: asyncio.Task[Path]) -> None:
        del self._bringing[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError | StoreError) and not isinstance(error, NotStored):
            self._opening = None  # the cache is opened anew: somebody may have deleted it

    async def _cached_or_fetched(self, key: str) -> Path:
        if (release := self.releasing.get(key)) is not None:
            await asyncio.wait([release])
        await self._opened()
        directory = await self._links.run(lambda: self._cache.cached(key))
        return directory or await self._fetches.run(lambda: self._cache.fetch(key))

    async def _opened(self) -> None:
        """Return when the cache is open. Raises OSError if it cannot be opened; the next call tries again."""
        if self._opening is None or (self._opening.done() and self._opening.result() is not None):
            self.open()
        assert self._opening is not None
        if (error := await asyncio.shield(self._opening)) is not None:
            raise error

    async def _open(self) -> OSError | None:
        try:
            await self._links.run(self._cache.open)
        except OSError as error:
            logger.warning("the node's directory for weights cannot be used: %s", error)
            return error
        return None

    async def _release(self, key: str) -> None:
        try:
            await self._links.run(lambda: self._cache.release(key))
        except OSError as error:
            logger.warning("the files of %s could not be deleted from this node: %s", key, error)
