"""Reads the files of pictures. Those that were read last stay in memory, with a bound in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from threading import Lock

from cachetools import LRUCache

from skyrl.storage.db import pictures
from skyrl.storage.db.database import Database

KEPT_BYTES = 256 * 2**20
"""The most bytes of files that a process keeps in memory."""


class PictureFiles:
    """The files of one process. Threads may share it."""

    def __init__(self, database: Database, kept_bytes: int = KEPT_BYTES) -> None:
        self._database = database
        self._kept: LRUCache[tuple[str, str], bytes] = LRUCache(kept_bytes, getsizeof=len)
        self._lock = Lock()

    def put(self, tenant: str, digest: str, data: bytes) -> None:
        """Keep a file in memory. One that is larger than all that may be kept is read from the database again."""
        with self._lock:
            if len(data) <= self._kept.maxsize:
                self._kept[tenant, digest] = data

    def read(self, tenant: str, digests: Collection[str]) -> dict[str, bytes]:
        """The files of those of a tenant's pictures that are stored, by digest."""
        found, missing = self._in_memory(tenant, digests)
        if missing:
            stored = self._database.read(lambda c: pictures.files(c, tenant, missing))
            for digest, data in stored.items():
                self.put(tenant, digest, data)
            found |= stored
        return found

    async def read_async(self, tenant: str, digests: Collection[str]) -> dict[str, bytes]:
        """`read`, on a thread if a file is not in memory."""
        found, missing = self._in_memory(tenant, digests)
        return found if not missing else await asyncio.to_thread(self.read, tenant, digests)

    def _in_memory(self, tenant: str, digests: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
        found: dict[str, bytes] = {}
        with self._lock:
            for digest in digests:
                if (data := self._kept.get((tenant, digest))) is not None:
                    found[digest] = data
        return found, [digest for digest in digests if digest not in found]
