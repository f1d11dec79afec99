"""What the tests of weights that stay quantized share: small releases in each format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families import make_family
from tests.quantized import FP8, INT4, MXFP4, Stored, block_fp8, int4, mxfp4, quantize

LATENT = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 96}
"""Blocks of 128 end inside of an expert's rows and columns."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[str, Tensor], Stored]]] = {
    "dense-fp8": ("qwen3", WIDE, FP8, block_fp8()),
    "dense-int4": ("qwen3", WIDE, INT4, int4()),
    "mixture-fp8": ("qwen3-moe", WIDE, FP8, block_fp8(torch.bfloat16)),
    "latent-mixture-int4": ("deepseek-v3", WIDE | LATENT | {"head_dim": None}, INT4, int4(torch.float32)),
    "fused-mixture-mxfp4": ("gpt-oss", {}, MXFP4, mxfp4),
}


def release(case: str, directory: Path) -> str:
    """The path of a random model's release in one of `CASES`."""
    family, shape, config, stored = CASES[case]
    return quantize(make_family(family, directory, **shape), directory / "release", config, stored)
