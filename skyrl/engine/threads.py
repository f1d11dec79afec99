"""The engine's threads, and the signals that wake the engine's tasks or end the engine.

The event loop decides which command runs. Commands run on these threads, because they compute or wait for files:

- the backend thread runs everything that changes a model, one command at a time;
- the file threads run saves and loads while other models train. A load reads its files on a file thread, then calls
  the backend on the backend thread.

Call all methods of `EngineSignals` on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThreads:
    """`on_...` methods are for the event loop's thread, `wait_for_...` and `begin_...` methods for all other threads.

    Each method raises the errors of its `work`.
    """

    def __init__(self, files_at_once: int) -> None:
        """Must be called on the event loop. Up to `files_at_once` saves and loads run at a time."""
        self._loop = asyncio.get_running_loop()
        self._backend = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._files = ThreadPoolExecutor(files_at_once, thread_name_prefix="files")

    async def on_backend(self, work: Callable[[], T]) -> T:
        """Run on the backend thread."""
        return await self._loop.run_in_executor(self._backend, work)

    async def on_files(self, work: Callable[[], T]) -> T:
        """Run on a file thread."""
        return await self._loop.run_in_executor(self._files, work)

    def later_on_files(self, work: Callable[[], None]) -> None:
        """Run on a file thread, and do not wait; at once while the threads shut down. Called on a file thread. `work`
        raises nothing."""
        try:
            self._files.submit(work)
        except RuntimeError:
            work()

    def wait_for_backend(self, work: Callable[[], T]) -> T:
        """Run on the backend thread, and wait. A call from the backend thread itself would wait for ever."""
        return self._backend.submit(work).result()

    def wait_for_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait."""
        return self.begin_on_loop(work).result()

    def begin_on_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop, for threads other than the event loop's."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def shut_down(self) -> None:
        """Wait for running work, which may take long. New work raises RuntimeError."""
        for pool in (self._backend, self._files):
            await asyncio.to_thread(pool.shutdown)


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
