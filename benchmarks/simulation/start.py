"""All API processes start at the same time, and every session sends its first heartbeat to them.

A first heartbeat reads the session's row: at most MAX_NAMED rows in one query, and one such query at a time in each
process. Then it is written, in a group commit with the write lock. Real classes are not run here; the costs are
measured on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.series import quantile
from benchmarks.simulation.cores import Cores, Thread
from benchmarks.simulation.events import Activity, Clock, Signal
from benchmarks.simulation.parts import Database
from benchmarks.simulation.services import Services
from skyrl.storage.db.futures import MAX_NAMED
from skyrl.storage.db.writer import MAX_BATCH


@dataclass(frozen=True)
class Start:
    """`sessions` send their first heartbeat within `within_s` seconds: 10 if they were not told of the stop, and less
    if all have waited for the start. `pipelined` as in `Database`."""

    sessions: int = 100_000
    apis: int = 20
    within_s: float = 10.0
    database_cores: float = 16.0
    sync_s: float = 0.001
    trip_s: float = 0.0001
    pipelined: bool = True


@dataclass
class Started:
    """How long a first heartbeat takes, in seconds; when the last one is answered; the busy share of the API processes
    and of the database's cores until then; and the group commits."""

    p50_s: float
    p99_s: float
    last_s: float
    api: float
    database: float
    commits: int


def start(scenario: Start, services: Services, seed: int = 1) -> Started:
    random.seed(seed)
    clock = Clock()
    database = Database(
        clock,
        Cores(clock, scenario.database_cores),
        services,
        sync_s=scenario.sync_s,
        trip_s=scenario.trip_s,
        pipelined=scenario.pipelined,
    )
    processes = [_Process(clock, database, services) for _ in range(scenario.apis)]
    waits: list[float] = []

    def session() -> Activity:
        process = random.choice(processes)
        yield random.uniform(0, scenario.within_s)
        began = clock.now
        yield from process.thread.work(services.beat.base)
        yield from process.row.take_part()
        yield from process.write.take_part()
        waits.append(clock.now - began)

    for _ in range(scenario.sessions):
        clock.start(session())
    clock.run(600)
    assert len(waits) == scenario.sessions
    last_s = max(process.last for process in processes)
    busy = sum(process.thread.busy_s for process in processes)
    return Started(
        quantile(waits, 0.5),
        quantile(waits, 0.99),
        last_s,
        busy / last_s / scenario.apis,
        sum(backend.busy_s for backend in database.backends) / last_s / scenario.database_cores,
        database.commits,
    )


class _Process:
    """An API process that has just started."""

    def __init__(self, clock: Clock, database: Database, services: Services) -> None:
        self._clock, self._database, self._services = clock, database, services
        self.thread = Thread(Cores(clock, 1), services.api_wake.base)
        self.row = _Groups(clock, MAX_NAMED, self._read)
        self.write = _Groups(clock, MAX_BATCH, self._commit)
        self.last = 0.0

    def _read(self, count: int) -> Activity:
        yield from self.thread.work(self._services.read_rows_api.of(count))
        yield from self._database.read(self._services.read_rows_db.of(count))

    def _commit(self, count: int) -> Activity:
        own, server = self._services.write_beats_api.of(count), self._services.write_beats_db.of(count)
        yield from self._database.commit(self.thread, own, server)
        self.last = self._clock.now


class _Groups:
    """What comes while a group runs goes into the next one. `run` runs one group of so many."""

    def __init__(self, clock: Clock, largest: int, run: Callable[[int], Activity]) -> None:
        self._clock, self._largest, self._run = clock, largest, run
        self._waiting: list[Signal] = []
        self._running = False

    def take_part(self) -> Activity:
        done = Signal()
        self._waiting.append(done)
        if not self._running:
            self._running = True
            self._clock.start(self._groups())
        yield done

    def _groups(self) -> Activity:
        while self._waiting:
            group, self._waiting = self._waiting[: self._largest], self._waiting[self._largest :]
            yield from self._run(len(group))
            for done in group:
                done.set()
        self._running = False
