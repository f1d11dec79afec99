"""The workers behind the router: which exist, which may get requests, and how many requests each has in flight.

The pool does no I/O. Probes, registration and the proxy report to it, and it tells subscribers what changed. `Slots`
says how many requests are at workers at once, and how many may wait for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import Any

from skyrl.router.policies import LeastInFlight, Policy, RequestFacts
from skyrl.router.worker import Worker, WorkerState, normalise_url


class TooManyWaiting(Exception):
    """The queue is full."""


class Slots:
    """First come, first served. At most `running` holders, at most `waiting` callers that wait."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free = running
        self._most_waiting = waiting
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def try_acquire(self) -> bool:
        """Take a slot without waiting."""
        if self._free > 0:
            self._free -= 1
            return True
        return False

    async def acquire(self) -> None:
        """Take a slot; wait for one if none is free. Raises TooManyWaiting."""
        if self.try_acquire():
            return
        if len(self._waiters) >= self._most_waiting:
            raise TooManyWaiting
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot came at the same moment
            elif waiter in self._waiters:  # `release` may have passed it over already
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """Give the slot back. The caller that has waited longest gets it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1


MAX_WORKERS = 1024

log = logging.getLogger(__name__)


class Change(StrEnum):
    REGISTERED = "registered"
    """Added, or added again."""
    DRAINING = "draining"
    FORGOTTEN = "forgotten"
    QUARANTINED = "quarantined"
    REVIVED = "revived"
    PROBED = "probed"
    """A worker began to answer probes, or ceased to, and its state stays."""
    SERVICE = "service"
    """Taken out of routing, or put back, by hand or because of what it missed."""
    HELD = "held"
    """A change of its weights began or ended."""


class TooManyWorkers(ValueError):
    """The pool is full."""


class WorkerPool:
    def __init__(self, policy: Policy, *, max_workers: int = MAX_WORKERS) -> None:
        self.policy = policy
        self._other = LeastInFlight()
        self._max_workers = max_workers
        self._workers: dict[str, Worker] = {}
        self._by_id: dict[str, Worker] = {}
        self._candidates: tuple[Worker, ...] = ()
        self._subscribers: list[Callable[[Worker, Change], None]] = []
        self.next_change = asyncio.Event()
        """Is set at the next change of the candidates, and at any change while no worker's weights are being changed.
        Get it in the moment in which the candidates are looked at."""
        self.ejections = 0
        """How often a healthy worker was quarantined."""

    @property
    def changing(self) -> bool:
        """Whether the weights of a worker are being changed: it comes back to routing soon."""
        return any(worker.holds for worker in self._workers.values())

    @property
    def workers(self) -> list[Worker]:
        """In order of registration, draining ones included."""
        return list(self._workers.values())

    @property
    def candidates(self) -> tuple[Worker, ...]:
        """The workers to which a request can be sent."""
        return self._candidates

    @property
    def routable(self) -> int:
        """The number of `candidates`."""
        return len(self._candidates)

    def subscribe(self, subscriber: Callable[[Worker, Change], None]) -> None:
        """`subscriber` is called after each change. It must not change the pool."""
        self._subscribers.append(subscriber)

    def add(
        self,
        url: str,
        completions_url: str | None = None,
        worker_type: str = "regular",
        labels: dict[str, object] | None = None,
    ) -> Worker:
        """Register a worker, or register it again: then it is routable at once, whatever its state was. What the second
        registration leaves out stays as it was, unless the worker was being removed. Raises ValueError for a bad URL,
        TooManyWorkers."""
        url = normalise_url(url)
        completions_url = None if completions_url is None else normalise_url(completions_url, "completions_url")
        worker = self._workers.get(url)
        if worker is None:
            if len(self._workers) >= self._max_workers:
                raise TooManyWorkers(f"url: the router has {self._max_workers} workers, as many as it takes")
            worker = self._workers[url] = Worker(url)
            self._by_id[worker.id] = worker
        if worker.state is WorkerState.DRAINING:
            worker.completions_url, worker.labels = None, {}
        worker.ended = False
        worker.completions_url = completions_url or worker.completions_url
        worker.worker_type = worker_type
        worker.labels = {**worker.labels, **(labels or {})}
        worker.state = WorkerState.HEALTHY
        worker.failed_probes = 0
        worker.answers = True
        self._changed(worker, Change.REGISTERED)
        return worker

    def expect(self, url: str) -> Worker:
        """Register a worker that may still be starting: it is routable after its first good probe. A worker that is
        known stays as it is. Raises as `add`."""
        known = self.find(url)
        if known is not None:
            return known
        worker = self.add(url)
        worker.answers = False
        worker.state = WorkerState.QUARANTINED
        self._changed(worker, Change.QUARANTINED)
        return worker

    def set_service(self, worker: Worker, *, disabled: str | None, is_dead: bool) -> None:
        """Put the worker out of routing by hand, or back. What it missed stays as it is."""
        worker.disabled, worker.is_dead = disabled, is_dead
        self._changed(worker, Change.SERVICE)

    def set_missed(self, worker: Worker, missed: str | None) -> None:
        if worker.missed != missed:
            worker.missed = missed
            self._changed(worker, Change.SERVICE)

    @contextlib.contextmanager
    def weights_change(self, workers: Sequence[Worker]) -> Iterator[None]:
        """These workers get no requests during the body. Afterwards each is as somebody has set it meanwhile."""
        for worker in workers:
            worker.holds += 1
            self._changed(worker, Change.HELD)
        try:
            yield
        finally:
            for worker in workers:
                worker.holds -= 1
                self._changed(worker, Change.HELD)

    def find(self, id_or_url: str) -> Worker | None:
        worker = self._by_id.get(id_or_url)
        if worker is None:
            try:
                worker = self._workers.get(normalise_url(id_or_url))
            except ValueError:
                return None
        return worker

    def remove(self, id_or_url: str, *, ended: bool = False) -> bool:
        """Send the worker no more requests, and forget it when none is in flight. `ended`: it does not run any more, so
        that requests in flight will get no answer. False: there is no such worker."""
        worker = self.find(id_or_url)
        if worker is None:
            return False
        worker.ended = worker.ended or ended
        if worker.state is not WorkerState.DRAINING:
            worker.state = WorkerState.DRAINING
            self._changed(worker, Change.DRAINING)
        self._forget_if_drained(worker)
        return True

    def choose(self, facts: RequestFacts, exclude: Collection[Worker] = ()) -> Worker | None:
        """The worker for a request. None: no worker outside `exclude` is routable. When `exclude` matters, the least in
        flight of the others is chosen: the policy would take a set without those workers for a change of membership."""
        candidates = self._candidates
        if exclude and any(worker in exclude for worker in candidates):
            others = [worker for worker in candidates if worker not in exclude]
            return self._other.choose(facts, others) if others else None
        return self.policy.choose(facts, candidates) if candidates else None

    def begin(self, worker: Worker) -> None:
        """A request is sent to this worker. `end` must follow."""
        worker.in_flight += 1
        worker.served += 1

    def end(self, worker: Worker) -> None:
        assert worker.in_flight > 0, "end() without begin()"
        worker.in_flight -= 1
        if worker.state is WorkerState.DRAINING:
            self._forget_if_drained(worker)

    def refused(self, worker: Worker, reason: str = "it refused a connection") -> None:
        """No connection came about: no request goes there until a probe is answered."""
        answered, worker.answers = worker.answers, False
        if worker.state is WorkerState.HEALTHY:
            self.quarantine(worker, reason)
        elif answered:
            self._changed(worker, Change.PROBED)

    def quarantine(self, worker: Worker, reason: str) -> None:
        if worker.state is WorkerState.HEALTHY:
            worker.state = WorkerState.QUARANTINED
            self.ejections += 1
            log.warning("worker %s is quarantined: %s", worker.url, reason)
            self._changed(worker, Change.QUARANTINED)

    def probe_failed(self, worker: Worker, reason: str, threshold: int) -> None:
        """`threshold` failures in a row quarantine the worker."""
        worker.failed_probes += 1
        answered, worker.answers = worker.answers, False
        if worker.state is not WorkerState.HEALTHY:
            if answered:
                self._changed(worker, Change.PROBED)
        elif worker.failed_probes >= threshold:
            self.quarantine(worker, f"{worker.failed_probes} health probes in a row failed, the last: {reason}")

    def probe_answered(self, worker: Worker) -> None:
        """A good probe revives a quarantined worker, unless it waits for its registration."""
        worker.failed_probes = 0
        answered, worker.answers = worker.answers, True
        if worker.state is WorkerState.QUARANTINED and not worker.held:
            worker.state = WorkerState.HEALTHY
            log.warning("worker %s answers again", worker.url)
            self._changed(worker, Change.REVIVED)
        elif not answered:
            self._changed(worker, Change.PROBED)

    def counts(self) -> list[dict[str, Any]]:
        """Each worker's numbers for `GET /statusz`."""
        return [
            {
                "url": worker.url,
                "state": worker.state.value,
                "in_flight": worker.in_flight,
                "served": worker.served,
                "failed_probes": worker.failed_probes,
                "disabled": worker.disabled,
                "is_dead": worker.is_dead,
                "missed": worker.missed,
                "changing": worker.holds > 0,
            }
            for worker in self._workers.values()
        ]

    def _forget_if_drained(self, worker: Worker) -> None:
        if worker.in_flight == 0 and self._workers.get(worker.url) is worker:
            del self._workers[worker.url], self._by_id[worker.id]
            self._changed(worker, Change.FORGOTTEN)

    def _changed(self, worker: Worker, change: Change) -> None:
        workers = self._workers.values()
        if change is not Change.FORGOTTEN and self._workers.get(worker.url) is not worker:
            return  # it was forgotten meanwhile
        candidates = tuple(worker for worker in workers if worker.routable)
        if not candidates:  # the last resort: workers that answer, although their owner has not registered them again
            quarantined = (w for w in workers if w.state is WorkerState.QUARANTINED and w.in_service)
            candidates = tuple(worker for worker in quarantined if worker.held and worker.answers)
        differs = candidates != self._candidates
        if differs:
            self._candidates = candidates
        if differs or not self.changing:  # who waits for the end of a change looks again
            self.next_change.set()
            self.next_change = asyncio.Event()
        for subscriber in self._subscribers:
            subscriber(worker, change)
