"""The clients of a simulated cluster: some only sample, others do reinforcement learning."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.simulation.api import Api
from benchmarks.simulation.cores import Thread
from benchmarks.simulation.events import Activity, Signal
from benchmarks.simulation.parts import Cluster, Sample, at
from benchmarks.simulation.services import Cost
from skyrl.base.types.requests import Kind

CONNECT_AGAIN_S = 0.1
"""A client whose server is gone asks another one after this time."""


@dataclass(frozen=True)
class Learning:
    """A step of a tenant that does reinforcement learning: `samples` at once, then `passes` requests of
    forward_backward with `pass_bytes` each and an optimizer step, then a save for sampling. `away_s` is what the client
    does between sampling and training. The engine's device computes `pass_s` for a pass and `step_s` for an optimizer
    step, and a save takes `save_s` until the adapter is written."""

    samples: int = 16
    passes: int = 8
    pass_bytes: int = 160_000
    pass_s: float = 0.4
    step_s: float = 0.02
    save_s: float = 0.1
    away_s: float = 1.0
    waits: bool = False
    """Whether the client sends the optimizer step when the passes have ended, and not with them."""


class Client:
    """One session: keeps `in_flight` samples of `sample_s` in flight, with a pause of `pause_s` on average after each.
    It begins in the middle of its life: with some samples in flight, and the others in their pauses."""

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        tenant: int,
        base: int,
        thread: Thread,
        in_flight: int,
        sample_s: float,
        pause_s: float,
    ) -> None:
        self.cluster, self.tenant, self.base, self.thread = cluster, tenant, base, thread
        self.tenant_name = str(tenant)
        self.key = f"session-{number}:sampler:0"
        self._in_flight, self._sample_s, self._pause_s = in_flight, sample_s, pause_s
        self.polls_at: Api | None = None
        self.untold: list[Sample] = []
        """Samples whose end is stored, and that no answer to a poll has told."""

    def start(self) -> None:
        self.poll_elsewhere()
        for _ in range(self._in_flight):
            self.cluster.clock.start(self._work())

    def _work(self) -> Activity:
        if random.random() < self._sample_s / (self._sample_s + self._pause_s):
            yield random.uniform(0, self._sample_s)
        else:
            yield random.expovariate(1 / self._pause_s)
        server = self.cluster.any_api() if self.cluster.connected else None
        while True:
            server = yield from self.sample(server)
            yield random.expovariate(1 / self._pause_s) if self._pause_s else 0.0

    def poll_elsewhere(self) -> None:
        """Poll at another process, which finds in the table what was not told."""
        self.polls_at = home = self.cluster.any_api()
        home.ends.stored += self.untold
        self.cluster.clock.start(self._poll(home))

    def _poll(self, home: Api) -> Activity:
        while True:
            told: list[Sample] = yield from home.ends.poll(self)
            for sample in told:
                self.untold.remove(sample)
                sample.ended.set()

    def sample(self, server: Api | None = None) -> Activity:
        """One sample, from its submission until its result is here. All its requests go to `server`, if that lives, or
        each to any process. Its value is the process to which the next sample goes."""
        cluster, services = self.cluster, self.cluster.services
        third_s = services.client.base / 3
        """Of each of three answers that the client's process reads: accepted, ended, and the result."""
        key = self.key if cluster.shares_keys else f"{self.key}:{random.getrandbits(40)}"
        sample = Sample(self, key, cluster.clock.now, self._sample_s)
        while not sample.recorded:
            api = server or cluster.any_api()
            yield from at(api, services.submit)
            if api.thread.dead:
                server = server and cluster.any_api()
                yield CONNECT_AGAIN_S
                continue
            yield from api.write("record")
            sample.recorded = not api.thread.dead
            sample.owner = api
        assert sample.owner is not None
        cluster.clock.start(sample.owner.forward(sample))
        yield from self.thread.work(third_s)
        yield sample.ended
        yield from self.thread.work(third_s)
        server = server and (cluster.any_api() if server.thread.dead else server)
        api = server or cluster.any_api()
        if api is sample.owner:
            yield from at(api, services.retrieve)
        else:
            yield from at(api, services.retrieve)
            yield from api.read(services.read_one_api, services.read_one_db)
        yield from self.thread.work(third_s)
        cluster.ends.append((cluster.clock.now, cluster.clock.now - sample.began, self.tenant))
        return server


class Learner(Client):
    """A tenant with one model that does reinforcement learning, step after step."""

    def __init__(
        self, cluster: Cluster, tenant: int, base: int, thread: Thread, sample_s: float, learning: Learning
    ) -> None:
        super().__init__(cluster, tenant, tenant, base, thread, 1, sample_s, 0.0)
        self._learning = learning
        self._version = 0

    def _work(self) -> Activity:
        cluster, learning = self.cluster, self._learning
        yield random.uniform(0, self._sample_s)
        while True:
            yield from self._together([self.sample() for _ in range(learning.samples)])
            yield random.uniform(0.5, 1.5) * learning.away_s
            began = cluster.clock.now
            passes = [self._command(Kind.FORWARD_BACKWARD, learning.pass_bytes) for _ in range(learning.passes)]
            step = self._command(Kind.OPTIM_STEP, 100)
            for activities in [[*passes], [step]] if learning.waits else [[*passes, step]]:
                yield from self._together(activities)
            cluster.trained.append((cluster.clock.now, cluster.clock.now - began, self.tenant))
            began = cluster.clock.now
            yield from self._together([self._command(Kind.SAVE_WEIGHTS_FOR_SAMPLER, 100)])
            cluster.saved.append((cluster.clock.now, cluster.clock.now - began, self.tenant))
            self._version += 1
            self.key = f"session-{self.tenant}:sampler:{self._version}"

    def _together(self, activities: list[Activity]) -> Activity:
        """Start all of them, and wait for all."""
        ends = [Signal() for _ in activities]

        def until_end(activity: Activity, end: Signal) -> Activity:
            yield from activity
            end.set()

        for activity, end in zip(activities, ends, strict=True):
            self.cluster.clock.start(until_end(activity, end))
        for end in ends:
            yield end

    def _command(self, kind: Kind, size: int) -> Activity:
        """One command, from its submission until its result is here. The command of each call has the next number."""
        engine = self.cluster.engines[self.base]
        command, ended = engine.command(self.tenant_name, kind, size)

        def run() -> Activity:
            cluster, services = self.cluster, self.cluster.services
            api = cluster.any_api()
            yield from self.thread.work(services.client.base)
            yield from at(api, services.submit)
            yield from api.write("settle")  # a command is recorded with the write lock, as an end is
            engine.add(command)
            yield ended
            yield from at(api, Cost(services.hear_api.base + services.retrieve.base + services.read_one_api.base))
            yield from cluster.database.read(services.read_one_db.base)

        return run()
