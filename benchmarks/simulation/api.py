"""An API process: records, forwards and settles samples, tells the other processes, and answers polls."""

from __future__ import annotations

import random
from collections import deque

from benchmarks.simulation.events import Activity, Signal
from benchmarks.simulation.parts import Cluster, Sample, Thread
from benchmarks.simulation.services import Cost
from skyrl.server.api.background import SESSION_CHECK_S
from skyrl.server.futures.stored_ends import READ_EVERY_S
from skyrl.server.sampling.fair_order import FairOrder
from skyrl.server.sampling.ownership import BEAT_S
from skyrl.storage.db.sessions import COMPARE_S
from skyrl.storage.db.writer import MAX_BATCH

ROUND_COMMITS = 4
"""Write transactions of a process in BEAT_S besides samples: its heartbeat, its clock, and its counted usage twice."""


class Api:
    """`orders` has the order of the tenants' samples for each base model."""

    def __init__(self, cluster: Cluster, thread: Thread, number: int) -> None:
        self.cluster, self.thread, self.number = cluster, thread, number
        self._writes: dict[str, deque[Signal]] = {"record": deque(), "settle": deque()}
        self._writing: set[str] = set()
        self.own: dict[int, Sample] = {}
        self._ended: list[Sample] = []
        """Settled here, and not told to the other processes yet."""
        self._telling = False
        self._reading = False
        self._read_at = -1.0
        self.to_hand_out: list[Sample] = []
        """Ends whose clients poll here, which the next read finds."""
        self._ends_since_read = 0
        self.orders = [FairOrder() for _ in cluster.inference]

    def __repr__(self) -> str:
        return f"api {self.number}"

    def use(self, cost: Cost, count: float = 0.0) -> Activity:
        return self.thread.work(cost.of(count))

    # The database

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
            yield from database.commit(self.thread, api.of(count), server.of(count), locks=not records)
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
            order.leave(place, 1, sample if answer else None, answer[0] if answer else None)
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
        cluster = self.cluster
        home = sample.client.polls_at
        if home is not None and not home.thread.dead and (home is self):
            self.hear_of(sample)
        for api in cluster.living:
            api._ends_since_read += 1
        if len(cluster.living) > 1:
            self._ended.append(sample)
            if not self._telling:
                self._telling = True
                cluster.clock.start(self._notify())

    def _notify(self) -> Activity:
        cluster, services = self.cluster, self.cluster.services
        while self._ended:
            yield cluster.notice_pause_s
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
                self.hear_of(sample)

    def hear_of(self, sample: Sample) -> None:
        """A sample has ended whose client polls here."""
        self.to_hand_out.append(sample)
        if not self._reading:
            self._reading = True
            self.cluster.clock.start(self._read_ends())

    def _read_ends(self) -> Activity:
        cluster, services = self.cluster, self.cluster.services
        while self.to_hand_out:
            yield max(0.0, self._read_at + READ_EVERY_S - cluster.clock.now)
            found, self.to_hand_out = self.to_hand_out, []
            rows, self._ends_since_read = self._ends_since_read, 0
            yield from self.use(services.read_ends_api, rows)
            yield from cluster.database.read(services.read_ends_db.of(rows))
            self._read_at = cluster.clock.now
            by_client = {id(sample.client): sample.client for sample in found}
            for _ in by_client:
                yield from self.use(services.poll)
            for sample in found:
                sample.ended.set()
        self._reading = False

    # Periodic work

    def rounds(self) -> Activity:
        """Heartbeats of the process, looks at the sessions, and all other periodic work; for ever."""
        cluster, services = self.cluster, self.cluster.services
        yield BEAT_S if cluster.in_step else random.uniform(0, BEAT_S)
        look_at, compare_at = random.uniform(0, SESSION_CHECK_S), random.uniform(0, COMPARE_S)
        while not self.thread.dead:
            yield from self.use(services.idle, 0)
            yield from self.thread.work(services.idle.base * (BEAT_S - 1))
            for _ in range(ROUND_COMMITS):
                own, server = services.engine_commit.base, services.engine_commit_db.base
                yield from cluster.database.commit(self.thread, own, server, rows=False)
            beats = len(cluster.clients) / cluster.heartbeat_s / len(cluster.living) * BEAT_S
            for _ in range(10):
                yield from self.thread.work(services.beat.base * beats / 10)
            for base, order in enumerate(self.orders):
                order.catch_up(max(api.orders[base].now for api in cluster.living))
            if cluster.clock.now >= look_at:
                look_at = cluster.clock.now + SESSION_CHECK_S
                yield from self.use(services.look_api, len(cluster.clients))
                yield from cluster.database.read(services.look_db.of(len(cluster.clients)))
            if cluster.clock.now >= compare_at:
                compare_at = cluster.clock.now + COMPARE_S
                yield from self.use(services.compare_api, len(cluster.clients))
                yield from cluster.database.read(services.compare_db.of(len(cluster.clients)))
            yield BEAT_S
