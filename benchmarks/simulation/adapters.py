"""Where a thousand adapters go: the router's own placement and policies over many replicas with few adapter slots.

Requests for adapters come at random, by popularity; a replica keeps the adapters that it used last. There is no
database and no API process here.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.series import quantile
from benchmarks.simulation.events import Activity, Clock
from skyrl.router.policies import AdapterAffinity, AdapterPlacement, Policy, RequestFacts, make_policy
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Worker


@dataclass(frozen=True)
class Traffic:
    """`rate` requests a second in all, of `sample_s` each. Adapter number n has a part of them in proportion to
    n ** -zipf. Each adapter is replaced by its next version after `version_s` on average (0: never). A replica has
    `slots` for adapters. At `dead_at_s` the first `dead` replicas end."""

    adapters: int = 1_000
    replicas: int = 100
    slots: int = 16
    rate: float = 1_000.0
    sample_s: float = 2.0
    zipf: float = 0.0
    version_s: float = 0.0
    dead: int = 0
    dead_at_s: float = 100.0
    warm_up_s: float = 60.0
    seconds: float = 120.0


@dataclass
class Placed:
    """Per second of the window: `loads` of adapters and `evictions`; `misses` is the share of requests that had to load
    theirs. `fullest` is the most requests in flight at one replica over the mean, at the median second. `spread` is the
    number of replicas of the most used adapter, `loads_after` the loads in each second after the deaths."""

    loads: float = 0.0
    evictions: float = 0.0
    misses: float = 0.0
    fullest: float = 0.0
    spread: int = 0
    loads_after: list[int] = field(default_factory=list[int])


def place(policy: str, traffic: Traffic, seed: int = 1, urls: Sequence[str] = ()) -> Placed:
    """What `policy` does with this traffic. Where a key goes depends on the `urls` of the replicas."""
    random.seed(seed)
    clock = Clock()
    chosen: Policy = make_policy(policy)
    if isinstance(chosen, AdapterAffinity):
        chosen = AdapterAffinity(AdapterPlacement(lambda: clock.now))
    pool = WorkerPool(chosen)
    urls = urls or [f"http://replica-{number}:8000" for number in range(traffic.replicas)]
    workers = [pool.add(url) for url in urls]
    held: dict[Worker, OrderedDict[str, None]] = {worker: OrderedDict() for worker in workers}
    weights = [(number + 1) ** -traffic.zipf for number in range(traffic.adapters)]
    versions: Counter[int] = Counter()
    loads: Counter[int] = Counter()
    evictions: Counter[int] = Counter()
    requests = 0
    fullest: list[float] = []

    def request(number: int) -> Activity:
        name = f"model-{number}@{versions[number]}"
        worker = pool.choose(RequestFacts(f"session-{number}:sampler:{versions[number]}", name))
        assert worker is not None, "a replica lives"
        pool.begin(worker)
        adapters = held[worker]
        if name not in adapters:
            loads[int(clock.now)] += 1
            if len(adapters) >= traffic.slots:
                adapters.popitem(last=False)
                evictions[int(clock.now)] += 1
        adapters[name] = None
        adapters.move_to_end(name)
        yield random.uniform(0.8, 1.2) * traffic.sample_s
        pool.end(worker)

    def arrivals() -> Activity:
        nonlocal requests
        while True:
            for number in random.choices(range(traffic.adapters), weights, k=max(1, round(traffic.rate / 10))):
                requests += 1
                clock.start(request(number))
            yield 0.1

    def replaced(number: int) -> Activity:
        while True:
            yield random.expovariate(1 / traffic.version_s)
            versions[number] += 1

    def look() -> Activity:
        while True:
            yield 1.0
            loaded = [worker.in_flight for worker in pool.candidates]
            fullest.append(max(loaded) * len(loaded) / max(1, sum(loaded)))

    def die() -> None:
        for worker in workers[: traffic.dead]:
            pool.quarantine(worker, "it is dead")

    clock.start(arrivals())
    if traffic.version_s:
        for number in range(traffic.adapters):
            clock.start(replaced(number))
    clock.run(traffic.warm_up_s)
    begin, end = int(clock.now), int(traffic.warm_up_s + traffic.seconds)
    before = requests
    clock.start(look())
    if traffic.dead:
        clock.at(traffic.dead_at_s, die)
    clock.run(end)
    in_window = range(begin, end)
    loaded = sum(loads[second] for second in in_window)
    most_used = f"model-0@{versions[0]}"
    return Placed(
        loaded / traffic.seconds,
        sum(evictions[second] for second in in_window) / traffic.seconds,
        loaded / max(1, requests - before),
        quantile(fullest, 0.5),
        sum(most_used in held[worker] for worker in pool.candidates),
        [loads[int(traffic.dead_at_s) + second] for second in range(20)] if traffic.dead else [],
    )
