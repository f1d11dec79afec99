"""A sample as the cache stores it: tokens, logprobs, masks, the places where its sampled text may be cut, and its node.

`read_sample` turns a worker's answer to `/generate` into a sample, if everything in it agrees; otherwise it raises
Unverified. Knows SGLang's answer format and the tokenizer; knows neither the operations of the tree nor bounds."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_OWN_BYTES = 700
_NODE_BYTES = 500
_PIECE = 2**14


@dataclass(init=False)
class Tokens:
    """Token ids, logprobs (0.0 for tokenised text), loss masks (1 sampled, 0 tokenised), in parallel. Kept as arrays:
    a text of megabytes has a million tokens, and lists of them are slow to copy."""

    ids: array[int]
    logprobs: array[float]
    mask: bytearray

    def __init__(self, ids: Sequence[int] = (), logprobs: Sequence[float] = (), mask: Sequence[int] = ()) -> None:
        self.ids = array("q", ids)
        self.logprobs = array("d", logprobs)
        self.mask = bytearray(mask)

    def __len__(self) -> int:
        return len(self.ids)

    def after(self, count: int) -> Tokens:
        """Those behind the first `count`."""
        return Tokens(self.ids[count:], self.logprobs[count:], self.mask[count:])

    def add_tokenised(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), _PIECE):  # other threads may run between two pieces
            self.ids.extend(ids[start : start + _PIECE])
        self.logprobs.frombytes(bytes(8 * len(ids)))
        self.mask += bytes(len(ids))


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

    def __init__(self, parent: Cut | None, before: Tokens, start: int, sample: Sample, version: str | None) -> None:
        self.parent = parent
        self.version = version
        self.children = 0
        self.alive = True
        self.retired = False
        self.start = start  # the character at which the sampled span begins
        self.ids = before.ids + array("q", sample.ids)
        self.logprobs = before.logprobs + array("d", sample.logprobs)
        self.mask = bytes(before.mask) + b"\1" * len(sample.ids)
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
            tokens.ids += trajectory.ids[:end]
            tokens.logprobs += trajectory.logprobs[:end]
            tokens.mask += trajectory.mask[:end]
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


STOP_TOKEN = "stop_token"
"""What some workers say for "stop" where a token ended the sample."""
_UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are not a whole character."""


class Unverified(Exception):
    """The answer does not show which tokens its text stands for."""


def is_aborted(answer: Any) -> bool:
    """Whether the worker gave the sample up."""
    return _finish(answer).get("type") == "abort"


def read_sample(answer: Any, tokenizer: Tokenizer) -> tuple[Sample, str | None]:
    """The sampled span and its weight version; None if the worker does not tell it. A version that is a number is the
    same as its text. Raises Unverified."""
    finish = _finish(answer)
    if finish.get("type") not in ("stop", "length"):
        raise Unverified("finish_reason")
    text, ids, meta = answer.get("text"), answer.get("output_ids"), answer["meta_info"]
    version = meta.get("weight_version")
    if type(version) is int:
        version = str(version)
    if not isinstance(text, str) or not (version is None or isinstance(version, str)):
        raise Unverified("text or weight_version")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise Unverified("output_ids")
    if meta.get("completion_tokens", len(ids)) != len(ids):
        raise Unverified("completion_tokens")  # a part of a sample: a stream of differences
    logprobs = _logprobs(meta.get("output_token_logprobs"), ids)
    for skipped in (False, True):
        if (sample := _spelled(text, ids, logprobs, finish, tokenizer, skipped)) is not None:
            return sample, version
    raise Unverified("text")


def _finish(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict):
        return {}
    return finish | {"type": "stop"} if finish.get("type") == STOP_TOKEN else finish


def _logprobs(entries: Any, ids: Sequence[int]) -> list[float]:
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise Unverified("output_token_logprobs")
    logprobs = []
    for entry, token in zip(entries, ids, strict=True):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise Unverified("output_token_logprobs")
        value = entry[0]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise Unverified("output_token_logprobs")
        logprobs.append(float(value))
    return logprobs


def _spelled(
    text: str, ids: list[int], logprobs: list[float], finish: dict[str, Any], tokenizer: Tokenizer, skipped: bool
) -> Sample | None:
    """The sample, if `text` is the decoded `ids` (special tokens left out if `skipped`) without a trimmed end."""
    whole = tokenizer.decode(ids, skip_special_tokens=skipped)
    if not whole.startswith(text):
        return None
    cuts = [(length, count) for length, count in _ends(ids, whole, tokenizer, skipped) if length <= len(text)]
    if whole == text and (not cuts or cuts[-1][0] < len(text)) and text:
        cuts.append((len(text), len(ids)))  # the sample ends within a character: the span is usable as a whole
    shown = next((count for length, count in cuts if length == len(text)), 0)
    aligned = shown > 0 or not text
    rest = tokenizer.decode(ids[shown:], skip_special_tokens=False) if aligned else whole[len(text) :]
    if not _may_be_trimmed(rest, ids, finish, tokenizer):
        return None
    if not aligned or not rest or _UNFINISHED in rest:
        return Sample(text, ids, logprobs, cuts)
    ends = _ends(ids[shown:], rest, tokenizer, False)
    tail = [(len(text) + length, shown + count) for length, count in ends]
    return Sample(text, ids, logprobs, cuts + tail, rest)


def _may_be_trimmed(rest: str, ids: list[int], finish: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a worker leaves `rest`, the end of the decoded tokens, out of its text."""
    if not rest.strip(_UNFINISHED):
        return True  # nothing, or the bytes of an unfinished character
    if not tokenizer.decode(tokenizer.encode(rest, add_special_tokens=False).ids, skip_special_tokens=True):
        return True  # special tokens alone
    if finish.get("type") != "stop":
        return False
    matched = finish.get("matched")
    if isinstance(matched, str):
        return bool(matched) and rest.startswith(matched)
    if type(matched) is int:
        return bool(ids) and ids[-1] == matched and rest == tokenizer.decode([matched], skip_special_tokens=False)
    return False


def _ends(ids: Sequence[int], whole: str, tokenizer: Tokenizer, skipped: bool) -> list[tuple[int, int]]:
    """(characters of `whole`, number of tokens) at the tokens after which the text is exact, ascending and distinct.
    `whole` is the text of `ids`; the list ends where the stream of texts leaves it."""
    stream, length, ends = DecodeStream(skip_special_tokens=skipped), 0, []
    for count, token in enumerate(ids, 1):
        chunk = stream.step(tokenizer, token)
        if chunk:
            if not whole.startswith(chunk, length):
                break
            length += len(chunk)
            ends.append((length, count))
    return ends
