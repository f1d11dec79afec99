"""Signals that wake the engine's tasks or end the engine. Call all methods on the event loop's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine
from typing import Any


class EngineSignals:
    """One object per engine. The loop waits for `work`, and `FileCommands.listen` waits for `arrived`."""

    def __init__(self) -> None:
        self.work = asyncio.Event()
        """The loop may have something to do."""
        self.arrived = asyncio.Event()
        """Commands may have arrived or become ready. `FileCommands.listen` hears this also while a turn runs."""
        self.stopped = asyncio.Event()
        """The engine was told to stop, or has failed: it begins no more turns."""
        self.stopped_at: float | None = None
        """When that was, in monotonic seconds."""
        self._failure: BaseException | None = None

    def wake(self) -> None:
        self.arrived.set()
        self.work.set()

    def stop(self) -> None:
        """End the engine after the turn that is running."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
        self.stopped.set()
        self.work.set()

    @property
    def is_stopped(self) -> bool:
        return self.stopped.is_set()

    async def unless_stopped(self, work: Coroutine[Any, Any, None], watches: Collection[asyncio.Task[None]]) -> None:
        """Wait for `work`, and raise its error, or that of a watch. `work` is cancelled if the engine is stopped or a
        watch ends before."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self.stopped.wait())
        try:
            await asyncio.wait({working, stopping, *watches}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, *watches):
                if task.done():
                    await task
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    def fail(self, failure: BaseException) -> None:
        """End the engine: a background task has failed. The first failure is kept."""
        self._failure = self._failure or failure
        self.wake()

    def raise_failure(self) -> None:
        """Raise the failure that was given to `fail`, if any."""
        if self._failure is not None:
            raise self._failure
