"""The health of workers: probes, and the end of requests at workers that do not answer any more.

Failed probes of `GET /health` in a row quarantine a worker; a good probe revives it. The prober does not decide what a
quarantine means: it reports to the pool. `HungWorkers` breaks requests off at workers that have ended, or have not
answered probes for long: they would wait for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from skyrl.router.pool import Change, WorkerPool
from skyrl.router.proxy import Proxy
from skyrl.router.worker import Fetch, Refused, Unreachable, Worker, WorkerState
from skyrl.runtime.processes.supervision import set_within

PROBE_TIMEOUT_S = 5.0
QUARANTINED_INTERVAL_S = 0.5
"""A revived worker gets requests again after this time, plus the time of one probe."""
_SOON = (Change.REGISTERED, Change.QUARANTINED)


class HealthProber:
    """Probes each worker every `interval_s` in a task of its own: a probe that hangs delays no other worker's. A worker
    with a second address is healthy if both addresses are."""

    def __init__(
        self,
        pool: WorkerPool,
        interval_s: float,
        failure_threshold: int,
        fetch: Fetch,
        timeout_s: float = PROBE_TIMEOUT_S,
        quarantined_interval_s: float = QUARANTINED_INTERVAL_S,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self._pool = pool
        self._interval_s = interval_s
        self._failure_threshold = failure_threshold
        self._fetch = fetch
        self._headers = tuple(headers)
        self._timeout_s = timeout_s
        self._quarantined_interval_s = min(interval_s, quarantined_interval_s)
        self._watches: dict[Worker, tuple[asyncio.Task[None], asyncio.Event]] = {}
        """The task that probes each worker, and what wakes it."""
        self._membership = asyncio.Event()
        pool.subscribe(self._note)

    def _note(self, worker: Worker, change: Change) -> None:
        self._membership.set()
        if worker in self._watches and change in _SOON:
            self._watches[worker][1].set()

    async def run(self) -> None:
        """Probe until this task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._membership.clear()
                workers = self._pool.workers
                for worker in workers:
                    if worker not in self._watches:
                        wake = asyncio.Event()
                        self._watches[worker] = tasks.create_task(self._watch(worker, wake)), wake
                for worker in self._watches.keys() - set(workers):
                    self._watches.pop(worker)[0].cancel()
                await self._membership.wait()

    async def _watch(self, worker: Worker, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            await self._probe(worker)
            quarantined = worker.state is WorkerState.QUARANTINED
            await set_within(wake, self._quarantined_interval_s if quarantined else self._interval_s)

    async def _probe(self, worker: Worker) -> None:
        try:
            for url in dict.fromkeys((worker.url, worker.completions_url or worker.url)):
                answer = await self._fetch("GET", f"{url}/health", self._headers, b"", self._timeout_s)
                if not 200 <= answer.status < 300:
                    raise Unreachable(f"{url}/health answered {answer.status}")
        except Refused as refusal:
            self._pool.probe_failed(worker, str(refusal), self._failure_threshold)
            self._pool.refused(worker, str(refusal))
        except Unreachable as failure:
            self._pool.probe_failed(worker, str(failure), self._failure_threshold)
        else:
            self._pool.probe_answered(worker)


logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class HungWorkers:
    """Watches workers that fail their probes and have requests in flight, and those that are known to have ended. After
    `hang_s` seconds without a good probe, their clients get 502, and may send the request again. While a worker's
    weights change, these seconds do not run: the change has a bound of its own."""

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
