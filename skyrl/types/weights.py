"""Names of the weights to sample from: the base model, one version of an adapter, or one version of the full weights.

A `WeightsRef` holds neither files nor a path. The database stores its text: `base`, `adapter:<name>` or
`full:<version>`.
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
    """One version of an adapter. A version never changes. `name` is its name on inference servers:
    `<model_id>@<number>`."""

    name: str

    @classmethod
    def of(cls, model_id: str, number: int) -> AdapterVersion:
        """The first version of a model has number 1."""
        return cls(f"{model_id}@{number}")

    @property
    def model_id(self) -> str:
        return self.name.rpartition("@")[0]

    @property
    def number(self) -> int:
        """Raises ValueError when the name does not end with a number."""
        return int(self.name.rpartition("@")[2])

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
    """The reverse of `str`. Raises ValueError for any other text."""
    if text == "base":
        return BaseWeights()
    kind, _, name = text.partition(":")
    if kind == "adapter" and name:
        return AdapterVersion(name)
    if kind == "full" and name:
        return FullWeights(name)
    raise ValueError(f"{text!r} is no reference to weights; expected base, adapter:<name> or full:<version>")
