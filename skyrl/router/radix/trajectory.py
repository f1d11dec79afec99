"""A sample as the cache stores it: tokens, logprobs, masks, the places where its sampled text may be cut, and its node.

Knows neither the operations of the tree nor bounds.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_OWN_BYTES = 700
_NODE_BYTES = 500
_PIECE = 2**14


@dataclass(init=False)
class Tokens:
    """Token ids, logprobs (0.0 for tokenised text), loss masks (1 sampled, 0 tokenised), in parallel. Kept as arrays:
    a text of megabytes has a million tokens, and lists of them are slow to copy."""

    id_array: array[int]
    logprob_array: array[float]
    mask_bytes: bytearray

    def __init__(self, ids: Sequence[int] = (), logprobs: Sequence[float] = (), mask: Sequence[int] = ()) -> None:
        self.id_array = array("q", ids)
        self.logprob_array = array("d", logprobs)
        self.mask_bytes = bytearray(mask)

    def __len__(self) -> int:
        return len(self.id_array)

    @property
    def ids(self) -> list[int]:
        return self.id_array.tolist()

    @property
    def logprobs(self) -> list[float]:
        return self.logprob_array.tolist()

    @property
    def mask(self) -> list[int]:
        return list(self.mask_bytes)

    def after(self, count: int) -> Tokens:
        """Those behind the first `count`."""
        return Tokens(self.id_array[count:], self.logprob_array[count:], self.mask_bytes[count:])

    def add_tokenised(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), _PIECE):  # other threads may run between two pieces
            self.id_array.extend(ids[start : start + _PIECE])
        self.logprob_array.frombytes(bytes(8 * len(ids)))
        self.mask_bytes += bytes(len(ids))

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.id_array.extend(ids)
        self.logprob_array.extend(logprobs)
        self.mask_bytes += b"\1" * len(ids)


@dataclass(frozen=True)
class Sample:
    """One sampled span. `cuts` are (characters, tokens) from the beginning of the span, ascending in both: the first
    `tokens` tokens decode to exactly the first `characters` characters of `text` + `tail`. `text` is what the worker
    answered. `tail` is the text of trailing tokens that the worker trimmed (an end token, a stop string); it is empty
    where it cannot be matched with text."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    cuts: Sequence[tuple[int, int]]
    tail: str = ""


@dataclass(frozen=True)
class Cut:
    """The first `count` of the own tokens of `trajectory`, and all before them. They stand for
    `position` characters."""

    trajectory: Trajectory
    count: int
    position: int


class Trajectory:
    """A stored sample. It owns the tokens after `parent`, which is a cut of the trajectory that it continues. Its own
    tokens are tokenised text (or a copy of what it continues, when that is gone) and then one sampled span."""

    def __init__(
        self, parent: Cut | None, before: Tokens, start: int, sample: Sample, version: str | None, number: int
    ):
        self.parent = parent
        self.version = version
        self.number = number
        self.children = 0
        self.alive = True
        self.retired = False
        self.start = start  # the character at which the sampled span begins
        self.ids = before.id_array + array("q", sample.ids)
        self.logprobs = before.logprob_array + array("d", sample.logprobs)
        self.mask = bytes(before.mask_bytes) + b"\1" * len(sample.ids)
        self.positions = array("q", [start + characters for characters, _ in sample.cuts])
        self.counts = array("q", [len(before) + tokens for _, tokens in sample.cuts])
        self.end: Node | None = None  # the last node of its path, which ends where text + tail end
        self.final: Node | None = None  # the node that ends where its text ends
        self.size = _OWN_BYTES + 17 * len(self.ids) + 120 * len(self.positions) + sys.getsizeof(version)

    @property
    def count(self) -> int:
        """The number of tokens of the whole trajectory."""
        count, cut = len(self.ids), self.parent
        while cut is not None:
            count += cut.count
            cut = cut.trajectory.parent
        return count

    def count_at(self, position: int) -> int:
        return self.counts[bisect_left(self.positions, position)]

    def tokens(self, count: int | None = None) -> Tokens:
        """The tokens of the whole trajectory, or up to `count` own ones. Any thread may ask: they never change."""
        parts: list[tuple[Trajectory, int]] = []
        trajectory, end = self, len(self.ids) if count is None else count
        while True:
            parts.append((trajectory, end))
            if trajectory.parent is None:
                break
            trajectory, end = trajectory.parent.trajectory, trajectory.parent.count
        tokens = Tokens()
        for trajectory, end in reversed(parts):
            tokens.id_array += trajectory.ids[:end]
            tokens.logprob_array += trajectory.logprobs[:end]
            tokens.mask_bytes += trajectory.mask[:end]
        return tokens


class Node:
    """The text from character `start` to `end` of all texts that run through it. `marks` are the cuts within (start,
    end]: a trajectory, or several in the order in which they were stored. `finals` are the trajectories whose text
    ends at `end`; `pins` counts the trajectories that begin or end their span here, and keeps the node whole."""

    __slots__ = ("children", "edge", "finals", "marks", "parent", "pins", "start")

    def __init__(self, parent: Node | None, start: int, edge: str) -> None:
        self.parent = parent
        self.start = start
        self.edge = edge
        self.children: dict[str, Node] = {}
        self.marks: dict[int, Trajectory | dict[Trajectory, None]] = {}
        self.finals: dict[Trajectory, None] = {}
        self.pins = 0

    @property
    def end(self) -> int:
        return self.start + len(self.edge)

    @property
    def bytes(self) -> int:
        return _NODE_BYTES + sys.getsizeof(self.edge)
