"""How long commands run: means by kind, from which the engine estimates when a waiting command starts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from skyrl.base.types.requests import Command, Kind

WEIGHT = 1 / 8
"""The weight of the newest run in a mean. The first run is the mean of one run."""


class RunTimes:
    """The mean seconds of one command of each kind and, for passes, of one byte of their bodies. Threads may share one
    object. The means are forgotten with the process."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, float] = {}
        self._pass_byte_s: float | None = None
        self._lock = threading.Lock()

    def ran(self, commands: Sequence[Command], seconds: float) -> None:
        """These commands have run together, for `seconds`. They are passes, or one other command."""
        size = sum(command.size for command in commands)
        with self._lock:
            for command in commands:
                part = command.size / size if size else 1 / len(commands)
                self._seconds[command.kind] = _mean(self._seconds.get(command.kind), seconds * part)
            if commands and commands[0].is_pass and size:
                self._pass_byte_s = _mean(self._pass_byte_s, seconds / size)

    def estimate(self, command: Command) -> float | None:
        """The expected run time in seconds; None while no command of this kind has run."""
        if command.is_pass:
            return None if self._pass_byte_s is None else command.size * self._pass_byte_s
        return self._seconds.get(command.kind)

    def total(self, commands: Sequence[Command]) -> float | None:
        """The expected run time of all these commands; None if one of them has no estimate."""
        estimates = [self.estimate(command) for command in commands]
        known = [estimate for estimate in estimates if estimate is not None]
        return sum(known) if len(known) == len(estimates) else None

    def means(self) -> dict[str, float]:
        """The mean seconds of a command, by kind."""
        with self._lock:
            return {str(kind): seconds for kind, seconds in self._seconds.items()}


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
