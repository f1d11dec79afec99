"""Samples that the inference server has died on again and again: let through a few at a time, then one by one.

Knows counts and turns; what a death is, and when a sample has had enough of them, is the forwarding client's.
docs/decisions/interrupted-samples.md says why.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter

WIDTHS = (64, 8, 1)


class Suspects:
    """Turns for samples by how many deaths each has seen. Those that have seen the same number go together, in groups
    of the largest of WIDTHS that is smaller than their number; whoever has seen most goes first, and nobody of the
    others meanwhile."""

    def __init__(self) -> None:
        self._present: Counter[int] = Counter()
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []
        """A heap: minus the deaths, the order of arrival, and who waits."""
        self._arrivals = itertools.count()
        self._running = 0
        self._deaths = 0
        """What those that run have seen."""

    def add(self, deaths: int) -> None:
        """A sample that has seen so many deaths is there, and will ask for a turn."""
        self._present[deaths] += 1

    def remove(self, deaths: int) -> None:
        """It has ended, or seen one more."""
        self._present[deaths] -= 1

    async def wait_turn(self, deaths: int) -> bool:
        """Wait until a sample may be sent; says whether no other suspect may be then. `end_turn` has to follow."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-deaths, next(self._arrivals), admitted))
        self._admit()
        try:
            return await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # it had its turn at the same moment
                self._running -= 1
            self._admit()
            raise

    def end_turn(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            deaths = -self._waiting[0][0]
            width = self._width(deaths)
            if self._running and (deaths != self._deaths or self._running >= width):
                return
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.cancelled():
                self._running += 1
                self._deaths = deaths
                admitted.set_result(width == 1)

    def _width(self, deaths: int) -> int:
        return next((width for width in WIDTHS if width < self._present[deaths]), 1)
