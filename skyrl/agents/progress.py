"""How far a run is, for a callback, and as a line of text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO


@dataclass
class Progress:
    """Numbers of sessions. `rewarded`, `failed` and `unrewarded` have ended, `retried` began again."""

    total: int
    running: int = 0
    rewarded: int = 0
    failed: int = 0
    unrewarded: int = 0
    retried: int = 0
    reward_sum: float = 0.0

    @property
    def done(self) -> int:
        return self.rewarded + self.failed + self.unrewarded

    def __str__(self) -> str:
        parts = [f"{self.done}/{self.total} sessions", f"{self.running} running"]
        parts += [f"{number} {name}" for name in ("failed", "unrewarded", "retried") if (number := getattr(self, name))]
        return ", ".join(parts + ([f"mean reward {self.reward_sum / self.rewarded:.3f}"] if self.rewarded else []))


class ProgressLine:
    """A callback for `run`: keeps one line of a terminal up to date. In a file only the last state is written."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __call__(self, progress: Progress) -> None:
        last = progress.done == progress.total
        if self._stream.isatty():
            self._stream.write(f"\r{progress}\x1b[K" + ("\n" if last else ""))
            self._stream.flush()
        elif last:
            self._stream.write(f"{progress}\n")
