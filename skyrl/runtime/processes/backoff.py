"""Pauses between tries of the same action: each is longer than the one before, up to a bound.

Computes the pauses only; the caller waits.
"""

from __future__ import annotations

import random


class Backoff:
    """The pauses of one series of tries, in seconds: `first_s`, then twice as long each time, at most `longest_s`.

    `jitter` is the fraction by which each pause is randomly shortened or lengthened, so that callers that failed at the
    same time do not all try again at the same time. After a try that ran for `stable_s` the pauses begin again at
    `first_s`.
    """

    __slots__ = ("_first_s", "_jitter", "_longest_s", "_next_s", "_stable_s", "waited")

    def __init__(
        self, first_s: float, longest_s: float, *, jitter: float = 0.0, stable_s: float = float("inf")
    ) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter
        self._stable_s = stable_s
        self.waited = False
        """Whether `pause` was called since the series began."""

    def pause(self, longest_s: float | None = None) -> float:
        """The pause before the next try. `longest_s` is the bound of the pause after that."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s if longest_s is None else longest_s)
        self.waited = True
        return pause_s * random.uniform(1 - self._jitter, 1 + self._jitter) if self._jitter else pause_s

    def ran(self, seconds: float) -> None:
        """Tell how long a try ran before it failed."""
        if seconds >= self._stable_s:
            self._next_s, self.waited = self._first_s, False
