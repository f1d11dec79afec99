"""An event loop's clock that a test advances: a deadline passes when the test says so, however slow the machine is."""

from __future__ import annotations

import asyncio


class LoopClock:
    """The clock of the running loop. It runs on as usual; `advance` adds seconds, and timers due by then fire at
    once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self._ahead_s = 0.0
        loop.time = lambda: real() + self._ahead_s  # type: ignore[method-assign]

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
