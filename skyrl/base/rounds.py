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
        self._ahead: list[T] = []
        """The next thing of the round that runs: it tells that the last call was not the end."""

    @property
    def is_amid(self) -> bool:
        """Whether the last call of `take` has left things of its round."""
        return bool(self._ahead)

    def take(self, most: int) -> list[T]:
        """The next `most` things of the round, at least one; fewer at its end. The call after the end begins the next
        round. Empty only if a whole round has nothing."""
        if self._left is None or not self._ahead:
            self._left = iter(self._things())
        taken = self._ahead + list(islice(self._left, most - len(self._ahead)))
        self._ahead = list(islice(self._left, 1))
        return taken
