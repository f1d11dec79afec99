"""An API process: records, forwards and settles samples, tells the other processes, and answers polls."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from benchmarks.simulation.cores import Thread
from benchmarks.simulation.ends import Ends
from benchmarks.simulation.events import Activity, Signal
from benchmarks.simulation.parts import Cluster, Sample
from benchmarks.simulation.services import Cost
from skyrl.api.server import SESSION_CHECK_S
from skyrl.sampling.order import FairOrder
from skyrl.sampling.service import BEAT_S
from skyrl.storage.db.sessions import COMPARE_S
from skyrl.storage.db.writer import MAX_BATCH

IDLE_S = 0.1
ROUND_COMMITS = 4
"""Write transactions of a process in BEAT_S besides samples: its heartbeat, its clock, and its counted usage twice."""


class Api:
    """`orders` has the order of the tenants' samples for each base model. The database has threads of its own. They
    may work beside the event loop: the model does not know Python's global lock."""

    def __init__(self, cluster: Cluster, make_thread: Callable[[], Thread], number: int) -> None:
        self.cluster, self.number = cluster, number
        self.thread = make_thread()
        """Of the event loop."""
        self.writers = {kind: make_thread() for kind in ("record", "settle", "other")}
        self.reader = make_thread()
        self._writes: dict[str, deque[Signal]] = {"record": deque(), "settle": deque()}
        self._writing: set[str] = set()
        self.own: dict[int, Sample] = {}
        self._ended: list[Sample] = []
        """Settled here, and not told to the other processes yet."""
        self._telling = False
        self._told_at = -1.0
        self.ends = Ends(self)
        self.orders = [FairOrder() for _ in cluster.inference]

    def __repr__(self) -> str:
        return f"api {self.number}"

    @property
    def threads(self) -> list[Thread]:
        return [self.thread, *self.writers.values(), self.reader]

    def use(self, cost: Cost, count: float = 0.0) -> Activity:
        return self.thread.work(cost.of(count))

    # The database

    def read(self, own: Cost, server: Cost, count: float = 0.0) -> Activity:
        yield from self.reader.work(own.of(count))
        yield from self.cluster.database.read(server.of(count))

    def write(self, kind: str) -> Activity:
        """Add a row to the next group commit of its kind, and wait until it is committed."""
        done = Signal()
        self._writes[kind].append(done)
        if kind not in self._writing:
            self._writing.add(kind)
            self.cluster.clock.start(self._commit(kind))
        yield done

    def _commit(self, kind: str) -> Activity:
        services, database = self.cluster.services, self.cluster.database
        waiting = self._writes[kind]
        records = kind == "record"
        api, server = (
            (services.record_api, services.record_db) if records else (services.settle_api, services.settle_db)
        )
        while waiting:
            group = [waiting.popleft() for _ in range(min(MAX_BATCH, len(waiting)))]
            count = len(group)
            yield from database.commit(self.writers[kind], api.of(count), server.of(count), locks=not records)
            for done in group:
                done.set()
        self._writing.discard(kind)

    # A sample

    def forward(self, sample: Sample) -> Activity:
        """Send a recorded sample to a replica, and settle it."""
        services, cluster, client = self.cluster.services, self.cluster, sample.client
        self.own[id(sample)] = sample
        order = self.orders[client.base]
        while True:
            yield from self.use(services.forward)
            answered, answer = Signal(), list[str]()
            place = order.enter(client.tenant_name, sample)
            priority = place.priority if cluster.fair else 0
            cluster.clock.start(cluster.inference[client.base].send(sample, priority, answered, answer))
            yield answered
            named = answer[0] if answer and cluster.names_workers else None
            order.leave(place, 1, sample if answer else None, named)
            if self.thread.dead or sample.owner is not self:
                return
            if answer:
                break
            sample.tries += 1
            yield 0.1 * min(2 ** min(sample.tries, 5), 20)
        yield from self.use(services.complete)
        yield from self.write("settle")
        if self.thread.dead or sample.settled:
            return
        sample.settled = True
        self.own.pop(id(sample), None)
        self._tell(sample)

    def _tell(self, sample: Sample) -> None:
        cluster, home = self.cluster, sample.client.polls_at
        cluster.settled += 1
        sample.client.untold.append(sample)
        if home is not None:
            home.ends.stored.append(sample)
        if home is self:
            self.ends.ended(sample.client)
        if len(cluster.living) > 1:
            self._ended.append(sample)
            if not self._telling:
                self._telling = True
                cluster.clock.start(self._notify())

    def _notify(self) -> Activity:
        cluster, services = self.cluster, self.cluster.services
        while self._ended:
            yield max(0.0, self._told_at + cluster.notice_pause_s - cluster.clock.now)
            self._told_at = cluster.clock.now
            ended, self._ended = self._ended, []
            yield from self.use(services.notify_api)
            others = [api for api in cluster.living if api is not self]
            yield 2 * cluster.database.trip_s
            yield cluster.database.work(services.notify_db.of(len(others)))
            for api in others:
                cluster.clock.start(api.hear(ended))
        self._telling = False

    def hear(self, ended: list[Sample]) -> Activity:
        yield from self.use(self.cluster.services.hear_api, 2 * len(ended))
        for sample in ended:
            if sample.client.polls_at is self:
                self.ends.ended(sample.client)

    # Periodic work

    def rounds(self) -> Activity:
        """Heartbeats of the process, looks at the sessions, and all other periodic work; for ever."""
        cluster, services = self.cluster, self.cluster.services
        yield BEAT_S if cluster.in_step else random.uniform(0, BEAT_S)
        cluster.clock.start(self._idle())
        look_at, compare_at = random.uniform(0, SESSION_CHECK_S), random.uniform(0, COMPARE_S)
        while not self.thread.dead:
            for _ in range(ROUND_COMMITS):
                own, server = services.engine_commit.base, services.engine_commit_db.base
                yield from cluster.database.commit(self.writers["other"], own, server, rows=False)
            beats = len(cluster.clients) / cluster.heartbeat_s / len(cluster.living) * BEAT_S
            for _ in range(10):
                yield from self.thread.work(services.beat.base * beats / 10)
            for base, order in enumerate(self.orders):
                order.catch_up(max(api.orders[base].now for api in cluster.living))
            if cluster.clock.now >= look_at:
                look_at = cluster.clock.now + SESSION_CHECK_S
                yield from self.read(services.look_api, services.look_db, len(cluster.clients))
            if cluster.clock.now >= compare_at:
                compare_at = cluster.clock.now + COMPARE_S
                yield from self.read(services.compare_api, services.compare_db, len(cluster.clients))
            yield BEAT_S

    def _idle(self) -> Activity:
        """The small work that a process without clients does; for ever."""
        services, database = self.cluster.services, self.cluster.database
        while not self.thread.dead:
            yield from self.thread.work(services.idle.base * IDLE_S)
            yield database.work(services.idle_db.base * IDLE_S)
            yield IDLE_S
