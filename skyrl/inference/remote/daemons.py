"""Calls on threads that do not keep a process from ending, for calls that may hang for minutes.

The threads of `concurrent.futures` are waited for when the interpreter ends: a vLLM whose engine has died would then
not exit while its checkpoint store hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Daemons:
    """At most `at_once` calls run; others wait for their turn, in order."""

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or its exception. If the caller is cancelled, the call goes on, and keeps its turn."""
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end(result: T | None, error: BaseException | None) -> None:
            self._turns.release()
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # pyright: ignore[reportArgumentType]

        def body() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(end, result, error)

        threading.Thread(target=body, daemon=True).start()
        return await future
