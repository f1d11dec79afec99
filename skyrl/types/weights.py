"""What a sampler samples from: the base model, one version of an adapter, or one version of the full weights.

A `WeightsRef` names weights; it holds no files and no path. Text form, which the database keeps: `base`,
`adapter:<name>`, `full:<version>`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The base model, as it was loaded."""

    def __str__(self) -> str:
        return "base"


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of an adapter. A version never changes. `name` is what the inference servers know it by."""

    name: str

    def __str__(self) -> str:
        return f"adapter:{self.name}"


@dataclass(frozen=True, slots=True)
class FullWeights:
    """One version of the full weights, in place of the base model."""

    version: str

    def __str__(self) -> str:
        return f"full:{self.version}"


WeightsRef = BaseWeights | AdapterVersion | FullWeights


def parse_weights(text: str) -> WeightsRef:
    """The reference that `str` wrote. Raises ValueError for another text."""
    kind, _, name = text.partition(":")
    if text == "base":
        return BaseWeights()
    if kind == "adapter" and name:
        return AdapterVersion(name)
    if kind == "full" and name:
        return FullWeights(name)
    raise ValueError(f"{text!r} names no weights")
