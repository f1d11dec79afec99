"""The clusters that are simulated, and what is read from them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.series import quantile
from benchmarks.simulation.api import Api
from benchmarks.simulation.cores import Cores, Thread
from benchmarks.simulation.engine import TrainingEngine
from benchmarks.simulation.events import Clock
from benchmarks.simulation.inference import Inference, Replica
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.parts import Cluster, Database
from benchmarks.simulation.services import Cost, Services
from benchmarks.simulation.tenants import Client, Learner, Learning
from skyrl.storage.notices import APART_S


@dataclass(frozen=True)
class Scenario:
    """`in_flight` and `pause_s` are of each client: so many samples at once, and so long a pause after each. The first
    clients keep as many samples in flight as `crowd` says, without a pause. `learners` are more tenants, which do
    reinforcement learning on one of `engines` base models each; the replicas are dealt among these.

    `shared` puts all processes on one machine with that many cores, as in the check, and there `others` is the share of
    each core that other programs take. `connected`: each sample in flight has a connection to one API process."""

    clients: int
    tenants: int
    apis: int
    replicas: int
    in_flight: int
    sample_s: float
    spread: float = 0.2
    """A sample takes between 1 - `spread` and 1 + `spread` of its time."""
    pause_s: float = 0.0
    crowd: tuple[int, ...] = ()
    fair: bool = True
    names_workers: bool = True
    """Whether the routers' answers name their replicas, as those of `skyrl rollout` and of a server's own do."""
    in_step: bool = False
    slots: int = 256
    shares_keys: bool = True
    """Whether the samples of a session have one routing key, as for a server's own router. Behind another router, as in
    the checks, each has its own."""
    routers: int = 1
    policy: str = "consistent_hashing"
    shared: float | None = None
    others: float = 0.0
    connected: bool = False
    database_cores: float = 16.0
    sync_s: float = 0.0
    trip_s: float = 0.0
    pipelined: bool = True
    """Whether a group of rows is committed in one round trip."""
    warm_up_s: float = 4.0
    seconds: float = 8.0
    notice_pause_s: float = APART_S
    """How long an API process gathers notices before it sends them."""
    learners: int = 0
    learning: Learning = Learning()
    light_learners: int = 0
    """So many of the learners, the last ones, have steps as `light` says; the engine's seconds are as in `learning`."""
    light: Learning = Learning()
    engines: int = 1
    merges: bool = True
    publish_s: float = 0.1
    dead_apis: int = 0
    dead_replicas: int = 0
    dead_after_s: float = 0.0
    """Since the begin of the window."""
    notice_s: float = 0.5


def simulate(scenario: Scenario, services: Services, seed: int = 1) -> Outcome:
    random.seed(seed)
    clock = Clock()
    one = None
    if scenario.shared is not None:
        slice_s, crowded = services.slice.base, services.crowded.base
        one = Cores(clock, scenario.shared, slice_s=slice_s, crowded=crowded, others=scenario.others)

    def process(wake: Cost) -> Callable[[], Thread]:
        """Makes the threads of a process, which has a core of its own or is on the one machine."""
        cores = one or Cores(clock, 1)
        return lambda: Thread(cores, wake.base)

    database = Database(
        clock,
        one or Cores(clock, scenario.database_cores),
        services,
        sync_s=scenario.sync_s,
        trip_s=scenario.trip_s,
        pipelined=scenario.pipelined,
    )
    cluster = Cluster(clock, services, database)
    cluster.notice_pause_s = scenario.notice_pause_s
    cluster.fair, cluster.in_step, cluster.connected = scenario.fair, scenario.in_step, scenario.connected
    cluster.names_workers, cluster.shares_keys = scenario.names_workers, scenario.shares_keys
    routers = [process(services.router_wake)() for _ in range(scenario.routers)]
    replicas = [
        Replica(clock, scenario.slots, process(services.replica_wake)(), services.replica.base, scenario.spread)
        for _ in range(scenario.replicas)
    ]
    for base in range(scenario.engines):
        own = replicas[base :: scenario.engines]
        cluster.inference.append(Inference(clock, routers, own, services, scenario.notice_s, scenario.policy))
    cluster.apis = [Api(cluster, process(services.api_wake), number) for number in range(scenario.apis)]
    cluster.living = list(cluster.apis)
    client_thread = _add_clients(cluster, scenario, one)
    for activity in (*(api.rounds() for api in cluster.apis), *(engine.run() for engine in cluster.engines)):
        clock.start(activity)
    for client in cluster.clients:
        client.start()
    clock.run(scenario.warm_up_s)
    parts = {
        "api": [thread for api in cluster.apis for thread in api.threads],
        "database": database.backends,
        "router": routers,
        "replicas": [replica.thread for replica in replicas],
        "clients": [client_thread] if client_thread is not None else [],
        "engines": [engine.thread for engine in cluster.engines],
    }
    before, held, first = _spent(cluster, parts), database.lock.held_s, len(cluster.ends)
    woken = _woken(parts)
    steps, saves = len(cluster.trained), len(cluster.saved)
    if scenario.dead_apis or scenario.dead_replicas:
        clock.at(scenario.warm_up_s + scenario.dead_after_s, lambda: _die(cluster, scenario))
    clock.run(scenario.warm_up_s + scenario.seconds)
    after, woken_after = _spent(cluster, parts), _woken(parts)
    waits = cluster.ends[first:]
    latencies = [wait for _, wait, _ in waits]
    spent = {name: (after[name] - before[name]) / scenario.seconds for name in after}
    utilisation = {
        "api": spent["api"] / scenario.apis,
        "database": spent["database"] / scenario.database_cores,
        "write lock": (database.lock.held_s - held) / scenario.seconds,
        "router": spent["router"] / scenario.routers,
        "devices": spent["devices"] / scenario.engines,
        "engines' processes": spent["engines"] / scenario.engines,
    }
    per_second = Counter(int(at - scenario.warm_up_s) for at, _, _ in waits)
    return Outcome(
        len(waits) / scenario.seconds,
        quantile(latencies, 0.5) * 1e3,
        quantile(latencies, 0.99) * 1e3,
        max(latencies, default=float("nan")) * 1e3,
        {name: seconds * scenario.seconds / max(1, len(waits)) * 1e3 for name, seconds in spent.items()},
        utilisation,
        {name: (woken_after[name] - woken[name]) / max(1, len(waits)) for name in woken},
        [per_second[second] for second in range(int(scenario.seconds))],
        waits,
        cluster.trained[steps:],
        cluster.saved[saves:],
        sum(inference.repeated for inference in cluster.inference),
        clock.happened,
    )


