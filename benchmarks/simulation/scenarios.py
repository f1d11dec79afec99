"""The clusters that are simulated, and what is read from them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.series import quantile
from benchmarks.simulation.events import Clock, Cores
from benchmarks.simulation.parts import Api, Client, Cluster, Database, Replica, Router, Thread
from benchmarks.simulation.services import Services
from skyrl.storage.notify.peers import APART_S


@dataclass(frozen=True)
class Scenario:
    """`in_flight` and `pause_s` are of each client: so many samples at once, and so long a pause after each. A node has
    `node_cores` cores; `shared` puts all processes on one machine with that many cores, as in the check."""

    clients: int
    tenants: int
    apis: int
    replicas: int
    in_flight: int
    sample_s: float
    pause_s: float = 0.0
    slots: int = 256
    routers: int = 1
    shared: float | None = None
    database_cores: float = 16.0
    sync_s: float = 0.0
    trip_s: float = 0.0
    warm_up_s: float = 4.0
    seconds: float = 8.0
    notice_pause_s: float = APART_S
    """How long an API process gathers notices before it sends them."""
    poll_search_s: float = 0.0
    held_share: float = 0.8
    lock_trips: int = 3
    records_lock: bool = False
    dead_apis: int = 0
    dead_replicas: int = 0
    dead_after_s: float = 0.0
    """Since the begin of the window."""
    notice_s: float = 0.5


@dataclass
class Outcome:
    """`utilisation` is the busy share of each part's cores, `cpu_ms` CPU per sample, `per_second` the samples that
    ended in each second. `waits` has the time, the wait in seconds and the tenant of each sample; `repeated` counts
    samples that were lost with a replica and sent again."""

    samples_per_s: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    cpu_ms: dict[str, float]
    utilisation: dict[str, float]
    per_second: list[int] = field(default_factory=list[int])
    waits: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])
    repeated: int = 0
    events: int = 0


def simulate(scenario: Scenario, services: Services, seed: int = 1) -> Outcome:
    random.seed(seed)
    clock = Clock()
    one = None if scenario.shared is None else Cores(clock, scenario.shared)

    def cores(count: float) -> Cores:
        return one or Cores(clock, count)

    database = Database(clock, cores(scenario.database_cores), services, scenario.sync_s, scenario.trip_s)
    cluster = Cluster(clock, services, database)
    cluster.sessions = scenario.clients
    cluster.notice_pause_s, cluster.poll_search_s = scenario.notice_pause_s, scenario.poll_search_s
    cluster.held_share, cluster.lock_trips = scenario.held_share, scenario.lock_trips
    cluster.records_lock = scenario.records_lock
    cluster.apis = [Api(cluster, Thread(clock, cores(1)), number) for number in range(scenario.apis)]
    cluster.living = list(cluster.apis)
    replicas = [Replica(clock, scenario.slots, scenario.sample_s) for _ in range(scenario.replicas)]
    routers = [Thread(clock, cores(1)) for _ in range(scenario.routers)]
    cluster.router = Router(clock, routers, replicas, services.router)
    cluster.router.notice_s = scenario.notice_s
    client_machine = one or Cores(clock, 1e6)
    shared_client = Thread(clock, client_machine) if one is not None else None
    for number in range(scenario.clients):
        thread = shared_client or Thread(clock, client_machine)
        period_s = scenario.sample_s + scenario.pause_s
        tenant = number % scenario.tenants
        cluster.clients.append(Client(cluster, tenant, thread, scenario.in_flight, scenario.pause_s, period_s))
    for api in cluster.apis:
        clock.start(api.rounds())
    for client in cluster.clients:
        client.start()
    clock.run(scenario.warm_up_s)
    before = _spent(cluster, routers, shared_client)
    held, first = database.lock.held_s, len(cluster.ends)
    if scenario.dead_apis or scenario.dead_replicas:
        dead = cluster.apis[: scenario.dead_apis]

        def die() -> None:
            for replica in replicas[: scenario.dead_replicas]:
                replica.dead_since = clock.now
            cluster.kill(dead)

        clock.at(scenario.warm_up_s + scenario.dead_after_s, die)
    clock.run(scenario.warm_up_s + scenario.seconds)
    after = _spent(cluster, routers, shared_client)
    waits = cluster.ends[first:]
    latencies = [wait for _, wait, _ in waits]
    done = max(1, len(waits))
    spent = {name: after[name] - before[name] for name in after}
    utilisation = {
        "api": spent["api"] / scenario.seconds / scenario.apis,
        "busiest api": max(api.thread.busy_s for api in cluster.apis) / (scenario.warm_up_s + scenario.seconds),
        "database": spent["database"] / scenario.seconds / scenario.database_cores,
        "write lock": (database.lock.held_s - held) / scenario.seconds,
        "router": spent["router"] / scenario.seconds / scenario.routers,
    }
    per_second = Counter(int(at - scenario.warm_up_s) for at, _, _ in waits)
    return Outcome(
        len(waits) / scenario.seconds,
        quantile(latencies, 0.5) * 1e3,
        quantile(latencies, 0.99) * 1e3,
        max(latencies, default=float("nan")) * 1e3,
        {name: seconds / done * 1e3 for name, seconds in spent.items()},
        utilisation,
        [per_second[second] for second in range(int(scenario.seconds))],
        waits,
        cluster.router.repeated,
        clock.happened,
    )


def _spent(cluster: Cluster, routers: list[Thread], clients: Thread | None) -> dict[str, float]:
    return {
        "api": sum(api.thread.busy_s for api in cluster.apis),
        "database": cluster.database.busy_s,
        "router": sum(thread.busy_s for thread in routers),
        "clients": clients.busy_s if clients is not None else 0.0,
    }


def check_of(clients: int, in_flight: int, sample_s: float, apis: int, replicas: int, cores: float) -> Scenario:
    """The scenario of `real.cluster` on a machine that leaves so many cores to it."""
    return Scenario(clients, max(1, clients // 8), apis, replicas, in_flight, sample_s, shared=cores)


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


def as_dict(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in ("samples_per_s", "p50_ms", "p99_ms", "longest_ms")} | {
        "cpu_ms": outcome.cpu_ms,
        "utilisation": outcome.utilisation,
    }
