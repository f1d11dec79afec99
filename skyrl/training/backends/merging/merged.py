"""Writes a base model with an adapter's updates in its weights, as files that transformers and vLLM load alone.

A base model may tie lm_head to the embeddings: one tensor for both. An update of lm_head is none of the embeddings, so
the two become different tensors, and config.json says so. Reads and writes some rows at a time.
Knows files. Knows nothing of how a model computes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyrl.base.config.server import ConfigError
from skyrl.base.model_files import json_of
from skyrl.training.backends.merging.adapter_files import Update, new_directory, read_updates
from skyrl.training.backends.merging.without_head import is_head
from skyrl.training.backends.torch_full.model_files import bytes_of, files_beside_weights
from skyrl.training.backends.torch_full.tensor_files import TensorFiles, row_parts, sharded_files
from skyrl.training.backends.torch_lora.conversions import Rows, stored_parameters
from skyrl.training.backends.torch_lora.loading import check_weights, class_of
from skyrl.training.backends.torch_lora.model_config import read_config
from skyrl.training.backends.torch_lora.stored_weights import PLAIN, StoredWeights, weight_files
from skyrl.training.backends.torch_lora.text_part import detach_vision, model_class

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
        new_directory(out)
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
    for name, shape in rows[parameter].tensors.items():
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
            _write_tensor(written, name, slices[each.source], each, described[name].dtype)
    return sum(tensor.nbytes for name, tensor in described.items() if name not in slices)


def _write_tensor(written: TensorFiles, name: str, stored: Any, tensor: _Tensor, dtype: torch.dtype) -> None:
    shape = stored.get_shape()
    if not shape:
        written.write(name, 0, bytes_of(stored[...].to(dtype)))
        return
    for rows in row_parts(shape):
        values = stored[rows]
        if tensor.update is not None:
            values = values.float() + tensor.update.rows(tensor.first + rows.start, tensor.first + rows.stop)
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
