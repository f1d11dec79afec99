"""The batches of `benchmarks.trainer`: which passes a row has, and their random tokens.

Knows lengths and losses. Knows nothing of models or of how a batch is trained.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl.trainer.protocol import Datum

RANK = 8
MIXED_RANKS = (4, 8, 16, 32)


@dataclass(frozen=True)
class TenantPass:
    """What one tenant trains in a step: a pass over `data` with an adapter of this rank, then an optimizer step. The
    data come in `requests` of about the same size, each a pass of its own."""

    rank: int
    loss_fn: str
    data: list[Datum]
    requests: int = 1

    @property
    def parts(self) -> list[list[Datum]]:
        """The data of each request."""
        ends = [len(self.data) * number // self.requests for number in range(self.requests + 1)]
        return [self.data[first:last] for first, last in itertools.pairwise(ends)]

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True)
class Shape:
    """A batch of one tenant: `groups` prompts with `samples` answers each. Lengths are drawn from ranges, both ends
    included. Answers have advantages, but those of the first `even` groups 0; without a prompt, all tokens have weight
    1."""

    groups: int
    samples: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    even: int = 0

    @property
    def loss_fn(self) -> str:
        return "importance_sampling" if self.prompt[1] else "cross_entropy"

    def data(self, vocabulary: int, seed: int) -> list[Datum]:
        rng = np.random.default_rng(seed)
        found: list[Datum] = []
        for group in range(self.groups):
            prompt = rng.integers(0, vocabulary, rng.integers(*self.prompt, endpoint=True))
            for _ in range(self.samples):
                answer = rng.integers(0, vocabulary, rng.integers(*self.answer, endpoint=True))
                if self.prompt[1]:
                    advantage = rng.normal() if group >= self.even else 0.0
                    found.append(_sampled(rng, prompt, answer, vocabulary, advantage))
                else:
                    weights = np.ones(len(answer), np.float32)
                    targets = np.append(answer[1:], answer[0])
                    found.append(Datum(answer, {"target_tokens": targets, "weights": weights}))
        return found


def _sampled(
    rng: np.random.Generator, prompt: np.ndarray, answer: np.ndarray, vocabulary: int, advantage: float
) -> Datum:
    """A sampled sequence: the advantage of the answer's tokens, and logprobs near those of a random model."""
    text = np.concatenate([prompt, answer])
    is_answer = np.arange(1, len(text)) >= len(prompt)
    logprobs = np.where(is_answer, -np.log(vocabulary) + 0.1 * rng.normal(size=len(text) - 1), 0)
    advantages = np.where(is_answer, advantage, 0)
    return Datum(
        text[:-1],
        {
            "target_tokens": text[1:],
            "logprobs": logprobs.astype(np.float32),
            "advantages": advantages.astype(np.float32),
        },
    )


@dataclass(frozen=True)
class BatchRow:
    """A row of the table: one pass of this shape for each of `ranks`, sent in so many `requests`. With `redrawn` each
    step has another batch of the shape, the same in all ways: then what a new shape of tensors costs shows."""

    name: str
    what: str
    shape: Shape
    ranks: tuple[int, ...] = (RANK,)
    requests: int = 1
    redrawn: bool = False

    @property
    def merges(self) -> bool:
        """Whether there are several passes that may run together."""
        return len(self.ranks) > 1 or self.requests > 1

    def passes(self, vocabulary: int, step: int = 0) -> list[TenantPass]:
        """Of step number `step`, from 0."""
        seed = zlib.crc32(self.name.encode()) + (step * len(self.ranks) if self.redrawn else 0)
        return [
            TenantPass(rank, self.shape.loss_fn, self.shape.data(vocabulary, seed + number), self.requests)
            for number, rank in enumerate(self.ranks)
        ]


def _uniform(sequences: int, tokens: int) -> BatchRow:
    shape = Shape(1, sequences, (0, 0), (tokens, tokens))
    return BatchRow(f"uniform-{sequences}x{tokens}", f"{sequences} × {tokens}", shape)


def _groups(name: str, groups: int, samples: int, prompt: tuple[int, int], answer: tuple[int, int]) -> BatchRow:
    lengths = ", ".join(f"{what} {_range(ends)}" for what, ends in (("prompt", prompt), ("answers", answer)))
    return BatchRow(name, f"{groups} groups × {samples}, {lengths}", Shape(groups, samples, prompt, answer))


def _tenants(sequences: int, tokens: int) -> BatchRow:
    ranks = "/".join(map(str, MIXED_RANKS))
    what = f"4 tenants of ranks {ranks}, each {sequences} × {tokens}"
    shape = Shape(1, sequences, (0, 0), (tokens, tokens))
    return BatchRow(f"tenants-{sequences * tokens}", what, shape, MIXED_RANKS)


def _long(tokens: int) -> BatchRow:
    answer = tokens // 4
    shape = Shape(1, 1, (tokens - answer + 1, tokens - answer + 1), (answer, answer))
    return BatchRow(f"long-{tokens}", f"1 × {tokens:,}, answer {answer:,}", shape)


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}"


_GRPO = _groups("grpo-4x16", 4, 16, (512, 512), (32, 64))
_MIXED = _groups("grpo-mixed", 8, 8, (256, 1024), (32, 256))
FULL = (
    _uniform(8, 128),
    _uniform(32, 256),
    _groups("grpo-8x8", 8, 8, (256, 256), (32, 64)),
    _GRPO,
    replace(_GRPO, name="grpo-4x16-in-6", what=f"{_GRPO.what}, 6 requests", requests=6),
    _MIXED,
    replace(_MIXED, name="grpo-new", what=f"{_MIXED.what}, a new batch at each step", redrawn=True),
    _long(8192),
    _tenants(1, 16),
    _tenants(2, 32),
    _tenants(4, 64),
    _tenants(8, 128),
)
LONG = (_long(16_384), _long(32_768))
"""Only if they are asked for by name, and with a model whose context they fit."""
EIGHT = BatchRow("tenants-8", f"8 tenants of rank {RANK}, each 4 × 256", Shape(1, 4, (0, 0), (256, 256)), (RANK,) * 8)
OF_GPU = (_uniform(8, 2048), EIGHT)
"""Only if they are asked for by name: what a GPU is measured by beside 32 × 256 tokens of one tenant."""
_SHORT = _groups("", 8, 8, (45, 45), (10, 10))
EVEN = tuple(
    replace(
        _SHORT,
        name=f"even-{even}",
        what=f"{_SHORT.what}, {even} groups without advantage",
        shape=replace(_SHORT.shape, even=even),
    )
    for even in (1, 4, 7, 8)
)
"""Only if they are asked for by name: for the ways skyrl and skyrl-whole."""
SMALL = (
    _uniform(2, 64),
    _groups("grpo-1x8", 1, 8, (128, 128), (8, 16)),
    _tenants(1, 16),
)
"""Batches of the same kinds for a model with 0.6 billion parameters on a CPU, where a row should end in a minute."""


def rows_of(model: str, names: Sequence[str] | None, *, cuda: bool) -> list[BatchRow]:
    """Those of these names; without names, all that suit the model."""
    rows = SMALL if model == "0.6b" and not cuda else FULL
    return [*rows] if names is None else [row for row in (*rows, *LONG, *OF_GPU, *EVEN) if row.name in names]


def tokens_of(passes: Iterable[TenantPass]) -> int:
    return sum(each.tokens for each in passes)
