"""An adapter without its update of lm_head, for programs that load none (vLLM without skyrl's plugin, for models such
as Qwen2.5). What is left out is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.merging.adapter_files import new_directory, read_json, read_updates
from skyrl.training.backends.torch_lora.projections import UNEMBED
from skyrl.training.backends.torch_lora.state import PEFT_JSON, PEFT_TENSORS


@dataclass(frozen=True)
class LeftOut:
    """`layers` are those that are kept. `rank` and Frobenius' `norm` are of the update that is left out."""

    layers: int
    rank: int
    norm: float


def is_head(layer: str) -> bool:
    return layer.rsplit(".", 1)[-1] in UNEMBED


def leave_head_out(directory: Path, out: Path) -> LeftOut:
    """Write the adapter of `directory` to `out`, a new or empty directory. Raises ConfigError if it has no lm_head, or
    nothing else; OSError or SafetensorError when its files are missing or damaged."""
    described, updates = read_json(directory), read_updates(directory)
    heads = [layer for layer in updates if is_head(layer)]
    if not heads:
        raise ConfigError(f"{directory} has no update of lm_head: nothing is to be left out")
    if len(heads) == len(updates):
        raise ConfigError(f"{directory} has an update of lm_head alone: nothing would be left")
    new_directory(out)
    dropped = tuple(f"base_model.model.{layer}." for layer in heads)
    kept = {name: each for name, each in load_file(directory / PEFT_TENSORS).items() if not name.startswith(dropped)}
    save_file(kept, out / PEFT_TENSORS, metadata={"format": "pt"})
    described["target_modules"] = [name for name in described["target_modules"] if not is_head(name)]
    (out / PEFT_JSON).write_text(json.dumps(described, indent=2) + "\n")
    head = updates[heads[0]]
    return LeftOut(len(updates) - len(heads), head.rank, head.norm)
