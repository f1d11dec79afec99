"""The OpenAI requests that this process answers now. Each ends when its client goes, and all end with the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from skyrl.base.wire.errors import RequestError

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, so nobody reads an answer."""


class InFlight:
    """Owns the tasks of the requests."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = self._ended = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T], gone: Coroutine[Any, Any, None]) -> T:
        """The result of `work`. `gone` returns when the client has gone; then `work` is cancelled at once, and has
        ended when this method ends. Raises ClientGone, RequestError 503 when the process ends, and what `work` raises.
        """
        task, leaving = asyncio.create_task(work), asyncio.create_task(gone)
        self._tasks.add(task)
        if self._ended:
            task.cancel()
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            if task.cancelled():
                raise _stopping()
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            leaving.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    def check_open(self) -> None:
        """Raises RequestError 503 if the process takes no new requests."""
        if self._stopping:
            raise _stopping()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to `grace_s` until the requests have ended, then end the others."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        self._ended = True
        for task in self._tasks:
            task.cancel()


def _stopping() -> RequestError:
    return RequestError("the server is stopping; send the request again", status=503, retry_after_s=1)