def _add_clients(cluster: Cluster, scenario: Scenario, one: Cores | None) -> Thread | None:
    """Returns the thread of all clients, if they are one process."""
    clock, sample_s = cluster.clock, scenario.sample_s
    machine, wake_s = one or Cores(clock, 1e6), cluster.services.client_wake.base
    shared = Thread(machine, wake_s) if one is not None else None
    for number in range(scenario.clients):
        thread = shared or Thread(machine, wake_s)
        crowded = number < len(scenario.crowd)
        in_flight, pause_s = (scenario.crowd[number], 0.0) if crowded else (scenario.in_flight, scenario.pause_s)
        tenant, base = number % scenario.tenants, number % scenario.engines
        cluster.clients.append(Client(cluster, number, tenant, base, thread, in_flight, sample_s, pause_s))
    if scenario.learners:
        for _ in range(scenario.engines):
            process = Thread(one or Cores(clock, 1), cluster.services.api_wake.base)
            cluster.engines.append(
                TrainingEngine(
                    cluster, process, scenario.learning, merges=scenario.merges, publish_s=scenario.publish_s
                )
            )
    for number in range(scenario.learners):
        thread, tenant = shared or Thread(machine, wake_s), scenario.clients + number
        base = number % scenario.engines
        light = number >= scenario.learners - scenario.light_learners
        learning = scenario.light if light else scenario.learning
        cluster.clients.append(Learner(cluster, tenant, base, thread, sample_s, learning))
    return shared


def _die(cluster: Cluster, scenario: Scenario) -> None:
    for inference in cluster.inference:
        inference.kill(scenario.dead_replicas // scenario.engines)
    cluster.kill(cluster.apis[: scenario.dead_apis])


def _spent(cluster: Cluster, parts: dict[str, list[Thread]]) -> dict[str, float]:
    """CPU seconds so far, and those of the engines' devices."""
    spent = {name: sum(thread.busy_s for thread in threads) for name, threads in parts.items()}
    return spent | {"devices": sum(engine.busy_s for engine in cluster.engines)}


def _woken(parts: dict[str, list[Thread]]) -> dict[str, int]:
    """Wake-ups so far."""
    return {name: sum(thread.wakes for thread in threads) for name, threads in parts.items()}


def check_of(
    clients: int, in_flight: int, sample_s: float, apis: int, replicas: int, *, cores: int, others: float = 0.0
) -> Scenario:
    """The scenario of `real.cluster` on a machine with so many cores, of which other programs take `others`."""
    scenario = Scenario(clients, max(1, clients // 8), apis, replicas, in_flight, sample_s, spread=0.0)
    return replace(scenario, shared=float(cores), others=others / cores, connected=True, shares_keys=False)


LARGE = Scenario(
    clients=10_000,
    tenants=1_000,
    apis=20,
    replicas=100,
    in_flight=1,
    sample_s=2.0,
    pause_s=1.0,
    routers=4,
    sync_s=0.001,
    trip_s=0.0001,
)
"""10,000 clients on 64 nodes. Each API process and each router has a core, PostgreSQL has 16."""


def with_rate(scenario: Scenario, samples_per_s: float) -> Scenario:
    """The scenario whose clients ask for so many samples a second in all, if nothing makes them wait."""
    period_s = scenario.clients * scenario.in_flight / samples_per_s
    return replace(scenario, pause_s=max(0.0, period_s - scenario.sample_s))
