"""Delayed commands: their tenant's quota has no tokens for them yet.

The scheduler treats a delayed command as if it had not arrived yet: the model's later commands wait for it, and other
models do not wait.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from skyrl.base.types.requests import Command


class Delayed:
    """Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Command]] = []

    def add(self, command: Command, start: float) -> None:
        heapq.heappush(self._heap, (start, command.n, command))

    def start_after_delayed(self, command: Command) -> Command:
        """A copy of `command` that starts after all delayed commands of its model. For commands without a seq_id, which
        would otherwise overtake the delayed commands."""
        starts = [start for start, _, other in self._heap if other.model_id == command.model_id]
        return replace(command, not_before=max(starts)) if starts else command

    def pop(self, now: float) -> list[Command]:
        """Remove and return the commands that may start now, the earliest first."""
        due: list[Command] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def pop_model(self, model_id: str) -> list[Command]:
        """Remove and return the commands of a closed model."""
        removed = [command for _, _, command in self._heap if command.model_id == model_id]
        self._heap = [entry for entry in self._heap if entry[2].model_id != model_id]
        heapq.heapify(self._heap)
        return removed

    def commands(self) -> list[tuple[float, Command]]:
        """All delayed commands with their starts, in no order."""
        return [(start, command) for start, _, command in self._heap]

    @property
    def next_start(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    @property
    def last_row(self) -> int:
        return max((n for _, n, _ in self._heap), default=0)

    def __len__(self) -> int:
        return len(self._heap)
