"""What the rows of a base model name: the weights to sample from (the base model, one version of an adapter, or one
version of the full weights), what of a model is trained, and the engine that looks after a row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from skyrl.base.wire.rank_pattern import RankPattern

STORE_SCHEME = "skyrl-store:"
"""Begins a reference to files in the checkpoint store, in place of a directory. A reference never gets other files."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The base model, as it was loaded."""

    def __str__(self) -> str:
        return "base"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model's weights. A committed version never changes. `name` is its name on inference servers:
    `<model_id>@<number>`."""

    name: str

    @classmethod
    def of(cls, model_id: str, number: int) -> Self:
        """The first version of a model has number 1."""
        return cls(f"{model_id}@{number}")

    @property
    def model_id(self) -> str:
        return self.name.rpartition("@")[0]

    @property
    def number(self) -> int:
        """Raises ValueError when the name does not end with a number."""
        return int(self.name.rpartition("@")[2])


class AdapterVersion(ModelVersion):
    """One version of an adapter."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"adapter:{self.name}"


class FullWeights(ModelVersion):
    """One version of the full weights, in place of the base model."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"full:{self.name}"


WeightsRef = BaseWeights | AdapterVersion | FullWeights

FIRST_VERSION = "default"
"""SGLang's and vLLM's name of the weights that a server starts with."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_COUNTED = re.compile(r"(.*)\+([0-9]{1,18})", re.DOTALL)


def next_version(version: str) -> str:
    """The version of weights that an update without a name has put in the place of `version`. A number goes up by one,
    `default` becomes 1. Any other name belongs to a trainer, and is not changed: it gets +1, and +2 after the next
    update."""
    if version == FIRST_VERSION:
        return "1"
    if _NUMBER.fullmatch(version):
        return str(int(version) + 1)
    counted = _COUNTED.fullmatch(version)
    return f"{version}+1" if counted is None else f"{counted[1]}+{int(counted[2]) + 1}"


def served_version(weights: WeightsRef) -> str:
    """How a server whose weights are replaced names the version of these weights. Raises ValueError for adapters, which
    change no server's version."""
    match weights:
        case BaseWeights():
            return FIRST_VERSION
        case FullWeights(version):
            return version
        case AdapterVersion(name):
            raise ValueError(f"adapter {name} is no version of a server's weights")


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


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The shape of a LoRA adapter. A client chooses it when it creates a model, and each checkpoint records it.

    `alpha / rank` scales the adapter's update. `seed` fixes the first values of lora_A; lora_B starts at 0. The three
    flags say which parts of the base model the adapter changes. Layers of the `rank_pattern` have another rank, and are
    scaled by it. Rank 0 is full fine-tuning: all parameters are trained. `value_head`: the adapter also has a critic's
    value head, which samplers never see.
    """

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    rank_pattern: RankPattern = ()
    value_head: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the whole model is trained, and no adapter."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of base models whose rows an engine looks after: those in `within`; if it is None, all names but those
    in `without`, also names that the server does not serve any more.

    Each training base model of a server has its scope, and each name is in exactly one."""

    within: frozenset[str] | None = None
    without: frozenset[str] = frozenset()

    def __contains__(self, base_model: str) -> bool:
        return base_model in self.within if self.within is not None else base_model not in self.without

    @property
    def has_rest(self) -> bool:
        """Whether names that the server does not serve are in the scope. One engine of a server has them."""
        return self.within is None

    @property
    def is_everything(self) -> bool:
        """Whether this is the scope of a server's only engine."""
        return self.within is None and not self.without


EVERYTHING = Scope()
