"""Which worker gets a request: the policies of `--policy`, by name.

A policy sees the key and the adapter of the request and the requests in flight on each worker. It does not know HTTP,
health or registration: every candidate may be chosen. docs/decisions/router.md has the reasons and figures.

`KeyOrders` is the order of workers for a key: rendezvous hashing. Each pair of key and worker has a score; a key's
order is by falling score. So a worker that leaves moves its own keys alone, and a worker that comes takes over an even
share from each other worker. `AdapterPlacement` knows the homes of adapters: on which workers the requests for an
adapter go, so that adapters are spread evenly over the workers' few slots. It loads none: an engine does that when a
request comes."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

from skyrl.router.worker import Worker

KEPT_PLACES = 2**18
"""Places of workers in all orders that are kept."""
KEPT_ORDERS = 2**14
MAX_KEPT_KEY = 256
"""The orders of longer keys are not kept, so that all orders together take at most about 10 MB."""
_MASK = 2**64 - 1


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def _score(key: int, worker: int) -> int:
    """splitmix64's finaliser over both digests: every bit of either changes about half of the score's bits."""
    mixed = key ^ worker
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


class KeyOrders:
    """Orders for the latest set of workers. Another set drops all of them."""

    def __init__(self, kept_places: int = KEPT_PLACES) -> None:
        self._kept_places = kept_places
        self._workers: Sequence[Worker] = ()
        self._digests: dict[Worker, int] = {}
        self._orders: dict[str, tuple[Worker, ...]] = {}

    def order(self, key: str, workers: Sequence[Worker]) -> tuple[Worker, ...]:
        """All `workers`, the preferred worker first."""
        if workers is not self._workers:
            self._workers = workers
            self._digests = {worker: _digest(worker.url) for worker in workers}
            self._orders.clear()
        order = self._orders.get(key)
        if order is None:
            digest, digests = _digest(key), self._digests
            order = tuple(sorted(workers, key=lambda worker: _score(digest, digests[worker]), reverse=True))
            if len(key) <= MAX_KEPT_KEY:
                if len(self._orders) >= min(KEPT_ORDERS, max(1, self._kept_places // len(order))):
                    del self._orders[next(iter(self._orders))]
                self._orders[key] = order
        return order


EXTRA_HOME_S = 30.0
"""A home that was added for load is given up after this time. If it is still needed, it is added again."""
IDLE_S = 600.0
"""An adapter without requests for this time has no homes."""
MAX_ADAPTERS = 4096


@dataclass(slots=True)
class _Adapter:
    homes: list[Worker] = field(default_factory=list)
    candidates: Sequence[Worker] = ()
    """The workers of the last request. While they are the same, the homes are still among them."""
    used: float = 0.0
    resized: float = 0.0


class AdapterPlacement:
    """`clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()
        self._orders = KeyOrders()
        self._on_worker: Counter[Worker] = Counter()

    def __len__(self) -> int:
        """The number of adapters that have homes."""
        return len(self._adapters)

    def homes(self, name: str, candidates: Sequence[Worker], bound: float) -> Sequence[Worker]:
        """The workers that may get a request for this adapter: at least one. One is added if each has more than `bound`
        requests in flight. `bound` is not below the mean of `candidates`, so that one of them is within it."""
        now = self._clock()
        adapter = self._adapters.get(name)
        if adapter is None:
            adapter = self._adapters[name] = _Adapter(resized=now)
        else:
            self._adapters.move_to_end(name)
        adapter.used = now
        self._forget_idle(now)
        if adapter.candidates is not candidates:
            self._keep_valid_homes(adapter, candidates)
        homes = adapter.homes
        if all(worker.in_flight > bound for worker in homes):  # or there is none
            self._add_home(adapter, name, candidates, bound)
            adapter.resized = now
        elif len(homes) > 1 and now - adapter.resized > EXTRA_HOME_S:
            if any(worker.in_flight <= bound for worker in homes[:-1]):
                self._leave(homes.pop())
            adapter.resized = now
        return homes

    def _keep_valid_homes(self, adapter: _Adapter, candidates: Sequence[Worker]) -> None:
        """Drop homes that left, and a home that now has more than its share because workers came."""
        adapter.candidates = candidates
        for home in [home for home in adapter.homes if home not in candidates]:
            adapter.homes.remove(home)
            self._leave(home)
        share = -(-sum(self._on_worker[worker] for worker in candidates) // len(candidates))
        if adapter.homes and self._on_worker[adapter.homes[0]] > share:
            self._leave(adapter.homes.pop(0))

    def _add_home(self, adapter: _Adapter, name: str, candidates: Sequence[Worker], bound: float) -> None:
        """The new home is a worker within the bound: one with the fewest adapters, the first in the adapter's order."""
        order = self._orders.order(name, candidates)
        home = min((worker for worker in order if worker.in_flight <= bound), key=self._on_worker.__getitem__)
        adapter.homes.append(home)
        self._on_worker[home] += 1

    def _leave(self, worker: Worker) -> None:
        self._on_worker[worker] -= 1
        if not self._on_worker[worker]:
            del self._on_worker[worker]

    def _forget_idle(self, now: float) -> None:
        while self._adapters:
            oldest = next(iter(self._adapters.values()))
            if len(self._adapters) <= MAX_ADAPTERS and now - oldest.used <= IDLE_S:
                return
            self._adapters.popitem(last=False)
            for home in oldest.homes:
                self._leave(home)


MAX_ADAPTER_NAME = 512
"""A longer name is no adapter's, and would only take memory."""
LOAD_FACTOR = 1.25
LOAD_SLACK = 4
"""A worker is overloaded with more than `LOAD_FACTOR` x the mean + `LOAD_SLACK` requests in flight."""


class RequestFacts(NamedTuple):
    """What a policy may know of a request. An empty routing key counts as none."""

    routing_key: str | None = None
    adapter: str | None = None


class Policy(Protocol):
    """`candidates` is not empty. The pool passes the same tuple again until the set of routable workers changes: a
    policy can keep what it derived from the tuple."""

    uses_adapter: bool
    """Whether `facts.adapter` matters: then the router reads the name in each body."""

    def choose(self, facts: RequestFacts, candidates: Sequence[Worker]) -> Worker: ...


def load_bound(candidates: Sequence[Worker]) -> float:
    """The number of requests in flight above which a worker is overloaded."""
    return LOAD_FACTOR * sum([worker.in_flight for worker in candidates]) / len(candidates) + LOAD_SLACK


class LeastInFlight:
    """The worker with the fewest requests in flight. Workers with equally many take turns."""

    uses_adapter = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, facts: RequestFacts, candidates: Sequence[Worker]) -> Worker:
        loads = [worker.in_flight for worker in candidates]
        least = min(loads)
        try:
            index = loads.index(least, self._next)
        except ValueError:
            index = loads.index(least)
        self._next = index + 1
        return candidates[index]


class RoundRobin:
    """Workers in turn, whatever their load."""

    uses_adapter = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, facts: RequestFacts, candidates: Sequence[Worker]) -> Worker:
        index = self._next if self._next < len(candidates) else 0
        self._next = index + 1
        return candidates[index]


class ConsistentHashing:
    """The first worker in the key's order that is not overloaded. Without a key: least in flight.

    A key keeps its worker when workers come and go, unless its worker leaves or the new worker is its new first.
    """

    uses_adapter = False

    def __init__(self) -> None:
        self._orders = KeyOrders()
        self._keyless = LeastInFlight()

    def choose(self, facts: RequestFacts, candidates: Sequence[Worker]) -> Worker:
        if not facts.routing_key:
            return self._keyless.choose(facts, candidates)
        order = self._orders.order(facts.routing_key, candidates)
        if order[0].in_flight <= LOAD_SLACK:
            return order[0]
        bound = load_bound(candidates)
        return next(worker for worker in order if worker.in_flight <= bound)


class AdapterAffinity:
    """An adapter's requests go to its homes: few workers, because a worker has few adapter slots. When all homes are
    overloaded, the adapter gets one more; a home that was added for load is given up again. Among the homes the session
    key decides, unless that home is overloaded; without a key, the least in flight. A request for no adapter is routed
    as by `ConsistentHashing`."""

    uses_adapter = True

    def __init__(self, placement: AdapterPlacement | None = None) -> None:
        self._placement = AdapterPlacement() if placement is None else placement
        self._orders = KeyOrders()
        self._no_adapter = ConsistentHashing()
        self._keyless = LeastInFlight()

    def choose(self, facts: RequestFacts, candidates: Sequence[Worker]) -> Worker:
        if not facts.adapter or len(facts.adapter) > MAX_ADAPTER_NAME:
            return self._no_adapter.choose(facts, candidates)
        bound = load_bound(candidates)
        homes = self._placement.homes(facts.adapter, candidates, bound)
        if len(homes) == 1:
            return homes[0]
        if facts.routing_key:
            order = self._orders.order(facts.routing_key, candidates)
            chosen = next((worker for worker in order if worker in homes and worker.in_flight <= bound), None)
            if chosen is not None:
                return chosen
        return self._keyless.choose(facts, homes)


POLICIES: dict[str, Callable[[], Policy]] = {
    "consistent_hashing": ConsistentHashing,
    "least_in_flight": LeastInFlight,
    "round_robin": RoundRobin,
    "adapter_affinity": AdapterAffinity,
}
DEFAULT_POLICY = "consistent_hashing"
ALIASES = {"consistent_hash": "consistent_hashing"}
_OTHERS = {
    "cache_aware": "consistent_hashing keeps a session on one worker, where its prefixes are cached",
    "power_of_two": "least_in_flight compares all workers",
    "random": "round_robin or least_in_flight spread requests evenly",
    "manual": "consistent_hashing keeps a routing key on one worker",
}
"""Policies of other routers, and which of ours comes next to each."""


def make_policy(name: str) -> Policy:
    """The policy of this name. Raises ValueError, with a message for operators, if there is none."""
    made = POLICIES.get(ALIASES.get(name, name))
    if made is None:
        hint = f" ({_OTHERS[name]})" if name in _OTHERS else ""
        raise ValueError(f"policy: {name!r} is not a policy of this router{hint}; use one of {', '.join(POLICIES)}")
    return made()
