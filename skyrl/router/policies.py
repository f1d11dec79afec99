"""Which worker gets a request: the policies of `--policy`, by name.

A policy sees the key and the adapter of the request and the requests in flight on each worker. It does not know HTTP,
health or registration: every candidate may be chosen. docs/decisions/router-policies.md has the reasons and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from skyrl.router.placement import AdapterPlacement
from skyrl.router.rendezvous import KeyOrders
from skyrl.router.worker import Worker

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
