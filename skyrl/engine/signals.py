"""What wakes the engine's tasks, and what ends them.

Knows no command. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio


class EngineSignals:
    """One per engine. Two tasks wait for it: the loop for `work`, the listener of `FileCommands` for `arrived`."""

    def __init__(self) -> None:
        self.work = asyncio.Event()
        """There may be something to do."""
        self.arrived = asyncio.Event()
        """Commands may have arrived, or may have become ready. Also heard while a turn runs."""
        self.stopped = asyncio.Event()
        """The engine begins no turn any more: it was told to stop, or it has failed."""
        self._failure: BaseException | None = None

    def wake(self) -> None:
        self.arrived.set()
        self.work.set()

    def stop(self) -> None:
        """End the engine after the turn that is running."""
        self.stopped.set()
        self.work.set()

    @property
    def is_stopped(self) -> bool:
        return self.stopped.is_set()

    def fail(self, failure: BaseException) -> None:
        """A task beside the loop has failed in a way that the engine cannot survive. The first failure counts."""
        self._failure = self._failure or failure
        self.wake()

    def raise_failure(self) -> None:
        """Raise what `fail` was told of, if anything."""
        if self._failure is not None:
            raise self._failure
