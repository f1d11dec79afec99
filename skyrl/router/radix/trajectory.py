"""A sample as the cache stores it: tokens, logprobs, masks, and the places where its sampled text may be cut.

This module knows neither the tree nor bounds.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl.router.radix.tree import Node

_OWN_BYTES = 700


@dataclass
class Tokens:
    """Parallel lists: token ids, logprobs (0.0 for tokenised text), loss masks (1 sampled, 0 tokenised)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)

    def add_tokenised(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [1] * len(ids)


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

    def __init__(self, parent: Cut | None, before: Tokens, start: int, sample: Sample, version: str, number: int):
        self.parent = parent
        self.version = version
        self.number = number
        self.children = 0
        self.alive = True
        self.retired = False
        self.start = start  # the character at which the sampled span begins
        self.ids = array("q", [*before.ids, *sample.ids])
        self.logprobs = array("d", [*before.logprobs, *sample.logprobs])
        self.mask = bytes([*before.mask, *[1] * len(sample.ids)])
        self.positions = array("q", [start + characters for characters, _ in sample.cuts])
        self.counts = array("q", [len(before.ids) + tokens for _, tokens in sample.cuts])
        self.end: Node | None = None  # the last node of its path, which ends where text + tail end
        self.final: Node | None = None  # the node that ends where its text ends
        self.size = _OWN_BYTES + 17 * len(self.ids) + 120 * len(self.positions) + sys.getsizeof(version)

    def count_at(self, position: int) -> int:
        return self.counts[bisect_left(self.positions, position)]

    def tokens(self, count: int | None = None) -> Tokens:
        """The tokens of the whole trajectory, or up to `count` own ones."""
        parts: list[tuple[Trajectory, int]] = []
        trajectory, end = self, len(self.ids) if count is None else count
        while True:
            parts.append((trajectory, end))
            if trajectory.parent is None:
                break
            trajectory, end = trajectory.parent.trajectory, trajectory.parent.count
        tokens = Tokens()
        for trajectory, end in reversed(parts):
            tokens.ids += trajectory.ids[:end]
            tokens.logprobs += trajectory.logprobs[:end]
            tokens.mask += trajectory.mask[:end]
        return tokens
