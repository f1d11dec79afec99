"""The engine of one base model: the real scheduler, and an activity that follows the turns of `skyrl.engine`.

The device computes one thing at a time. The process itself is one thread of Python, whatever waits for files or for the
database.
"""

from __future__ import annotations

import itertools
from collections import Counter

from benchmarks.simulation.events import Activity, Signal
from benchmarks.simulation.parts import Cluster, Thread
from benchmarks.simulation.tenants import Learning
from skyrl.base.types.requests import SAVES, Command, Kind
from skyrl.engine.build import BYTES_PER_TOKEN
from skyrl.engine.scheduler import Scheduler, cost_of

MICRO_BATCH_TOKENS = 8_192


class TrainingEngine:
    """`busy_s` are the seconds in which its device computed: for a byte of a pass as many as `learning` says. `merges`
    as `trainer.merge_passes`. A save is over `publish_s` after its adapter is written, when the replicas have loaded
    it."""

    def __init__(self, cluster: Cluster, thread: Thread, learning: Learning, *, merges: bool, publish_s: float) -> None:
        self._cluster, self.thread, self._learning = cluster, thread, learning
        self._merges, self._publish_s = merges, publish_s
        self._scheduler = Scheduler(2 * MICRO_BATCH_TOKENS * BYTES_PER_TOKEN)
        self._numbers = itertools.count(1)
        self._next_seq: Counter[str] = Counter()
        self._arrived: list[Command] = []
        self._ends: dict[str, Signal] = {}
        self._news = Signal()
        self.busy_s = 0.0

    def command(self, tenant: str, kind: Kind, size: int) -> tuple[Command, Signal]:
        """The tenant's next command for its model, and what is set when it is settled."""
        n, seq_id = next(self._numbers), self._next_seq[tenant]
        self._next_seq[tenant] += 1
        ended = self._ends[f"r{n}"] = Signal()
        return Command(n, f"r{n}", kind, tenant, tenant, tenant, seq_id, None, None, "json", size), ended

    def add(self, command: Command) -> None:
        """The command is recorded. A save starts now, also while a turn runs."""
        self._arrived.append(command)
        if command.kind in SAVES:
            self._cluster.clock.start(self._read())
        self._news.set()

    def run(self) -> Activity:
        """For ever."""
        while True:
            self._news = Signal()
            yield from self._read()
            if self._scheduler.has_work:
                yield from self._turn()
            else:
                yield self._news

    def _read(self) -> Activity:
        """Read the command log, and start the saves that may run."""
        services = self._cluster.services
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            yield from self.thread.work(services.read_ends_api.of(len(arrived)))
            yield from self._cluster.database.read(services.read_ends_db.of(len(arrived)))
            for command in arrived:
                self._scheduler.add(command)
        for command in self._scheduler.take_file_commands():
            self._cluster.clock.start(self._save(command))

    def _turn(self) -> Activity:
        yield from self.thread.work(self._cluster.services.turn.of(len(self._next_seq)))
        ready = self._scheduler.ready_models()
        if self._merges:
            yield from self._share(ready)
            return
        spent = 0
        while spent < self._scheduler.budget:
            passes, exclusive = yield from self._share(ready[:1])
            if not (passes or exclusive):
                break
            spent += sum(map(cost_of, (*passes, *exclusive)))

    def _share(self, models: list[str]) -> Activity:
        passes = self._scheduler.take_passes(models)
        if passes:
            size = sum(command.size for command in passes)
            yield from self._compute(passes, self._learning.pass_s * size / self._learning.pass_bytes)
        yield from self._read()
        exclusive = self._scheduler.take_exclusive(models)
        for command in exclusive:
            yield from self._compute([command], self._learning.step_s)
        return passes, exclusive

    def _compute(self, commands: list[Command], seconds: float) -> Activity:
        self.busy_s += seconds
        yield seconds
        yield from self._settle(commands)

    def _save(self, command: Command) -> Activity:
        assert command.kind in SAVES
        yield self._learning.save_s + self._publish_s
        yield from self._settle([command])
        self._news.set()

    def _settle(self, commands: list[Command]) -> Activity:
        services = self._cluster.services
        own, server = services.engine_commit.of(len(commands)), services.engine_commit_db.of(len(commands))
        yield from self._cluster.database.commit(self.thread, own, server, rows=False)
        self._scheduler.finish(commands)
        for command in commands:
            self._ends.pop(command.request_id).set()
