"""What the trainer says of a base model: which layers the SDK's flags train, and whether it replays routed experts."""

from __future__ import annotations

import re
from typing import Any

from skyrl.base.adapter_files import with_flags
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

_FLAGS = ("train_attn", "train_mlp")
_PLACE = re.compile(r"^.*\blayers\.\d+\.\w+\.")
"""Of a layer's projection: the decoder layer, and its attention or MLP."""


def facts_of(backend: LoraBackend) -> dict[str, Any]:
    """`adapted`: the layers' names behind their place, by flag, in the order of the model. `replay`: whether data may
    name routed experts."""
    adapted = {flag: _names(backend, flag) for flag in _FLAGS}
    return {"adapted": adapted, "replay": backend.limits.mixture is not None}


def _names(backend: LoraBackend, flag: str) -> list[str]:
    backend.create_model(flag, with_flags(LoraSpec(rank=1, alpha=1.0, seed=0), [flag]))
    return list(dict.fromkeys(_PLACE.sub("", target.name) for target in rank_of(backend).adapters[flag].targets))
