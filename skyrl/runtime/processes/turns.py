"""Spreads a burst of callbacks over turns of the event loop, so that what else is due runs in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """Runs at most `most` callbacks in one turn of the running event loop, in their order: at once while fewer have
    run, else in a later turn. They must not raise."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: deque[Callable[[], object]] = deque()
        self._scheduled = False

    def add(self, callback: Callable[[], object]) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            callback()
        else:
            self._waiting.append(callback)

    def _next_turn(self) -> None:
        due = min(self._most, len(self._waiting))
        self._left = self._most - due
        self._scheduled = due > 0
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)
        for _ in range(due):
            self._waiting.popleft()()
