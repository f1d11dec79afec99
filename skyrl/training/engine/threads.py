"""The engine's threads: one for the backend, several for files.

The event loop decides which command runs. Commands run on these threads, because they compute or wait for files:

- the backend thread runs everything that changes a model, one command at a time;
- the file threads run saves and loads while other models train. A load reads its files on a file thread, then calls
  the backend on the backend thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThreads:
    """`on_...` methods are for the event loop's thread, `wait_for_...` methods for all other threads.

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

    def wait_for_backend(self, work: Callable[[], T]) -> T:
        """Run on the backend thread, and wait. A call from the backend thread itself would wait for ever."""
        return self._backend.submit(work).result()

    def wait_for_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def shut_down(self) -> None:
        """Wait for running work, which may take long. New work raises RuntimeError."""
        for pool in (self._backend, self._files):
            await asyncio.to_thread(pool.shutdown)
