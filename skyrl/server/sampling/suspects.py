"""Turns for suspects: samples that were interrupted more than once. Suspects are sent again a few at a time, then one
by one, so that the sample that kills the server is found.

Knows counts and turns. The forwarding client decides what an interruption is, and after how many a sample fails.
docs/decisions/interrupted-samples.md says why.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter

WIDTHS = (64, 8, 1)


class Suspects:
    """Gives turns by the number of interruptions. The suspects with the highest number go first, in groups of the
    largest of WIDTHS that is smaller than the number of these suspects. All other suspects wait."""

    def __init__(self) -> None:
        self._present: Counter[int] = Counter()
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []
        """A heap: minus the number of interruptions, the order of arrival, the future that gives the turn."""
        self._arrivals = itertools.count()
        self._running = 0
        self._running_interruptions = 0
        """The number of interruptions of the suspects that are being sent."""

    def add(self, interruptions: int) -> None:
        """Count one more suspect with this number of interruptions. It will ask for a turn."""
        self._present[interruptions] += 1

    def remove(self, interruptions: int) -> None:
        """A suspect with this number of interruptions has ended, or was interrupted once more."""
        self._present[interruptions] -= 1

    async def wait_turn(self, interruptions: int) -> bool:
        """Wait until the suspect may be sent. Returns whether it is the only suspect that is sent. The caller must call
        `end_turn` afterwards."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-interruptions, next(self._arrivals), admitted))
        self._admit()
        try:
            return await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # the turn was given at the same moment
                self._running -= 1
            self._admit()
            raise

    def end_turn(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            interruptions = -self._waiting[0][0]
            width = self._width(interruptions)
            if self._running and (interruptions != self._running_interruptions or self._running >= width):
                return
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.cancelled():
                self._running += 1
                self._running_interruptions = interruptions
                admitted.set_result(width == 1)

    def _width(self, interruptions: int) -> int:
        return next((width for width in WIDTHS if width < self._present[interruptions]), 1)
