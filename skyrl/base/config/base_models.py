"""The entries of `base_models`: what each base model of a server with several has of its own; and what a server does
with a base model (`Modes`): whether it trains, forwards samples, and runs vLLM."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from skyrl.base.config.backend import Strict
from skyrl.base.types.weights import EVERYTHING, Scope

Use = Literal["train", "sample"]
TRAIN_AND_SAMPLE: tuple[Use, ...] = ("train", "sample")
_MOST_LETTERS = 24
"""A base model's name in the names of its processes and log files has no more letters."""


class BaseModelKeys(Strict):
    """One base model of several. Its keys mean what the server's keys of these names mean, for this base model alone.
    `backend_config` is merged over the server's, key by key. A base model that is only sampled from (`uses` is
    `sample`) has no trainer; with `external_inference_url` it is somebody else's server, and skyrl runs nothing."""

    base_model: str
    served_model_names: tuple[str, ...] = ()
    uses: tuple[Use, ...] | None = None
    tokenizer_id: str | None = None
    backend_config: dict[str, Any] = Field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    adapter_dtype: Literal["float32", "bfloat16"] | None = None
    external_inference_url: str | None = None
    external_inference_api_key: str | None = None
    external_inference_priority: bool | None = None

    @field_validator("uses")
    @classmethod
    def _can_be_sampled(cls, value: tuple[Use, ...] | None) -> tuple[Use, ...] | None:
        if value is None:
            return None
        if "sample" not in value or len(set(value)) != len(value):
            raise ValueError(f'{list(value)} is neither ["train", "sample"] nor ["sample"]')
        return value

    @property
    def own(self) -> dict[str, Any]:
        """The keys that have a value, without `backend_config`."""
        return {name: value for name, value in self if value is not None and name != "backend_config"}


@dataclass(frozen=True)
class BaseModelSlot:
    """Which of a server's base models a configuration is of.

    `number` counts from 0 in the order of `base_models`. `name` is short, unique in the server, and made of lower-case
    letters, digits, dots and dashes: the end of the names of this base model's processes. It is empty if the server has
    one base model. `state_keys`: under which keys the row of the table engine_state stands; the engine writes it under
    the first.

    `scope`: the rows and files that the engine looks after. `own`: those of this base model alone, which its trainer
    and its vLLMs may load. The first base model that trains also looks after what is of no base model any more."""

    number: int = 0
    name: str = ""
    state_keys: tuple[str, ...] = ("",)
    scope: Scope = EVERYTHING
    own: Scope = EVERYTHING

    @property
    def labels(self) -> dict[str, str]:
        """The labels of this base model's metrics: none if the server has one base model. The label is the first name
        that clients know, or `name` if that is a path: paths stay on the server."""
        first = self.state_keys[0]
        return {"base_model": self.name if is_path(first) else first} if self.name else {}

    def process(self, kind: str) -> str:
        """The name of this base model's process of a kind: `engine`, or `engine-qwen3-4b`."""
        return f"{kind}-{self.name}" if self.name else kind


def is_path(served_name: str) -> bool:
    """Whether a base model's name is a path of this machine, and none of the model hub."""
    return served_name.startswith(("/", "~", "."))


def short_name(served_name: str, taken: Collection[str]) -> str:
    """The `name` of a role, from the last part of a served name."""
    last = served_name.rstrip("/").rpartition("/")[2].lower()
    wanted = re.sub(r"[^a-z0-9.]+", "-", last)[:_MOST_LETTERS].strip("-.") or "model"
    name, count = wanted, 2
    while name in taken:
        name, count = f"{wanted}-{count}", count + 1
    return name


@dataclass(frozen=True)
class Modes:
    """`trains`: the server has an engine with a training backend. A gateway has none.

    `forwards`: API processes send samples to the inference server. Otherwise (`colocate_all`) trainer and vLLM share
    one device, samples are commands, and the engine runs them between two turns of training.

    `manages_inference`: this server starts vLLM itself, watches it and stops it.

    `shares_inference`: a gateway that samples from the vLLMs of the server that trains on the same database.
    """

    trains: bool
    forwards: bool
    manages_inference: bool
    shares_inference: bool = False

    @property
    def own_inference(self) -> bool:
        """Whether the vLLMs are skyrl's, of this server or of the one that trains."""
        return self.manages_inference or self.shares_inference
