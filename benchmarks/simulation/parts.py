"""What all parts of a simulated cluster share: PostgreSQL, samples, and the cluster itself.

A process is one thread that does one thing at a time, on the cores of its machine. The parts follow the code in what
they send to whom and when; they know no bytes and no SQL.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.simulation.cores import NEVER, Cores, Thread
from benchmarks.simulation.events import Activity, Clock, Lock, Signal
from benchmarks.simulation.services import Cost, Services
from skyrl.sampling.service import BEAT_S, MISSES

if TYPE_CHECKING:
    from benchmarks.simulation.api import Api
    from benchmarks.simulation.engine import TrainingEngine
    from benchmarks.simulation.inference import Inference
    from benchmarks.simulation.tenants import Client

LOCK_TRIPS, HELD_SHARE = 3, 0.8


@dataclass(slots=True, eq=False)
class Sample:
    """`key` is the routing key, `seconds` how long a replica samples it. It costs its tenant as much as one sequence of
    `max_tokens` after `prompt_tokens`."""

    client: Client
    key: str
    began: float
    seconds: float
    prompt_tokens: int = 512
    num_samples: int = 1
    max_tokens: int = 64
    owner: Api | None = None
    ended: Signal = field(default_factory=Signal)
    """The client knows that the sample has ended."""
    tries: int = 0
    settled: bool = False
    recorded: bool = False

    @property
    def sampled_tokens(self) -> int:
        return self.max_tokens


class Database:
    """PostgreSQL: write transactions hold one lock, except those that record samples; reads wait for nothing. `sync_s`
    is the time until a commit is on the disk, `trip_s` that of a round trip with the network.

    Each message wakes a backend, which has a thread of its own. A group of rows is one message, with the lock and the
    commit. Another transaction, and without `pipelined` each, holds the lock for LOCK_TRIPS round trips and for the
    share HELD_SHARE of the process's own CPU time."""

    def __init__(
        self, clock: Clock, cores: Cores, services: Services, *, sync_s: float, trip_s: float, pipelined: bool
    ) -> None:
        self.cores = cores
        self.lock = Lock(clock)
        self.services = services
        self.sync_s = sync_s
        self.trip_s = trip_s
        self._pipelined = pipelined
        self.backends: list[Thread] = []
        """As many as have worked at once so far."""
        self._idle: list[Thread] = []
        self.commits = 0

    def work(self, seconds: float) -> Signal:
        if not self._idle:
            self._idle.append(Thread(self.cores, self.services.database_wake.base))
            self.backends.append(self._idle[0])
        backend = self._idle.pop()
        done = backend.add(seconds)
        done.wait(lambda: self._idle.append(backend))
        return done

    def read(self, seconds: float) -> Activity:
        yield 2 * self.trip_s
        yield self.work(seconds)

    def commit(
        self, thread: Thread, own_s: float, server_s: float, *, locks: bool = True, rows: bool = True
    ) -> Activity:
        """One write transaction: `own_s` of CPU in the process, `server_s` in PostgreSQL. `rows`: a group of rows."""
        self.commits += 1
        one_message = rows and self._pipelined
        held_s = 0.0 if one_message or not locks else own_s * HELD_SHARE
        yield from thread.work(own_s - held_s)
        if one_message:
            yield self.trip_s
        if locks:
            yield self.lock.take()
        if held_s and not (yield from thread.try_work(held_s)):
            self.lock.give_back()  # PostgreSQL sees that the connection is gone
            yield NEVER
        if not one_message:
            yield LOCK_TRIPS * self.trip_s
        yield self.work(server_s)
        yield self.sync_s
        if locks:
            self.lock.give_back()


class Cluster:
    """All parts, and what was measured. `ends` has the time, the wait in seconds and the tenant of each sample;
    `trained` and `saved` the same of each training step and each save."""

    def __init__(self, clock: Clock, services: Services, database: Database) -> None:
        self.clock, self.services, self.database = clock, services, database
        self.apis: list[Api] = []
        self.living: list[Api] = []
        """As the others see it: a dead process leaves it once it is left out."""
        self.clients: list[Client] = []
        self.inference: list[Inference] = []
        """One for each base model."""
        self.engines: list[TrainingEngine] = []
        self.settled = 0
        """Samples whose end is stored."""
        self.ends: list[tuple[float, float, int]] = []
        self.trained: list[tuple[float, float, int]] = []
        self.saved: list[tuple[float, float, int]] = []
        self.heartbeat_s = 10.0
        self.notice_pause_s = 0.0
        self.connected = False
        """Whether a client keeps a connection to one process for each sample in flight. Else each request goes to any
        process."""
        self.shares_keys = True
        self.names_workers = True
        """Whether the router's answers name their replica, which the order of samples takes into account."""
        self.in_step = False
        """Whether the periodic work of all API processes began at the same moment."""
        self.fair = True
        """Whether vLLM runs the samples by the priorities of the API processes, or in the order of their arrival."""

    def any_api(self) -> Api:
        return random.choice([api for api in self.apis if not api.thread.dead])

    def kill(self, apis: list[Api]) -> None:
        """These processes end now, and do not come back. Others take over their samples after MISSES rounds."""
        for api in apis:
            for thread in api.threads:
                thread.dead = True
        for client in self.clients:
            if client.polls_at in apis:
                client.poll_elsewhere()
        self.clock.at(self.clock.now + BEAT_S * (MISSES + 0.5), lambda: self._take_over(apis))

    def _take_over(self, dead: list[Api]) -> None:
        self.living = [api for api in self.living if api not in dead]
        for api in dead:
            for sample in list(api.own.values()):
                sample.owner = self.any_api()
                self.clock.start(sample.owner.forward(sample))
            api.own.clear()


def at(api: Api, cost: Cost) -> Activity:
    """A request of a client to this process. A dead process does nothing with it."""
    if not api.thread.dead:
        yield from api.use(cost)
