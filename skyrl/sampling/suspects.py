"""Turns for suspects: samples that the inference server has died under more than once. They are sent again a few at a
time, then one by one, so that the sample that kills the server is found.

Knows counts and turns. The forwarding client decides what a death is, and after how many of them a sample fails.
docs/decisions/interrupted-samples.md says why.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter

WIDTHS = (64, 8, 1)


class Suspects:
    """Gives turns by how many deaths each suspect has seen. Suspects that have seen most deaths go first. Suspects with
    the same number of deaths go together, in groups of the largest of WIDTHS that is smaller than their number. All
    others wait meanwhile."""

    def __init__(self) -> None:
        self._present: Counter[int] = Counter()
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []
        """A heap: minus the number of deaths, the order of arrival, and the future that the suspect waits for."""
        self._arrivals = itertools.count()
        self._running = 0
        self._deaths = 0
        """How many deaths the suspects that are being sent have seen."""

    def add(self, deaths: int) -> None:
        """There is one more suspect that has seen so many deaths, and it will ask for a turn."""
        self._present[deaths] += 1

    def remove(self, deaths: int) -> None:
        """A suspect has ended, or has seen one more death than these."""
        self._present[deaths] -= 1

    async def wait_turn(self, deaths: int) -> bool:
        """Wait until the suspect may be sent. Returns whether no other suspect is sent meanwhile. The caller must call
        `end_turn` afterwards."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-deaths, next(self._arrivals), admitted))
        self._admit()
        try:
            return await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # the turn was given in the same moment
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
