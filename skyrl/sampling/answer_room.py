"""The memory that large answers of the inference server may take in one process, all of them together.

Knows sizes and turns. Does not know connections or what an answer holds. Small answers do not come here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LARGE_ANSWER_BYTES = 2**20
"""A larger answer needs room before it is read further."""
ROOM_BYTES = 256 * 2**20
"""For all large answers of a process, from their first byte until they are decoded. One that is larger than the whole
room is read when no other is there."""


class AnswerRoom:
    """Room by size, first come, first served. Runs in one event loop."""

    def __init__(self, size: int = ROOM_BYTES) -> None:
        self._size = size
        self._taken = 0
        self._waiting: deque[Place] = deque()

    def ask(self, size: int, admitted: Callable[[], None]) -> Place:
        """A place for `size` bytes. `admitted` is called once the place is there: at once, or later."""
        place = Place(self, size, admitted)
        self._waiting.append(place)
        self._admit()
        return place

    def _admit(self) -> None:
        while self._waiting:
            place = self._waiting[0]
            if self._taken and self._taken + place.size > self._size:
                return
            self._waiting.popleft()
            self._taken += place.size
            place.held = True
            place.admitted()

    def _leave(self, place: Place) -> None:
        if place.held:
            place.held = False
            self._taken -= place.size
        elif place in self._waiting:
            self._waiting.remove(place)
        self._admit()


class Place:
    """What one answer holds or waits for."""

    def __init__(self, room: AnswerRoom, size: int, admitted: Callable[[], None]) -> None:
        self._room = room
        self.size = size
        self.admitted = admitted
        self.held = False

    def leave(self) -> None:
        """Give the room back, or stop waiting for it. Calling it again does nothing."""
        self._room._leave(self)
