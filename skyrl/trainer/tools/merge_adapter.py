"""The process of `skyrl adapter`: an adapter merged into its base model, or without its lm_head.

Arguments: `merge MODEL ADAPTER OUT [DTYPE]` or `without-lm-head ADAPTER OUT`. Ends with 2 and one sentence when it
cannot.

Merging writes a base model with the adapter's updates in its weights, as files that transformers and vLLM load alone. A
base model may tie lm_head to the embeddings: one tensor for both. An update of lm_head is none of the embeddings, so
the two become different tensors, and config.json says so. Reads and writes some rows at a time.

An adapter without its lm_head is for programs that load none (vLLM without skyrl's plugin, for models such as Qwen2.5).
What is left out is told. Knows PEFT's format and files. Knows nothing of how a model computes.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS
from skyrl.base.config.server import ConfigError
from skyrl.base.model_files import json_of
from skyrl.trainer.files.config import read_config
from skyrl.trainer.files.model_files import Rows, bytes_of, files_beside_weights, stored_parameters
from skyrl.trainer.files.tensor_files import (
    PLAIN,
    StoredWeights,
    TensorFiles,
    check_new,
    row_parts,
    sharded_files,
    weight_files,
)
from skyrl.trainer.lora.rank_pattern import ranks_of, without_layer
from skyrl.trainer.model.loading import check_weights, class_of, detach_vision, model_class
from skyrl.trainer.model.packed_model import UNEMBED

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
_UNKNOWN = ("use_dora", "fan_in_fan_out", "modules_to_save", "alpha_pattern", "target_parameters")


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
    matrices: dict[str, dict[str, Tensor]] = {}
    for layer, which, matrix in _matrices(directory):
        matrices.setdefault(layer, {})[which] = matrix
    try:
        ranks = ranks_of(rank, tuple((described.get("rank_pattern") or {}).items()), [*matrices])
    except (AttributeError, TypeError, re.error) as error:
        raise ConfigError(f"{directory / PEFT_JSON} has a rank_pattern that cannot be used: {error}") from error
    updates: dict[str, Update] = {}
    for (layer, pair), own in zip(matrices.items(), ranks, strict=True):
        if len(pair) < 2:
            raise ConfigError(f"{directory / PEFT_TENSORS} holds one matrix of {layer}, and the other is missing")
        if pair["A"].shape[0] != own or pair["B"].shape[1] != own:
            raise ConfigError(f"{directory / PEFT_TENSORS} holds matrices of {layer} that are not of rank {own}")
        updates[layer] = Update(pair["A"], pair["B"], alpha / (math.sqrt(own) if described.get("use_rslora") else own))
    return updates


def _matrices(directory: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Each matrix, in float32, with its layer and which of the two it is."""
    for name, tensor in load_file(directory / PEFT_TENSORS).items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise ConfigError(f"{directory / PEFT_TENSORS} holds {name}, which is no update of a linear layer")
        if _EXPERTS.search(found[1]):
            raise ConfigError(f"{directory}: {found[1]}: adapters on experts cannot be merged here")
        yield found[1], found[2], tensor.to(torch.float32)


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
    check_new(out)
    out.mkdir(parents=True, exist_ok=True)
    dropped = tuple(f"base_model.model.{layer}." for layer in heads)
    kept = {name: each for name, each in load_file(directory / PEFT_TENSORS).items() if not name.startswith(dropped)}
    save_file(kept, out / PEFT_TENSORS, metadata={"format": "pt"})
    described["target_modules"] = sorted({layer.rpartition(".")[2] for layer in updates if not is_head(layer)})
    if pattern := described.get("rank_pattern"):
        layers = [layer for layer in updates if not is_head(layer)]
        unused = without_layer(tuple(pattern.items()), layers)
        described["rank_pattern"] = {each: rank for each, rank in pattern.items() if each not in unused}
    (out / PEFT_JSON).write_text(json.dumps(described, indent=2) + "\n")
    head = updates[heads[0]]
    return LeftOut(len(updates) - len(heads), head.rank, head.norm)


SHARD = "4GB"


@dataclass(frozen=True)
class Merged:
    """`layers`: how many have updates. `untied`: the name of the output layer's tensor if the base model has none of
    its own, and `more_bytes` what it takes."""

    layers: int
    untied: str | None
    more_bytes: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be written: the files' tensor `source`, with rows of an update from `first` on."""

    source: str
    update: Update | None = None
    first: int = 0


