"""An adapter's files: which update of which layer they hold.

Knows PEFT's format. Knows nothing of base models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.torch_lora.state import PEFT_JSON, PEFT_TENSORS

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
_UNKNOWN = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters")


@dataclass(frozen=True)
class Update:
    """What an adapter adds to the weight of a linear layer: `scale` * B A. a: float32 [rank, inputs], b: float32
    [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs], that of the layer's weight."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def norm(self) -> float:
        """Frobenius' norm of the update."""
        return self.scale * math.sqrt(max(0.0, float(((self.b.T @ self.b) * (self.a @ self.a.T)).sum())))

    def rows(self, first: int, last: int) -> Tensor:
        """Rows of the update, float32 [last - first, inputs]."""
        return (self.b[first:last] @ self.a) * self.scale


def read_json(directory: Path) -> dict[str, Any]:
    """adapter_config.json. Raises ConfigError if there is none that can be read."""
    try:
        described = json.loads((directory / PEFT_JSON).read_text())
    except OSError as error:
        raise ConfigError(f"{directory} has no {PEFT_JSON}: unpack the archive of the adapter there") from error
    except ValueError as error:
        raise ConfigError(f"{directory / PEFT_JSON} is no JSON: {error}") from error
    if not isinstance(described, dict) or described.get("peft_type") != "LORA":
        raise ConfigError(f"{directory / PEFT_JSON} describes no LoRA adapter")
    return described


def read_updates(directory: Path) -> dict[str, Update]:
    """The updates of an adapter, by the names of the layers. Raises ConfigError for an adapter with more than updates
    of linear layers; OSError or SafetensorError when its files are missing or damaged."""
    described = read_json(directory)
    if given := [key for key in _UNKNOWN if described.get(key)]:
        more = ": adapters on experts cannot be merged here" if given[0] == "target_parameters" else ""
        raise ConfigError(f"{directory / PEFT_JSON} has {given[0]}, which is not known here{more}")
    if described.get("bias", "none") != "none":
        raise ConfigError(f"{directory / PEFT_JSON} has bias, which is not known here")
    try:
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{directory / PEFT_JSON} has no numbers r and lora_alpha") from error
    if rank < 1:
        raise ConfigError(f"{directory / PEFT_JSON} has r {rank}")
    scale = alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)
    matrices: dict[str, dict[str, Tensor]] = {}
    for layer, which, matrix in _matrices(directory):
        matrices.setdefault(layer, {})[which] = matrix
    for layer, pair in matrices.items():
        if len(pair) < 2:
            raise ConfigError(f"{directory / PEFT_TENSORS} holds one matrix of {layer}, and the other is missing")
        if pair["A"].shape[0] != rank or pair["B"].shape[1] != rank:
            raise ConfigError(f"{directory / PEFT_TENSORS} holds matrices of {layer} that are not of rank {rank}")
    return {layer: Update(pair["A"], pair["B"], scale) for layer, pair in matrices.items()}


def _matrices(directory: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Each matrix, in float32, with its layer and which of the two it is."""
    for name, tensor in load_file(directory / PEFT_TENSORS).items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise ConfigError(f"{directory / PEFT_TENSORS} holds {name}, which is no update of a linear layer")
        if _EXPERTS.search(found[1]):
            raise ConfigError(f"{directory}: {found[1]}: adapters on experts cannot be merged here")
        yield found[1], found[2], tensor.to(torch.float32)


def new_directory(out: Path) -> None:
    """Make a directory. Raises ConfigError if it holds files; OSError."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty")
    out.mkdir(parents=True, exist_ok=True)
