"""Writes small quantized releases: a plain checkpoint's weights in block FP8, in MXFP4, or in compressed-tensors' INT4.

The numbers are rounded as simply as can be. What counts is that readers agree about what is stored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
BLOCK = 128
GROUP = 32
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}


def quantize(plain: str | Path, out: Path, config: dict[str, Any], stored: Callable[[str, Tensor], Stored]) -> str:
    """Write the checkpoint `plain` to `out`, with this `quantization_config`, in two shards. `stored` makes a weight's
    stored tensors. Returns the path."""
    out.mkdir()
    for file in Path(plain).iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copyfile(file, out / file.name)
    description = json.loads((out / "config.json").read_text())
    released = {"quantization_config": config, "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(description | released))
    tensors: Stored = {}
    for file in sorted(Path(plain).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= stored(name, tensor)
    write_shards(out, tensors)
    return str(out)


def write_shards(out: Path, tensors: Stored) -> None:
    """Two files and their index. A weight and its factors may be in different files, as in DeepSeek's release."""
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in files.items():
        save_file({name: tensors[name].contiguous() for name in chosen}, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, chosen in files.items() for name in chosen}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def is_linear(name: str) -> bool:
    """Whether a release of this family stores the weight in fewer bits."""
    return name.endswith("_proj.weight") or "_proj_with_mqa.weight" in name or "_a_proj" in name


def block_fp8(scale_dtype: torch.dtype = torch.float32) -> Callable[[str, Tensor], Stored]:
    def stored(name: str, weight: Tensor) -> Stored:
        if not is_linear(name):
            return {name: weight.bfloat16()}
        rows, columns = weight.shape
        grid = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
        numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                grid[i, j] = (weight[place].abs().max() / 448).to(scale_dtype).float()
                numbers[place] = (weight[place] / grid[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {name: numbers, f"{name}_scale_inv": grid.to(scale_dtype)}

    return stored


def mxfp4(name: str, weight: Tensor) -> Stored:
    """gpt-oss: [experts, in, out] becomes blocks of [experts, out, in]."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight.bfloat16()}
    grouped = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    powers = torch.floor(torch.log2(grouped.abs().amax(-1, keepdim=True))) - 2
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = grouped / powers.exp2()
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": (powers[..., 0] + 127).to(torch.uint8)}


def int4(scale_dtype: torch.dtype = torch.bfloat16) -> Callable[[str, Tensor], Stored]:
    def stored(name: str, weight: Tensor) -> Stored:
        if not is_linear(name):
            return {name: weight.bfloat16()}
        grouped = weight.unflatten(1, (-1, GROUP))
        scale = (grouped.abs().amax(-1) / 7.5).to(scale_dtype)
        numbers = (grouped / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).int() + 8
        packed = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32)
        for place in range(8):
            packed |= numbers[:, place::8] << (4 * place)
        stem = name.removesuffix(".weight")
        return {
            f"{stem}.weight_packed": packed,
            f"{stem}.weight_scale": scale,
            f"{stem}.weight_shape": torch.tensor(weight.shape),
        }

    return stored
