"""How long to wait between two tries of the same thing: longer each time, up to a bound.

Knows numbers only. The caller waits: on the event loop, on a thread, or for an event that ends the wait early.
"""

from __future__ import annotations

import random


class Backoff:
    """The pauses of one series of tries, in seconds: `first_s`, then twice as long each time, at most `longest_s`.

    Each pause is varied at random by the fraction `jitter`, up and down, so that callers that failed together do not
    all try again together. With `stable_s`, a try that ran for that long starts the series anew.
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
        """Whether a pause was given since the series began."""

    def pause(self, longest_s: float | None = None) -> float:
        """The pause before the next try. `longest_s` replaces the bound of the pause after this one."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s if longest_s is None else longest_s)
        self.waited = True
        return pause_s * random.uniform(1 - self._jitter, 1 + self._jitter) if self._jitter else pause_s

    def ran(self, seconds: float) -> None:
        """A try ran for so long before it failed."""
        if seconds >= self._stable_s:
            self._next_s, self.waited = self._first_s, False
