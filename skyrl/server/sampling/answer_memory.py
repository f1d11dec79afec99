"""The memory that large answers of the inference server may take in one process, all of them together.

Knows sizes and the order of arrival. Does not know connections or the content of an answer. Small answers need no
reservation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LARGE_ANSWER_BYTES = 2**20
"""The rest of a larger answer is only read after memory was reserved for the answer."""
MEMORY_BYTES = 256 * 2**20
"""For all large answers of a process, each until it is decoded. An answer larger than this is read while no other large
answer is in memory."""


class AnswerMemory:
    """Grants reservations in the order of arrival. Runs in one event loop."""

    def __init__(self, size: int = MEMORY_BYTES) -> None:
        self._size = size
        self._reserved = 0
        self._waiting: deque[Reservation] = deque()

    def reserve(self, size: int, on_granted: Callable[[], None]) -> Reservation:
        """A reservation of `size` bytes. Calls `on_granted` when the memory is free: at once, or later."""
        reservation = Reservation(self, size, on_granted)
        self._waiting.append(reservation)
        self._grant()
        return reservation

    def _grant(self) -> None:
        while self._waiting:
            reservation = self._waiting[0]
            if self._reserved and self._reserved + reservation.size > self._size:
                return
            self._waiting.popleft()
            self._reserved += reservation.size
            reservation.granted = True
            reservation.on_granted()

    def _release(self, reservation: Reservation) -> None:
        if reservation.granted:
            reservation.granted = False
            self._reserved -= reservation.size
        elif reservation in self._waiting:
            self._waiting.remove(reservation)
        self._grant()


class Reservation:
    """The memory that one answer holds or waits for."""

    def __init__(self, memory: AnswerMemory, size: int, on_granted: Callable[[], None]) -> None:
        self._memory = memory
        self.size = size
        self.on_granted = on_granted
        self.granted = False

    def release(self) -> None:
        """Give the memory back, or stop waiting for it. A second call does nothing."""
        self._memory._release(self)
