"""Whether the sampler computes what the trainer computes, judged by logprobs of the same tokens.

Knows arrays. Knows nothing of models, servers or adapters' files. Medians, because single positions may differ much
where nothing is wrong: rounding decides which of two nearly equal experts a router chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]
"""One for each token of the probe but the first."""

BASE_PART, BASE_FLOOR = 0.5, 0.02
"""How far the base model's logprobs may be apart, as a part of how much they vary over tokens; and in nats."""
NOISE_FACTOR, LEAST_PART, LARGEST_PART = 5.0, 0.25, 0.75
"""How far two changes may be apart: five times what the base model's logprobs are apart, but at least and at most these
parts of the trainer's change. A sampler that ignores an adapter is apart by the whole change, one that adds something
unrelated by more."""
DECIDING_FACTOR = 3.0
"""A change below so many times the base model's difference proves nothing."""
IGNORED_PART = 0.05
"""Only in words: a sampler's change below this part of the trainer's is called none."""


def size(values: npt.NDArray[np.floating]) -> float:
    """The median of the absolute values."""
    return float(np.median(np.abs(values)))


@dataclass(frozen=True)
class BaseAgreement:
    """The base model's logprobs in both. `difference` and `allowed` are medians over tokens, in nats."""

    difference: float
    largest: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed  # False for NaN


def compare_base(trainer: Logprobs, sampler: Logprobs) -> BaseAgreement:
    apart = sampler - trainer
    allowed = max(BASE_PART * size(trainer - np.median(trainer)), BASE_FLOOR)
    return BaseAgreement(size(apart), float(np.max(np.abs(apart))), allowed)


def compare_seen(trainer: Logprobs, sampler: Logprobs, base: BaseAgreement) -> BaseAgreement:
    """The base model's logprobs of the text behind a picture. They may be apart by a few times what those of text alone
    are apart: a picture changes logprobs less than other weights do."""
    apart = sampler - trainer
    allowed = max(NOISE_FACTOR * base.difference, BASE_FLOOR)
    return BaseAgreement(size(apart), float(np.max(np.abs(apart))), allowed)


@dataclass(frozen=True)
class ChangeAgreement:
    """What an adapter changes in both: medians over tokens of the absolute changes, and of their difference."""

    in_trainer: float
    in_sampler: float
    difference: float
    allowed: float
    decides: bool
    """Whether the trainer's change is far enough above the base model's difference to prove something."""

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed  # False for NaN

    @property
    def is_ignored(self) -> bool:
        """Whether the sampler does as if there were no adapter, up to rounding."""
        return self.in_sampler <= IGNORED_PART * self.in_trainer

    @property
    def part(self) -> float:
        """How much of the change is the same: 1 if all is, 0 for an adapter that is ignored."""
        return 1 - self.difference / self.in_trainer if self.in_trainer else 1.0


def compare_change(
    trainer_base: Logprobs, trainer: Logprobs, sampler_base: Logprobs, sampler: Logprobs
) -> ChangeAgreement:
    """`trainer` and `sampler` are the logprobs with the adapter."""
    noise = size(sampler_base - trainer_base)
    expected, got = trainer - trainer_base, sampler - sampler_base
    change = size(expected)
    allowed = min(max(NOISE_FACTOR * noise, LEAST_PART * change), LARGEST_PART * change)
    return ChangeAgreement(change, size(got), size(got - expected), allowed, change > DECIDING_FACTOR * noise)
