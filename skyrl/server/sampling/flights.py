"""Which tries had the inference server for themselves: no other request of this process was sent while they ran.

Knows counts. The forwarding client decides what follows from them.
"""

from __future__ import annotations


class Flights:
    """Counts the tries that run. A try is alone if none runs at its start and none starts before its end."""

    def __init__(self) -> None:
        self._running = 0
        self._started = 0

    def start(self) -> int:
        """A try starts. Returns what `end` needs."""
        self._started += 1
        self._running += 1
        return self._started if self._running == 1 else 0

    def end(self, start: int) -> bool:
        """The try ends. Returns whether it was alone."""
        self._running -= 1
        return start == self._started
