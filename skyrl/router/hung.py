"""Breaks requests off at workers that have not answered health probes for long: they would wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Self

from skyrl.router.pool import Change, WorkerPool
from skyrl.router.proxy import Proxy
from skyrl.router.worker import Worker

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class HungWorkers:
    """Watches quarantined workers that have requests in flight. After `hang_s` seconds without a good probe, their
    clients get 502, and may send the request again."""

    def __init__(self, pool: WorkerPool, proxy: Proxy, hang_s: float) -> None:
        self._proxy = proxy
        self._hang_s = hang_s
        self._since: dict[Worker, float] = {}
        self._task: asyncio.Task[None] | None = None
        pool.subscribe(self._note)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _note(self, worker: Worker, change: Change) -> None:
        if worker.answers or change is Change.FORGOTTEN:
            self._since.pop(worker, None)
        else:
            self._since.setdefault(worker, time.monotonic())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._hang_s))
            now = time.monotonic()
            for worker, since in self._since.items():
                if now - since > self._hang_s and worker.in_flight and not worker.answers:
                    reason = f"it has not answered its health probes for {now - since:.0f} s"
                    logger.warning("%s: %s; %d requests are broken off", worker.url, reason, worker.in_flight)
                    self._proxy.interrupt(worker, reason)
