"""The router's figures for `GET /metrics`: requests, workers, middleware, and the radix cache.

All are read from the router's parts at each writing, on another thread. Workers are numbered: an address is no label,
because workers come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.router.middleware import Chain, Guarded
from skyrl.router.pool import Change, WorkerPool
from skyrl.router.proxy import Proxy
from skyrl.router.radix.middleware import RadixTreeMiddleware
from skyrl.router.worker import Worker

EVENTS = (
    "answered",
    "not_accepted",
    "interrupted",
    "no_worker",
    "refused_busy",
    "refused_body",
    "client_left",
    "internal_errors",
)
"""The counters of the proxy and of the application."""
STATES = ("healthy", "out_of_service", "quarantined", "draining")
RADIX = {
    "lookups": (CounterMetricFamily, "lookups", "Texts that were looked up."),
    "hits": (CounterMetricFamily, "hits", "Lookups that found a stored prefix."),
    "hit_tokens": (CounterMetricFamily, "saved_tokens", "Tokens from stored prefixes, which were not tokenised again."),
    "total_tokens": (CounterMetricFamily, "tokens", "Tokens of all texts that were looked up."),
    "evictions": (CounterMetricFamily, "evictions", "Trajectories that were dropped because the cache was full."),
    "collected": (CounterMetricFamily, "collected", "Trajectories that were dropped because their weights were old."),
    "unverified": (CounterMetricFamily, "unverified", "Answers whose tokens did not fit their text; not stored."),
    "aborted": (CounterMetricFamily, "aborted", "Answers that the worker had aborted; not stored."),
    "retried": (CounterMetricFamily, "retried", "Requests that were sent again after an abort."),
    "bytes": (GaugeMetricFamily, "bytes", "Estimated memory of the cache."),
    "entries": (GaugeMetricFamily, "entries", "Stored trajectories."),
}
"""By the name in the middleware's own numbers: kind, name and meaning of the metric."""


class RouterMetrics(Collector):
    def __init__(self, pool: WorkerPool, proxy: Proxy, counts: Counter[str], chain: Chain) -> None:
        self._pool, self._proxy, self._counts, self._chain = pool, proxy, counts, chain
        self._numbers: dict[Worker, int] = {}
        for worker in pool.workers:
            self._number(worker, Change.REGISTERED)
        pool.subscribe(self._number)

    def _number(self, worker: Worker, change: Change) -> None:
        """A worker has the lowest free number from its registration until it is forgotten."""
        if change is Change.FORGOTTEN:
            self._numbers.pop(worker, None)
        elif change is Change.REGISTERED and worker not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[worker] = next(number for number in count() if number not in taken)

    def collect(self) -> Iterable[Metric]:
        about = "What became of requests; not_accepted counts tries that were sent to another worker."
        events = CounterMetricFamily("skyrl_router_events", about, labels=("event",))
        for event in EVENTS:
            events.add_metric((event,), self._counts[event])
        yield events
        about = "Requests that wait because as many as allowed are at workers."
        yield GaugeMetricFamily("skyrl_router_waiting", about, value=self._proxy.slots.waiting)
        about = "How often a healthy worker was taken out of routing because it did not answer."
        yield CounterMetricFamily("skyrl_router_ejections", about, value=self._pool.ejections)
        yield from self._workers()
        yield from _middleware(self._chain.guards)

    def _workers(self) -> Iterable[Metric]:
        numbered = [*self._numbers.items()]
        states = Counter(_state(worker) for worker, _ in numbered)
        by_state = GaugeMetricFamily("skyrl_router_workers", "Workers by state.", labels=("state",))
        for state in STATES:
            by_state.add_metric((state,), states[state])
        label = ("worker",)
        routable = GaugeMetricFamily("skyrl_router_worker_routable", "1 if the worker gets requests.", labels=label)
        in_flight = GaugeMetricFamily("skyrl_router_worker_in_flight", "Requests at the worker.", labels=label)
        served = CounterMetricFamily("skyrl_router_worker_requests", "Requests sent to the worker.", labels=label)
        for worker, number in numbered:
            routable.add_metric((str(number),), worker.routable)
            in_flight.add_metric((str(number),), worker.in_flight)
            served.add_metric((str(number),), worker.served)
        return by_state, routable, in_flight, served


def _state(worker: Worker) -> str:
    return "out_of_service" if worker.state == "healthy" and not worker.in_service else worker.state.value


def _middleware(guards: Iterable[Guarded]) -> Iterable[Metric]:
    """Numbers of each middleware, by its place in the chain; further numbers of radix caches."""
    label = ("middleware",)
    requests = CounterMetricFamily("skyrl_middleware_requests", "Requests that the middleware saw.", labels=label)
    failures = CounterMetricFamily("skyrl_middleware_failures", "Requests in which it failed.", labels=label)
    radix: dict[str, Mapping[str, float]] = {}
    for place, guard in enumerate(guards):
        requests.add_metric((str(place),), guard.requests)
        failures.add_metric((str(place),), guard.failures)
        if isinstance(guard.plugin, RadixTreeMiddleware):
            radix[str(place)] = guard.plugin.stats()
    yield requests
    yield failures
    for key, (kind, name, about) in RADIX.items() if radix else ():
        family = kind(f"skyrl_radix_{name}", about, labels=label)
        for place, stats in radix.items():
            family.add_metric((place,), stats[key])
        yield family
