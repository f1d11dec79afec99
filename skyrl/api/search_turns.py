"""Turns of searches: of sessions, checkpoints, the audit log and usage. One reads up to thousands of rows, so a tenant
that searches all the time would take the threads that read the database from all others. Knows tenants, and nothing of
what is searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl.base.wire.errors import RequestError
from skyrl.http.shared_memory import SharedMemory

AT_ONCE = 2
"""Searches that run at the same time in an API process. The next is one of the tenant that has the fewest running."""
MOST = 8
"""Searches of a tenant that run or wait."""


class SearchTurns:
    """Of one API process."""

    def __init__(self) -> None:
        self._running = SharedMemory(AT_ONCE)
        self._asked: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """The time in which a search runs. Raises RequestError 429 if the tenant has MOST of them."""
        if self._asked[tenant] >= MOST:
            raise RequestError(
                f"{MOST} searches of yours run or wait, the most of a tenant; try again later",
                status=429,
                retry_after_s=1,
            )
        self._asked[tenant] += 1
        try:
            place = await self._running.take(1, tenant)
            try:
                yield
            finally:
                place.release()
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant]
