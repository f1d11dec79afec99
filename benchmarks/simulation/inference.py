"""The replicas of one base model behind the router's own choice."""

from __future__ import annotations

import heapq
import itertools
import random

from benchmarks.simulation.cores import NEVER, Thread
from benchmarks.simulation.events import Activity, Clock, Signal
from benchmarks.simulation.parts import Sample
from benchmarks.simulation.services import Services
from skyrl.router.policies import RequestFacts, make_policy
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Worker


class Replica:
    """An inference server that samples `slots` samples at once: the lowest priority number first, as vLLM. Its process
    takes `work_s` of CPU for a sample, half before it and half after it. A sample takes between 1 - `spread` and
    1 + `spread` of its time."""

    def __init__(self, clock: Clock, slots: int, thread: Thread, work_s: float, spread: float) -> None:
        self._clock, self.thread, self._half_s, self._spread = clock, thread, work_s / 2, spread
        self._free = slots
        self._waiting: list[tuple[int, int, Signal]] = []
        self._numbers = itertools.count()
        self.dead_since = NEVER

    @property
    def dead(self) -> bool:
        return self._clock.now >= self.dead_since

    def sample(self, seconds: float, priority: int) -> Activity:
        yield from self.thread.work(self._half_s)
        if self._free:
            self._free -= 1
        else:
            turn = Signal()
            heapq.heappush(self._waiting, (priority, next(self._numbers), turn))
            yield turn
        yield random.uniform(1 - self._spread, 1 + self._spread) * seconds
        yield from self.thread.work(self._half_s)
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()
        else:
            self._free += 1


class Inference:
    """Router processes with one pool of workers, which chooses as the real router does. A dead replica gets samples
    until it is left out: those that were at it, and those sent to it meanwhile, come back as failed after
    `notice_s`."""

    def __init__(
        self,
        clock: Clock,
        threads: list[Thread],
        replicas: list[Replica],
        services: Services,
        notice_s: float,
        policy: str,
    ) -> None:
        self._clock, self._threads, self._notice_s = clock, threads, notice_s
        self._half_s = services.router.base / 2
        """Of a request, and of its answer."""
        self.replicas = replicas
        self._pool = WorkerPool(make_policy(policy))
        workers = [self._pool.add(f"http://replica-{number}:8000") for number in range(len(replicas))]
        self._replica_of: dict[Worker, Replica] = dict(zip(workers, replicas, strict=True))
        self._turn = 0
        self.repeated = 0
        """Samples that were lost with a replica, and sent again."""

    def send(self, sample: Sample, priority: int, answered: Signal, answer: list[str]) -> Activity:
        """Sets `answered` at the end, and then `answer` has the name of the worker; it is empty if the sample was
        lost."""
        self._turn += 1
        thread = self._threads[self._turn % len(self._threads)]
        yield from thread.work(self._half_s)
        worker = self._pool.choose(RequestFacts(sample.key))
        assert worker is not None, "a replica lives"
        self._pool.begin(worker)
        replica = self._replica_of[worker]
        done = Signal()
        self._clock.start(self._until_answered(replica, sample, priority, done))
        yield done
        yield from thread.work(self._half_s)
        self._pool.end(worker)
        if replica.dead:
            self.repeated += 1
        else:
            answer.append(worker.url)
        answered.set()

    def _until_answered(self, replica: Replica, sample: Sample, priority: int, done: Signal) -> Activity:
        if not replica.dead:
            yield from replica.sample(sample.seconds, priority)
        if replica.dead:
            yield max(0.0, replica.dead_since + self._notice_s - self._clock.now)
        done.set()

    def kill(self, count: int) -> None:
        """The first `count` replicas end now."""
        for worker, replica in list(self._replica_of.items())[:count]:
            replica.dead_since = self._clock.now
            self._clock.at(self._clock.now + self._notice_s, lambda w=worker: self._pool.quarantine(w, "it is dead"))
