"""Breaks requests off at workers that do not answer their health probes for long: those requests would wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Self

from skyrl.router.pool import WorkerPool
from skyrl.router.proxy import Proxy
from skyrl.router.worker import WorkerState

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class HungWorkers:
    """Looks at quarantined workers that have requests in flight. After `hang_s` seconds without a good probe, their
    clients get 502, and may send the request again."""

    def __init__(self, pool: WorkerPool, proxy: Proxy, hang_s: float) -> None:
        self._pool = pool
        self._proxy = proxy
        self._hang_s = hang_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """`now` is in the time of `Worker.quarantined_at`."""
        for worker in self._pool.workers:
            at = worker.quarantined_at
            if (
                worker.state is WorkerState.QUARANTINED
                and at is not None
                and now - at > self._hang_s
                and worker.in_flight
            ):
                logger.warning(
                    "%s has hung for %.0f s: %d requests are broken off", worker.url, now - at, worker.in_flight
                )
                self._proxy.interrupt(worker, f"the worker has not answered its health probes for {self._hang_s:g} s")
