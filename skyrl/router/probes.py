"""Health probes: which workers answer `GET /health`. Failures in a row quarantine a worker; a good probe revives it.

The prober does not decide what a quarantine means: it reports to the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from skyrl.router.control import Fetch, Refused, Unreachable
from skyrl.router.pool import Change, WorkerPool
from skyrl.router.worker import Worker, WorkerState

PROBE_TIMEOUT_S = 5.0
QUARANTINED_INTERVAL_S = 0.5
"""A revived worker gets requests again after this time, plus the time of one probe."""
_SOON = (Change.REGISTERED, Change.QUARANTINED)


@dataclass(slots=True)
class _Watch:
    task: asyncio.Task[None]
    wake: asyncio.Event


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
        self._watches: dict[Worker, _Watch] = {}
        self._membership = asyncio.Event()
        pool.subscribe(self._note)

    def _note(self, worker: Worker, change: Change) -> None:
        self._membership.set()
        watch = self._watches.get(worker)
        if watch is not None and change in _SOON:
            watch.wake.set()

    async def run(self) -> None:
        """Probe until this task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._membership.clear()
                workers = self._pool.workers
                for worker in workers:
                    if worker not in self._watches:
                        wake = asyncio.Event()
                        self._watches[worker] = _Watch(tasks.create_task(self._watch(worker, wake)), wake)
                for worker in self._watches.keys() - set(workers):
                    self._watches.pop(worker).task.cancel()
                await self._membership.wait()

    async def _watch(self, worker: Worker, wake: asyncio.Event) -> None:
        while True:
            wake.clear()
            await self._probe(worker)
            quarantined = worker.state is WorkerState.QUARANTINED
            with suppress(TimeoutError):
                async with asyncio.timeout(self._quarantined_interval_s if quarantined else self._interval_s):
                    await wake.wait()

    async def _probe(self, worker: Worker) -> None:
        try:
            for url in dict.fromkeys((worker.url, worker.completions_url or worker.url)):
                await self._probe_address(url)
        except Refused as refusal:
            self._pool.probe_failed(worker, str(refusal), self._failure_threshold)
            self._pool.refused(worker)
        except Unreachable as failure:
            self._pool.probe_failed(worker, str(failure), self._failure_threshold)
        else:
            self._pool.probe_answered(worker)

    async def _probe_address(self, url: str) -> None:
        answer = await self._fetch("GET", f"{url}/health", self._headers, b"", self._timeout_s)
        if not 200 <= answer.status < 300:
            raise Unreachable(f"{url}/health answered {answer.status}")
