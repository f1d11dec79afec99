"""The order of workers for a key: rendezvous hashing, kept for keys that come again.

Each pair of key and worker has a score; a key's order is by falling score. So a worker that leaves moves its own keys
alone, and a worker that comes takes over an even share from each other worker. This module knows nothing of load.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

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
