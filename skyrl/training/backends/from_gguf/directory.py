"""Writes the directory: weights, config.json, tokenizer. Reads and writes some rows at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from skyrl.base.config.server import ConfigError
from skyrl.training.backends.from_gguf.architectures import (
    EMBEDDING,
    HEAD,
    Architecture,
    architecture_of,
    configuration,
    name_in_transformers,
    row_order,
)
from skyrl.training.backends.from_gguf.reading import GgufFile
from skyrl.training.backends.from_gguf.tokenizer import write_tokenizer
from skyrl.training.backends.torch_full.model_files import bytes_of
from skyrl.training.backends.torch_full.tensor_files import row_parts, sharded_files

SHARD = "4GB"
_KEPT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtype of a directory whose file is not quantized."""


@dataclass(frozen=True)
class Converted:
    """What was written. `notes`: sentences for the user."""

    architecture: str
    parameters: int
    tokens: int
    dtype: str
    notes: tuple[str, ...]


def convert(path: Path, out: Path, dtype: str | None = None) -> Converted:
    """Write the model of the GGUF file at `path` to the directory `out`, which must be new or empty. `dtype`: float32,
    bfloat16 or float16; None is that of the file's embedding, and bfloat16 for one that is quantized. config.json comes
    last: without it nothing loads what an interrupted run has left.

    Raises ConfigError: the file is damaged, or has an architecture, a type, a vocabulary or a setting that cannot be
    converted; or `out` is not empty. Raises OSError."""
    file = GgufFile(path)
    chosen = architecture_of(file)
    config = configuration(file, chosen)
    names = _names(file, chosen, config)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty")
    kind = dtype or _KEPT.get(file.type_of(EMBEDDING), "bfloat16")
    out.mkdir(parents=True, exist_ok=True)
    tokens = write_tokenizer(file, out, config.vocab_size)
    parameters = _write_weights(file, chosen, config, names, out, getattr(torch, kind))
    config.dtype = kind
    config.save_pretrained(out)
    notes: tuple[str, ...] = ()
    if not config.tie_word_embeddings:
        notes = ("its embedding and its output layer are two matrices in the file, and so they stay: an untied model",)
    return Converted(chosen.classes[1], parameters, tokens, kind, notes)


def _names(file: GgufFile, chosen: Architecture, config: object) -> dict[str, str]:
    """Of each tensor that is written: its name in transformers, in which the model has all and no others, in these
    shapes."""
    import transformers

    names: dict[str, str] = {}
    for tensor in file.tensors:
        if tensor == HEAD and getattr(config, "tie_word_embeddings", False):
            continue
        try:
            name = name_in_transformers(tensor, chosen)
        except KeyError:
            raise ConfigError(f"{file.path} has the tensor {tensor}, which the conversion does not know") from None
        if name is not None:
            names[tensor] = name
    with torch.device("meta"):
        model = getattr(transformers, chosen.classes[1])(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: file.tensors[tensor] for tensor, name in names.items()}
    if wrong := sorted(name for name in expected.keys() | found if expected.get(name) != found.get(name)):
        first = wrong[0]
        raise ConfigError(
            f"{file.path} does not hold the tensors of its metadata's model: {first} is {found.get(first, 'missing')} "
            f"in the file and {expected.get(first, 'missing')} in the model ({len(wrong)} such)"
        )
    return names


def _write_weights(
    file: GgufFile, chosen: Architecture, config: object, names: dict[str, str], out: Path, dtype: torch.dtype
) -> int:
    shapes = {name: file.tensors[tensor] for tensor, name in names.items()}
    described = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    with sharded_files(out, described, SHARD) as tensors:
        for tensor, name in names.items():
            shape = file.tensors[tensor]
            order = row_order(tensor, chosen, config, shape[0])
            offset = chosen.norm_offset if name.endswith("norm.weight") else 0.0
            for rows in row_parts(shape):
                values = file.rows(tensor, rows if order is None else order[rows]) - np.float32(offset)
                written = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
                if not bool(written.isfinite().all()):
                    raise ConfigError(f"{file.path}: {tensor} has numbers that are too large for {dtype}")
                tensors.write(name, rows.start * math.prod(shape[1:]), bytes_of(written))
    return sum(math.prod(shape) for shape in shapes.values())
