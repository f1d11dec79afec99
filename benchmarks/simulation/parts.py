"""What each part of a cluster does with a sample: clients, API processes, PostgreSQL, router and replicas.

A process is one thread that does one thing at a time, on the cores of its machine. The parts follow the code in what
they send to whom and when; they know no bytes, no SQL and no sampling.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulation.events import Activity, Clock, Cores, Lock, Signal
from benchmarks.simulation.services import Cost, Services
from skyrl.server.api.background import SESSION_CHECK_S
from skyrl.server.futures.stored_ends import READ_EVERY_S
from skyrl.server.sampling.ownership import BEAT_S, MISSES
from skyrl.storage.db.sessions import COMPARE_S
from skyrl.storage.db.writer import MAX_BATCH

NEVER = float("inf")
CONNECT_AGAIN_S = 0.1
"""A client whose server is gone asks another one after this time."""
START_S = 4.0
"""From the start of an API process until it answers (docs/performance.md)."""


class Thread:
    """One thread of a process: its work waits in a queue. A dead thread never ends what it has."""

    def __init__(self, clock: Clock, cores: Cores) -> None:
        self._turn = Lock(clock)
        self._cores = cores
        self.dead = False
        self.busy_s = 0.0

    def work(self, seconds: float) -> Activity:
        """Use with `yield from`."""
        yield self._turn.take()
        if self.dead:
            yield NEVER
        self.busy_s += seconds
        yield self._cores.use(seconds)
        self._turn.give_back()


@dataclass
class Sample:
    tenant: int
    client: Client
    began: float
    owner: Api | None = None
    ended: Signal = field(default_factory=Signal)
    """The client knows that the sample has ended."""
    tries: int = 0
    settled: bool = False
    recorded: bool = False


class Database:
    """PostgreSQL: all write transactions hold one lock; reads wait for nothing. `sync_s` is the time until a commit is
    on the disk, `trip_s` that of a round trip with the network."""

    def __init__(self, clock: Clock, cores: Cores, services: Services, sync_s: float, trip_s: float) -> None:
        self.cores = cores
        self.lock = Lock(clock)
        self.services = services
        self.sync_s = sync_s
        self.trip_s = trip_s
        self.busy_s = 0.0
        """CPU seconds so far."""

    def work(self, seconds: float) -> Signal:
        self.busy_s += seconds
        return self.cores.use(seconds)

    def read(self, seconds: float) -> Activity:
        yield 2 * self.trip_s
        yield self.work(seconds)


class Api:
    """An API process. `peers` are all API processes, with this one."""

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
        """Records take no write lock, unless the cluster's `records_lock` says so."""
        cluster, database, services = self.cluster, self.cluster.database, self.cluster.services
        waiting = self._writes[kind]
        locks = kind == "settle" or cluster.records_lock
        api, server = (
            (services.record_api, services.record_db) if kind == "record" else (services.settle_api, services.settle_db)
        )
        while waiting:
            group = [waiting.popleft() for _ in range(min(MAX_BATCH, len(waiting)))]
            seconds = api.of(len(group))
            if locks:
                yield from self.thread.work(seconds * (1 - cluster.held_share))
                yield database.lock.take()
                yield from self.thread.work(seconds * cluster.held_share)
            else:
                yield from self.thread.work(seconds)
            yield cluster.lock_trips * database.trip_s
            yield database.work(server.of(len(group)))
            yield database.sync_s
            if locks:
                database.lock.give_back()
            for done in group:
                done.set()
        self._writing.discard(kind)

    # A sample

    def forward(self, sample: Sample) -> Activity:
        """Send a recorded sample to a replica, and settle it."""
        services, cluster = self.cluster.services, self.cluster
        self.own[id(sample)] = sample
        while True:
            yield from self.use(services.forward)
            answered = Signal()
            cluster.clock.start(cluster.router.send(sample, answered))
            yield answered
            if self.thread.dead or sample.owner is not self:
                return
            if cluster.router.answered_well(sample):
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
        cluster = self.cluster
        polled = len(cluster.clients) / max(1, len(cluster.living))
        yield from self.use(cluster.services.hear_api, 2 * len(ended))
        yield from self.thread.work(cluster.poll_search_s * polled * len(ended))
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
        yield random.uniform(0, BEAT_S)
        look_at, compare_at = random.uniform(0, SESSION_CHECK_S), random.uniform(0, COMPARE_S)
        while not self.thread.dead:
            yield from self.use(services.idle, 0)
            yield from self.thread.work(services.idle.base * (BEAT_S - 1))
            beats = cluster.sessions / cluster.heartbeat_s / len(cluster.living) * BEAT_S
            for _ in range(10):
                yield from self.thread.work(services.beat.base * beats / 10)
            if cluster.clock.now >= look_at:
                look_at = cluster.clock.now + SESSION_CHECK_S
                yield from self.use(services.look_api, cluster.sessions)
                yield from cluster.database.read(services.look_db.of(cluster.sessions))
            if cluster.clock.now >= compare_at:
                compare_at = cluster.clock.now + COMPARE_S
                yield from self.use(services.compare_api, cluster.sessions)
                yield from cluster.database.read(services.compare_db.of(cluster.sessions))
            yield BEAT_S


class Replica:
    """An inference server that samples `slots` samples at once, each for `sample_s` seconds."""

    def __init__(self, clock: Clock, slots: int, sample_s: float) -> None:
        self._clock = clock
        self._free = slots
        self._waiting: deque[Signal] = deque()
        self.sample_s = sample_s
        self.dead_since = NEVER
        self.in_flight: dict[int, Signal] = {}

    @property
    def dead(self) -> bool:
        return self._clock.now >= self.dead_since

    def sample(self) -> Activity:
        if self._free:
            self._free -= 1
        else:
            turn = Signal()
            self._waiting.append(turn)
            yield turn
        yield random.uniform(0.8, 1.2) * self.sample_s
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1


