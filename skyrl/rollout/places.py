"""The places for requests that may run at once. Who waits for a place can be turned away."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def take(self) -> bool:
        """Wait for a place, first come first served. False: turned away, and there is nothing to give back."""
        if self._free:
            self._free -= 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():  # the place came just before the cancellation
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    def turn_away(self) -> None:
        """Turn away all that wait now."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(False)
        self._waiting.clear()
