"""How many requests are at workers at once, and how many may wait for that."""

from __future__ import annotations

import asyncio
from collections import deque


class TooManyWaiting(Exception):
    """The queue is full."""


class Slots:
    """First come, first served. At most `running` holders, at most `waiting` callers that wait."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free = running
        self._most_waiting = waiting
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def try_acquire(self) -> bool:
        """Take a slot without waiting."""
        if self._free > 0:
            self._free -= 1
            return True
        return False

    async def acquire(self) -> None:
        """Take a slot; wait for one if none is free. Raises TooManyWaiting."""
        if self.try_acquire():
            return
        if len(self._waiters) >= self._most_waiting:
            raise TooManyWaiting
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot came at the same moment
            elif waiter in self._waiters:  # `release` may have passed it over already
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """Give the slot back. The caller that has waited longest gets it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
