"""Discrete events: a clock, activities that wait, and locks.

An activity is a generator. It yields what it waits for: a number of seconds, or a `Signal`. Knows nothing of servers.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

Activity = Generator[Any, Any, Any]


class Signal:
    """Something that happens once. Activities that wait for it go on when it is set; later ones go on at once."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[Callable[[], None]] = []

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            for resume in self._waiting:
                resume()
            self._waiting.clear()

    def wait(self, resume: Callable[[], None]) -> None:
        if self.is_set:
            resume()
        else:
            self._waiting.append(resume)


class Clock:
    """`now` is in seconds since the begin of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def start(self, activity: Activity) -> None:
        """Run an activity until it first waits, and on whenever what it waits for has come."""

        def step() -> None:
            try:
                wanted = next(activity)
            except StopIteration:
                return
            if isinstance(wanted, Signal):
                wanted.wait(step)
            else:
                self.at(self.now + wanted, step)

        step()

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            self.happened += 1
            action()
        self.now = until


class Lock:
    """One holder at a time, in the order of the requests. `yield lock.take()`, and `lock.give_back()`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[Signal] = deque()
        self._held = False
        self._since = 0.0
        self.held_s = 0.0
        """Seconds for which it was held so far."""

    def take(self) -> Signal:
        turn = Signal()
        if self._held:
            self._waiting.append(turn)
        else:
            self._held, self._since = True, self._clock.now
            turn.set()
        return turn

    def give_back(self) -> None:
        self.held_s += self._clock.now - self._since
        self._since = self._clock.now
        if self._waiting:
            self._clock.at(self._clock.now, self._waiting.popleft().set)  # not here: many may wait in a row
        else:
            self._held = False
