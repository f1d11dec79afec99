"""Writes a quantized release of a model that is not quantized: files that trainer and vLLM both load.

Reads and writes some rows at a time. Knows files. Knows nothing of numbers, or of which tensors are quantized.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl.base.config.server import ConfigError
from skyrl.base.model_files import json_of
from skyrl.training.backends.quantizing.choice import large_matrices
from skyrl.training.backends.quantizing.rounding import Scheme
from skyrl.training.backends.torch_full.model_files import bytes_of, files_beside_weights
from skyrl.training.backends.torch_full.tensor_files import TensorFiles, row_parts, sharded_files
from skyrl.training.backends.torch_lora.loading import check_weights, class_of
from skyrl.training.backends.torch_lora.model_config import read_config
from skyrl.training.backends.torch_lora.quantization import PackedInt
from skyrl.training.backends.torch_lora.stored_weights import PLAIN, StoredWeights, weight_files

SHARD = "4GB"
SMALLEST_GROUP = 32
"""Columns. vLLM has no kernels for smaller groups."""


@dataclass(frozen=True)
class Written:
    """What a release holds: bytes of its tensors, and of those of the model; how many matrices are quantized."""

    bytes: int
    bytes_before: int
    matrices: int


def quantize(path: str, out: Path, scheme: Scheme) -> Written:
    """Write the model at `path`, a directory or a name of the hub, to the directory `out`, which must be new or empty.
    config.json comes last: without it nothing loads what an interrupted run has left.

    Raises ConfigError: the model cannot be loaded or is quantized already; it has experts, columns or numbers that the
    scheme does not fit; or `out` is not empty. Raises OSError."""
    described = read_config(path)
    if described.format is not None:
        raise ConfigError(f"{path} is quantized already")
    if not (files := weight_files(path)):
        raise ConfigError(f"{path} has no safetensors files")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty")
    with StoredWeights(path, files, None, torch.float32) as stored:
        check_weights(path, described.config, class_of(path, described.config), stored)
        chosen = set(large_matrices(path, described.config, stored))
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        for name in sorted(chosen):
            _check(name, slices[name].get_shape(), scheme)
        out.mkdir(parents=True, exist_ok=True)
        written = _write(out, slices, chosen, scheme)
    for file in files_beside_weights(path):
        shutil.copyfile(file, out / file.name)
    plain = [name for name in slices if name not in chosen and name.endswith(".weight")]
    ignored = {name.removesuffix(".weight") for name in plain if len(slices[name].get_shape()) > 1}
    config = json_of(path, "config.json") | {"quantization_config": scheme.described(sorted({*ignored, "lm_head"}))}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return written


def _check(name: str, shape: list[int], scheme: Scheme) -> None:
    if shape[1] % scheme.group_size:
        largest = math.gcd(shape[1], scheme.group_size)
        advice = f"try --group-size {largest}" if largest >= SMALLEST_GROUP else "this model cannot be quantized here"
        raise ConfigError(
            f"group-size: {name} has {shape[1]} columns, which groups of {scheme.group_size} do not divide: {advice}"
        )


def _write(out: Path, slices: Mapping[str, Any], chosen: Collection[str], scheme: Scheme) -> Written:
    described: dict[str, Tensor] = {}
    before = 0
    for name, stored in slices.items():
        shape, dtype = stored.get_shape(), PLAIN[stored.get_dtype()]
        plain = torch.empty(shape, dtype=dtype, device="meta")
        before += plain.nbytes
        if name not in chosen:
            described[name] = plain
            continue
        numbers, factors, stated = _stored_names(name)
        rows, columns = shape
        described[numbers] = torch.empty(rows, scheme.packed_columns(columns), dtype=torch.int32, device="meta")
        grid = rows, columns // scheme.group_size
        described[factors] = torch.empty(grid, dtype=torch.bfloat16, device="meta")
        described[stated] = torch.empty(2, dtype=torch.int64, device="meta")
    with sharded_files(out, described, SHARD) as tensors:
        for name, stored in slices.items():
            if name in chosen:
                _write_rounded(tensors, name, stored, scheme)
            else:
                _copy(tensors, name, stored)
    return Written(sum(tensor.nbytes for tensor in described.values()), before, len(chosen))


def _write_rounded(tensors: TensorFiles, name: str, stored: Any, scheme: Scheme) -> None:
    numbers, factors, stated = _stored_names(name)
    for rows in row_parts(stored.get_shape()):
        try:
            packed, of_groups = scheme.rounded(stored[rows])
        except ValueError as error:
            raise ConfigError(f"{name} cannot be quantized: {error}") from error
        tensors.write(numbers, rows.start * packed.shape[1], bytes_of(packed))
        tensors.write(factors, rows.start * of_groups.shape[1], bytes_of(of_groups))
    tensors.write(stated, 0, bytes_of(torch.tensor(stored.get_shape())))


def _copy(tensors: TensorFiles, name: str, stored: Any) -> None:
    shape = stored.get_shape()
    if not shape:
        tensors.write(name, 0, bytes_of(stored[...]))
        return
    for rows in row_parts(shape):
        tensors.write(name, rows.start * math.prod(shape[1:]), bytes_of(stored[rows]))


def _stored_names(name: str) -> list[str]:
    stem = name.removesuffix(".weight")
    return [f"{stem}{suffix}" for suffix in PackedInt.suffixes]