def merge(path: str, adapter: Path, out: Path, dtype: torch.dtype | None = None) -> Merged:
    """Write the model at `path`, a directory or a name of the hub, with the adapter's updates to the directory `out`,
    which must be new or empty. `dtype`: that of all weights; None: that of the base model's files, or bfloat16 if they
    are quantized. config.json comes last: without it nothing loads what an interrupted run has left.

    Raises ConfigError: the model or the adapter cannot be read, they do not belong together, or `out` is not empty.
    Raises OSError or SafetensorError."""
    updates = read_updates(adapter)
    described = read_config(path)
    if not (files := weight_files(path)):
        raise ConfigError(f"{path} has no safetensors files")
    with StoredWeights(path, files, described.format, dtype or torch.bfloat16) as stored:
        tied = check_weights(path, described.config, class_of(path, described.config), stored)
        rows = _rows(described.config, stored)
        tensors = {name: _Tensor(name) for name in stored.keys()}  # noqa: SIM118
        untied = None
        for layer, update in updates.items():
            parameter = f"{layer}.weight"
            if is_head(layer) and parameter in tied:
                untied, (source,) = parameter, _sources(path, rows, tied[parameter], layer, update)
                tensors[untied] = _Tensor(source.source, update)
            else:
                for each in _sources(path, rows, parameter, layer, update):
                    tensors[each.source] = each
        check_new(out)
        out.mkdir(parents=True, exist_ok=True)
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        more = _write(out, slices, tensors, dtype)
    for file in files_beside_weights(path):
        shutil.copyfile(file, out / file.name)
    config = _described(json_of(path, "config.json"), untied=untied is not None, dtype=dtype)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Merged(len(updates), untied, more)


def _rows(config: Any, stored: StoredWeights) -> dict[str, Rows]:
    """Which of the files' tensors make each parameter."""
    with torch.device("meta"):
        model: Any = model_class(config).from_config(config)
    detach_vision(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    return stored_parameters(model, shapes, dict.fromkeys(stored.keys(), stored))


def _sources(path: str, rows: Mapping[str, Rows], parameter: str, layer: str, update: Update) -> list[_Tensor]:
    """The files' tensors of a layer's weight, each with its rows of the update. Raises ConfigError."""
    if parameter not in rows:
        raise ConfigError(f"the adapter has an update of {layer}, and {path} has no such layer")
    own = rows[parameter].get_shape()
    if tuple(own) != update.shape:
        raise ConfigError(f"the adapter's update of {layer} is {list(update.shape)}, and the weight in {path} is {own}")
    found: list[_Tensor] = []
    first = 0
    try:
        tensors = rows[parameter].tensors
    except ValueError as error:
        raise ConfigError(f"{path}: {error}: adapters on {layer} cannot be merged") from error
    for name, shape in tensors.items():
        found.append(_Tensor(name, update, first))
        first += shape[0]
    return found


def _write(out: Path, slices: Mapping[str, Any], tensors: Mapping[str, _Tensor], dtype: torch.dtype | None) -> int:
    """Returns the bytes of tensors that `slices` has not."""
    described = {
        name: torch.empty(slices[each.source].get_shape(), dtype=_dtype(slices[each.source], dtype), device="meta")
        for name, each in tensors.items()
    }
    with sharded_files(out, described, SHARD) as written:
        for name, each in tensors.items():
            write_tensor(written, name, slices[each.source], described[name].dtype, each.update, each.first)
    return sum(tensor.nbytes for name, tensor in described.items() if name not in slices)


def write_tensor(
    written: TensorFiles, name: str, stored: Any, dtype: torch.dtype, update: Update | None = None, first: int = 0
) -> None:
    """Write a tensor of the files, with the rows of an update from `first` on."""
    shape = stored.get_shape()
    if not shape:
        written.write(name, 0, bytes_of(stored[...].to(dtype)))
        return
    for rows in row_parts(shape):
        values = stored[rows]
        if update is not None:
            values = values.float() + update.rows(first + rows.start, first + rows.stop)
        written.write(name, rows.start * math.prod(shape[1:]), bytes_of(values.to(dtype)))


def _dtype(stored: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Integers stay as they are."""
    own = PLAIN[stored.get_dtype()]
    return dtype if dtype is not None and own.is_floating_point else own


def _described(config: dict[str, Any], *, untied: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    """config.json of the merged model, whose weights are not quantized."""
    text = config.get("text_config")
    parts = [config, *[text] * isinstance(text, dict)]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            part.pop(key, None)
        if untied:
            part["tie_word_embeddings"] = False
        if dtype is not None:
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
    return config


def main(command: str, *arguments: str) -> None:
    logging.disable_progress_bar()  # of a load of the model without its weights
    try:
        sys.stdout.write(_merge(*arguments) if command == "merge" else _leave_head_out(*arguments))
    except (ConfigError, OSError, SafetensorError) as error:
        sys.stderr.write(f"skyrl adapter {command}: {str(error).removeprefix('base_model: ')}\n")
        raise SystemExit(2) from error


def _merge(model: str, adapter: str, out: str, dtype: str | None = None) -> str:
    merged = merge(model, Path(adapter), Path(out), None if dtype is None else getattr(torch, dtype))
    said = f"{out}: {model} with the updates of {merged.layers} layers\n"
    if merged.untied:
        said += (
            f"{model} ties {merged.untied} to the embeddings. They stay as they were; {merged.untied}, which the "
            "adapter changes, is a tensor of its own now. So tie_word_embeddings is false in config.json, and the "
            f"files are {merged.more_bytes / 1e6:,.1f} MB larger.\n"
        )
    return said


def _leave_head_out(adapter: str, out: str) -> str:
    left = leave_head_out(Path(adapter), Path(out))
    return (
        f"{out}: the adapter on {left.layers} layers, as it was. Left out: its update of lm_head, of rank {left.rank} "
        f"and norm {left.norm:.3g}. The model answers otherwise than in training. To lose nothing, merge the whole "
        "adapter (skyrl adapter merge), or train with train_unembed=False.\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
