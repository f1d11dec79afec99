"""The homes of adapters: on which workers the requests for an adapter go, so that adapters are spread evenly over the
workers' few slots.

This module knows workers and their load alone. It does not load adapters: an engine does that when a request comes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyrl.router.rendezvous import KeyOrders
from skyrl.router.worker import Worker

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
