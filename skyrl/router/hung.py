"""Breaks requests off at workers that have ended, or have not answered health probes for long: they would wait for
ever."""

from __future__ import annotations

import asyncio
import logging
import time

from skyrl.router.pool import Change, WorkerPool
from skyrl.router.proxy import Proxy
from skyrl.router.worker import Worker

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class HungWorkers:
    """Watches workers that fail their probes and have requests in flight, and those that are known to have
    ended. After `hang_s` seconds without a good probe,
    their clients get 502, and may send the request again. While a worker's weights change, these seconds do not run:
    the change has a bound of its own."""

    def __init__(self, pool: WorkerPool, proxy: Proxy, hang_s: float) -> None:
        self._pool = pool
        self._proxy = proxy
        self._hang_s = hang_s
        self._since: dict[Worker, float] = {}
        pool.subscribe(self._note)

    def _note(self, worker: Worker, change: Change) -> None:
        if worker.answers or worker.holds or change is Change.FORGOTTEN:  # a worker that changes its weights is busy
            self._since.pop(worker, None)
        else:
            self._since.setdefault(worker, time.monotonic())

    async def run(self) -> None:
        """Watch until this task is cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._hang_s))
            now = time.monotonic()
            for worker in self._pool.workers:
                if worker.ended and worker.in_flight:
                    logger.warning("%s has ended; %d requests are broken off", worker.url, worker.in_flight)
                    self._proxy.interrupt(worker, "it has ended")
            for worker, since in list(self._since.items()):  # the end of a request may forget its worker
                if now - since > self._hang_s and worker.in_flight and not worker.answers:
                    reason = f"it has not answered its health probes for {now - since:.0f} s"
                    logger.warning("%s: %s; %d requests are broken off", worker.url, reason, worker.in_flight)
                    self._proxy.interrupt(worker, reason)
