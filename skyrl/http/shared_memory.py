"""Memory that large bodies of requests, or large answers, share. Knows sizes and tenants, and no bytes.

`UnreadAnswers` bounds the answers of a process that its clients have not taken yet."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple


class Reservation:
    """The memory that one body or answer holds or waits for."""

    def __init__(self, memory: SharedMemory, size: float, on_granted: Callable[[], object], tenant: str) -> None:
        self._memory = memory
        self.size = size
        self.on_granted = on_granted
        self.tenant = tenant
        self.since = time.monotonic()
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

    def others_wait_s(self, tenant: str) -> float:
        """For how long another tenant than this one has waited; 0 if none waits."""
        since = [queue[0].since for other, queue in self._waiting.items() if other != tenant]
        return time.monotonic() - min(since) if since else 0.0

    def put_last(self, tenant: str) -> None:
        """Let the tenants go first that wait now and have as little."""
        if (queue := self._waiting.pop(tenant, None)) is not None:
            self._waiting[tenant] = queue

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


NEW_S = 1.0
"""How long a client's pace says nothing yet."""
STALLED_BYTES_PER_S, STALLED_S = 64 * 2**10, 60.0
"""A client that takes less, or needs longer for the rest at its pace so far, has stalled."""


class _Unread(NamedTuple):
    """An answer that waits `since`, in the event loop's time. It holds `held` bytes until its end; `left` of them were
    to be sent then."""

    since: float
    held: int
    left: int


class UnreadAnswers:
    """Answers of which more waits than a transport keeps without complaint. All together may hold `most` bytes, or one
    alone more. Beyond that, the connection is cut whose client takes the fewest bytes in a second, if it has stalled;
    if none has, that of the newest answer. A connection has one such answer at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[asyncio.Transport, _Unread] = {}
        self._held = 0

    def add(self, transport: asyncio.Transport, held: int, now: float) -> None:
        """`now`: the event loop's time."""
        self._waiting[transport] = _Unread(now, held, transport.get_write_buffer_size())
        self._held += held
        while self._held > self._most and len(self._waiting) > 1:
            slowest = min(self._waiting, key=lambda each: self._order(each, now))
            self.remove(slowest)
            slowest.abort()

    def _order(self, transport: asyncio.Transport, now: float) -> tuple[bool, float]:
        since, _, left = self._waiting[transport]
        still = transport.get_write_buffer_size()
        pace = (left - still) / max(now - since, NEW_S)
        has_stalled = now - since >= NEW_S and (pace < STALLED_BYTES_PER_S or still > STALLED_S * pace)
        return not has_stalled, pace if has_stalled else now - since

    def remove(self, transport: asyncio.Transport) -> None:
        """The client has taken the answer, or is gone."""
        if (unread := self._waiting.pop(transport, None)) is not None:
            self._held -= unread.held
