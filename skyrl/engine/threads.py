"""The engine's threads: one for the backend, several for files.

The event loop decides what runs. Commands run on these threads, because they compute or wait for files:

- the backend's thread runs everything that changes a model, one command at a time;
- the file threads run saves and loads beside the training of other models. A load reads files there, and hands them to
  the backend on the backend's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThreads:
    """`on_...` methods are for the event loop's thread, `wait_for_...` methods for all other threads.

    Each of them raises what its work raises.
    """

    def __init__(self, files_at_once: int) -> None:
        """Must be called on the event loop. `files_at_once` saves and loads run at a time."""
        self._loop = asyncio.get_running_loop()
        self._backend = ThreadPoolExecutor(1, thread_name_prefix="backend")
        self._files = ThreadPoolExecutor(files_at_once, thread_name_prefix="files")

    async def on_backend(self, work: Callable[[], T]) -> T:
        """Run on the backend's thread."""
        return await self._loop.run_in_executor(self._backend, work)

    async def on_files(self, work: Callable[[], T]) -> T:
        """Run on a file thread."""
        return await self._loop.run_in_executor(self._files, work)

    def wait_for_backend(self, work: Callable[[], T]) -> T:
        """Run on the backend's thread, and wait. Never call this on the backend's thread itself: it would wait for
        ever."""
        return self._backend.submit(work).result()

    def wait_for_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def shut_down(self) -> None:
        """Wait for what runs, which may take long. New work is refused with RuntimeError."""
        for threads in (self._backend, self._files):
            await asyncio.to_thread(threads.shutdown)