class Router:
    """Sends a sample to the replica with the fewest in flight. A dead replica gets samples until it is left out: those
    that were at it, and those sent to it meanwhile, come back as failed after `notice_s`."""

    def __init__(self, clock: Clock, threads: list[Thread], replicas: list[Replica], cost: Cost) -> None:
        self._clock, self._threads, self._replicas, self._cost = clock, threads, replicas, cost
        self.notice_s = 0.0
        self._failed: set[int] = set()
        self._turn = 0
        self.repeated = 0
        """Samples that were lost with a replica, and sent again."""

    def send(self, sample: Sample, answered: Signal) -> Activity:
        self._turn += 1
        yield from self._threads[self._turn % len(self._threads)].work(self._cost.base)
        now = self._clock.now
        usable = [each for each in self._replicas if now < each.dead_since + self.notice_s]
        replica = min(random.sample(usable, min(4, len(usable))), key=lambda each: len(each.in_flight))
        done = Signal()
        replica.in_flight[id(sample)] = done
        self._clock.start(self._until_answered(replica, done))
        yield done
        replica.in_flight.pop(id(sample), None)
        if replica.dead:
            self._failed.add(id(sample))
            self.repeated += 1
        answered.set()

    def _until_answered(self, replica: Replica, done: Signal) -> Activity:
        if replica.dead:
            yield max(0.0, replica.dead_since + self.notice_s - self._clock.now)
        else:
            yield from replica.sample()
            if replica.dead:
                yield max(0.0, replica.dead_since + self.notice_s - self._clock.now)
        done.set()

    def answered_well(self, sample: Sample) -> bool:
        failed = id(sample) in self._failed
        self._failed.discard(id(sample))
        return not failed


class Client:
    """One session: keeps `in_flight` samples in flight, with a pause after each. They begin evenly over
    `period_s`."""

    def __init__(
        self, cluster: Cluster, tenant: int, thread: Thread, in_flight: int, pause_s: float, period_s: float
    ) -> None:
        self.cluster, self.tenant, self.thread = cluster, tenant, thread
        self._in_flight, self._pause_s, self._period_s = in_flight, pause_s, period_s
        self.polls_at: Api | None = None

    def start(self) -> None:
        self.polls_at = self.cluster.any_api()
        for _ in range(self._in_flight):
            self.cluster.clock.start(self._work())

    def _work(self) -> Activity:
        cluster, services = self.cluster, self.cluster.services
        yield random.uniform(0, self._period_s)
        while True:
            sample = Sample(self.tenant, self, cluster.clock.now)
            while not sample.recorded:
                api = cluster.any_api()
                yield from self.thread.work(services.client.base)
                yield from self._at(api, services.submit)
                if api.thread.dead:
                    yield CONNECT_AGAIN_S
                    continue
                yield from api.write("record")
                sample.recorded = not api.thread.dead
                sample.owner = api
            assert sample.owner is not None
            cluster.clock.start(sample.owner.forward(sample))
            yield sample.ended
            api = cluster.any_api()
            if api is sample.owner:
                yield from self._at(api, services.retrieve)
            else:
                yield from self._at(api, Cost(services.retrieve.base + services.read_one_api.base))
                yield from cluster.database.read(services.read_one_db.base)
            cluster.ended(sample)
            yield random.expovariate(1 / self._pause_s) if self._pause_s else 0.0

    def _at(self, api: Api, cost: Cost) -> Activity:
        if api.thread.dead:
            return
        yield from api.use(cost)


class Cluster:
    """All parts, and what was measured. `ends` has the time and the wait of each sample, by tenant."""

    def __init__(self, clock: Clock, services: Services, database: Database) -> None:
        self.clock, self.services, self.database = clock, services, database
        self.apis: list[Api] = []
        self.living: list[Api] = []
        """As the others see it: a dead process leaves it once it is left out."""
        self.clients: list[Client] = []
        self.router: Any = None
        self.ends: list[tuple[float, float, int]] = []
        self.sessions = 0
        self.heartbeat_s = 10.0
        self.notice_pause_s = 0.0
        self.poll_search_s = 0.0
        """CPU seconds of looking at one polling client for each end that another process tells of."""
        self.held_share = 1.0
        """The share of a commit's CPU time in the API process for which the write lock is held."""
        self.records_lock = False
        self.lock_trips = 4
        """Round trips while the lock is held."""

    def any_api(self) -> Api:
        reachable = [api for api in self.apis if not api.thread.dead]
        return random.choice(reachable)

    def ended(self, sample: Sample) -> None:
        self.ends.append((self.clock.now, self.clock.now - sample.began, sample.tenant))

    def kill(self, apis: list[Api]) -> None:
        """These processes end now, and do not come back. Others take over their samples after MISSES rounds."""
        for api in apis:
            api.thread.dead = True
        for client in self.clients:
            if client.polls_at in apis:
                client.polls_at = self.any_api()
        self.clock.at(self.clock.now + BEAT_S * (MISSES + 0.5), lambda: self._take_over(apis))

    def _take_over(self, dead: list[Api]) -> None:
        self.living = [api for api in self.living if api not in dead]
        for api in dead:
            for sample in list(api.own.values()):
                sample.owner = self.any_api()
                self.clock.start(sample.owner.forward(sample))
            api.own.clear()
