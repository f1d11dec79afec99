"""Where new samples wait while generation is paused. Knows neither vLLM nor who pauses."""

from __future__ import annotations

import asyncio


class Gate:
    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def passed(self, given_up: asyncio.Event) -> bool:
        """Wait until the gate is open. False when `given_up` came first. When this returns True the gate is open, and
        stays so until the caller awaits something."""
        while not self.is_open and not given_up.is_set():
            waiting = {asyncio.ensure_future(event.wait()) for event in (self._opened, given_up)}
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()
        return not given_up.is_set()
