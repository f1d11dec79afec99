"""Commands whose tenant's quota has no tokens for them yet: out of sight until their time has come.

A model's later commands wait for a number that is not there, as for one that has not arrived, and nobody else waits.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from skyrl.types.command import Command


class Delayed:
    """Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Command]] = []

    def add(self, command: Command, start: float) -> None:
        heapq.heappush(self._heap, (start, command.n, command))

    def behind(self, command: Command) -> Command:
        """The same, but not before any of its model's that wait here: it has no number of its own to keep its place."""
        starts = [start for start, _, other in self._heap if other.model_id == command.model_id]
        return replace(command, not_before=max(starts)) if starts else command

    def pop(self, now: float) -> list[Command]:
        """Those whose time has come, the earliest first."""
        due: list[Command] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def pop_model(self, model_id: str) -> list[Command]:
        """Those of a model that is closed."""
        gone = [command for _, _, command in self._heap if command.model_id == model_id]
        self._heap = [entry for entry in self._heap if entry[2].model_id != model_id]
        heapq.heapify(self._heap)
        return gone

    @property
    def next_start(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    @property
    def last_row(self) -> int:
        return max((n for _, n, _ in self._heap), default=0)

    def __len__(self) -> int:
        return len(self._heap)
