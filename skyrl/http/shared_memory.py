"""Memory that large bodies of requests, or large answers, share. Knows sizes and tenants, and no bytes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable


class Reservation:
    """The memory that one body or answer holds or waits for."""

    def __init__(self, memory: SharedMemory, size: float, on_granted: Callable[[], object], tenant: str) -> None:
        self._memory = memory
        self.size = size
        self.on_granted = on_granted
        self.tenant = tenant
        self.granted = False

    def release(self) -> None:
        """Give the memory back, or stop waiting for it. A second call does nothing."""
        self._memory._release(self)


class SharedMemory:
    """Shares `size` bytes between tenants. The next reservation is one of the tenant that holds the least memory; of
    several such tenants, the one that has waited longest. Each tenant's reservations go in order of arrival. One that
    is larger than the whole memory waits until no other holds any. Runs in one event loop."""

    def __init__(self, size: float) -> None:
        self._size = size
        self._held: Counter[str] = Counter()
        """Bytes that each tenant holds."""
        self._waiting: dict[str, deque[Reservation]] = {}
        """By tenant. The tenant that has waited longest comes first."""

    def reserve(self, size: float, on_granted: Callable[[], object], tenant: str = "") -> Reservation:
        """Calls `on_granted` when `size` bytes are free: at once, or later."""
        reservation = Reservation(self, min(size, self._size), on_granted, tenant)
        self._waiting.setdefault(tenant, deque()).append(reservation)
        self._grant()
        return reservation

    async def take(self, size: float, tenant: str) -> Reservation:
        """Wait until `size` bytes are free."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reservation = self.reserve(size, lambda: turn.cancelled() or turn.set_result(None), tenant)
        try:
            await turn
        except BaseException:
            reservation.release()
            raise
        return reservation

    def _grant(self) -> None:
        while self._waiting:
            tenant = min(self._waiting, key=self._held.__getitem__)
            reservation = self._waiting[tenant][0]
            if self._held.total() + reservation.size > self._size:
                return
            queue = self._waiting.pop(tenant)
            queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the tenants that have waited longer
            self._held[tenant] += reservation.size  # type: ignore[assignment]
            reservation.granted = True
            reservation.on_granted()

    def _release(self, reservation: Reservation) -> None:
        tenant = reservation.tenant
        if reservation.granted:
            reservation.granted = False
            self._held[tenant] -= reservation.size  # type: ignore[assignment]
            if not self._held[tenant]:
                del self._held[tenant]
        elif reservation in (queue := self._waiting.get(tenant, deque())):
            queue.remove(reservation)
            if not queue:
                del self._waiting[tenant]
        self._grant()
