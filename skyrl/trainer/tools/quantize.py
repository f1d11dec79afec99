"""The process of `skyrl quantize`: a quantized release of a model that is not quantized, for trainer and vLLM.

Arguments: MODEL OUT BITS GROUP_SIZE. Ends with 2 and one sentence when it cannot. Quantized are the large matrices of
decoder layers, experts among them; they are rounded to integers of 4 or 8 bits, as compressed-tensors packs them. Reads
and writes some rows at a time. Knows transformers' models and how their files are named. Knows nothing of passes.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from skyrl.base.config.server import ConfigError
from skyrl.base.model_files import json_of
from skyrl.trainer.files.config import read_config
from skyrl.trainer.files.model_files import bytes_of, files_beside_weights, stored_parameters
from skyrl.trainer.files.tensor_files import (
    PLAIN,
    StoredWeights,
    TensorFiles,
    check_new,
    row_parts,
    sharded_files,
    weight_files,
)
from skyrl.trainer.model.loading import check_weights, class_of, detach_vision, model_class
from skyrl.trainer.model.packed_model import experts_in
from skyrl.trainer.quantized.format import PackedInt
from skyrl.trainer.tools.merge_adapter import write_tensor


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers of `bits` bits, and a factor for each group of `group_size` columns of a row. 32 must divide
    `group_size`."""

    bits: int
    group_size: int

    def packed_columns(self, columns: int) -> int:
        return columns * self.bits // 32

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest integers of rows [n, columns], packed: int32 [n, columns * bits / 32]; and the groups' factors,
        bfloat16 [n, columns / group_size].

        The largest number of a group comes half a step beyond the largest integer: so steps are smaller, and it is
        rounded by half a step at most as all others are. Integers are computed with factors that are rounded already.
        Raises ValueError for numbers that are not finite."""
        groups = rows.float().unflatten(1, (-1, self.group_size))
        half = 2 ** (self.bits - 1)
        factors = (groups.abs().amax(-1) / (half - 0.5)).bfloat16()
        if not bool(factors.isfinite().all()):
            raise ValueError("it has numbers that are not finite")
        divisors = torch.where(factors == 0, 1.0, factors.float())
        integers = (groups / divisors[..., None]).round_().clamp_(-half, half - 1).add_(half).flatten(1).int()
        count = 32 // self.bits
        packed = torch.zeros(len(rows), self.packed_columns(rows.shape[1]), dtype=torch.int32)
        for place in range(count):
            packed |= integers[:, place::count] << (self.bits * place)
        return packed, factors

    def described(self, ignored: list[str]) -> dict[str, Any]:
        """config.json's `quantization_config`. `ignored`: the names of layers that are not quantized."""
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": ignored,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": self.bits,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": self.group_size,
                        "dynamic": False,
                        "actorder": None,
                        "block_structure": None,
                        "observer": "minmax",
                        "observer_kwargs": {},
                    },
                }
            },
        }


SMALL = (
    *("in_proj_b", "in_proj_a", "in_proj_ba"),
    *("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
    "shared_expert_gate",
)
"""Linear layers that stay as they are: gates of the delta rule and of shared experts, with a few rows each."""


def large_matrices(path: str, config: Any, stored: StoredWeights) -> list[str]:
    """The names of the files' tensors that are quantized. config: transformers', of the model whose files are open as
    `stored`.

    Raises ConfigError for experts that the files do not hold as one matrix for each expert and projection."""
    with torch.device("meta"):
        model: Any = model_class(config).from_config(config)
    detach_vision(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rows = stored_parameters(model, shapes, dict.fromkeys(stored.keys(), stored))
    found: list[str] = []
    for name in _large_parameters(model):
        try:
            tensors = rows[name].tensors
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        for tensor, shape in tensors.items():
            if len(shape) != 2:
                raise ConfigError(
                    f"{path}: {tensor} holds all experts of a layer, {list(shape)}, and compressed-tensors has a "
                    "matrix for each expert: models of this family cannot be quantized here"
                )
            found.append(tensor)
    return found


def _large_parameters(model: Any) -> Iterator[str]:
    layers = {id(module) for module in model.get_decoder().layers.modules()}
    for name, module in model.named_modules():
        small = name.rsplit(".", 1)[-1] in SMALL
        if isinstance(module, nn.Linear) and id(module) in layers and not small:
            yield f"{name}.weight"
    for name, module in experts_in(model):
        for leaf, parameter in module.named_parameters():
            if parameter.ndim == 3:
                yield f"{name}.{leaf}"


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
    check_new(out)
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
                write_tensor(tensors, name, stored, described[name].dtype)
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


def _stored_names(name: str) -> list[str]:
    stem = name.removesuffix(".weight")
    return [f"{stem}{suffix}" for suffix in PackedInt.suffixes]


def main(model: str, out: str, bits: str, group_size: str) -> None:
    logging.disable_progress_bar()  # of a load of the model without its weights
    try:
        written = quantize(model, Path(out), Scheme(int(bits), int(group_size)))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"skyrl quantize: {str(error).removeprefix('base_model: ')}\n")
        raise SystemExit(2) from error
    sys.stdout.write(
        f"{out}: {written.matrices} matrices in {bits} bits, {written.bytes / 1e6:,.1f} MB where {model} has "
        f"{written.bytes_before / 1e6:,.1f} MB\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
