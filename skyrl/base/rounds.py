"""Goes through many things a part at a time, again and again: a sweep of 100,000 directories in one piece would keep
the other threads of its process waiting for seconds.

Knows nothing of the things. Not safe for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Rounds(Generic[T]):
    """`things` begins a round: it returns all things, preferably as a generator that looks for them when they are asked
    for."""

    def __init__(self, things: Callable[[], Iterable[T]]) -> None:
        self._things = things
        self._left: Iterator[T] | None = None

    @property
    def is_amid(self) -> bool:
        """Whether the last call of `take` may have left things of its round."""
        return self._left is not None

    def take(self, most: int) -> list[T]:
        """The next `most` things of the round; fewer at its end. The call after the end begins the next round. Empty
        only if a whole round has nothing."""
        began = self._left is None
        taken = self._some(most)
        return taken if taken or began else self._some(most)

    def _some(self, most: int) -> list[T]:
        self._left = iter(self._things()) if self._left is None else self._left
        taken = list(islice(self._left, most))
        if len(taken) < most:
            self._left = None
        return taken
