"""A quantized release becomes the same weights on the device as in main memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.training.backends.torch_lora.device import base_dtype
from skyrl.training.backends.torch_lora.loading import load_model
from skyrl.training.backends.torch_lora.model import load_base_model
from tests.families import make_family
from tests.gpu.support import DEVICE
from tests.quantized import FP8, INT4, MXFP4, block_fp8, int4, mxfp4, quantize

WHOLE_GROUPS = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32, "moe_intermediate_size": 64}

RELEASES: dict[str, tuple[str, dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "fp8": ("qwen3", FP8, block_fp8(torch.bfloat16), {}),
    "mxfp4": ("gpt-oss", MXFP4, mxfp4, {}),
    "int4": ("deepseek-v3", INT4, int4(), WHOLE_GROUPS),
}


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_becomes_weights_of_the_devices_dtype(name: str, tmp_path: Path) -> None:
    family, config, stored, changed = RELEASES[name]
    path = quantize(make_family(family, tmp_path, **changed), tmp_path / "release", config, stored)
    device = torch.device(DEVICE)
    base = load_base_model(path, device, gradient_checkpointing=False)
    expected = load_model(path, base_dtype(device))
    for ours, theirs in zip(base.packed.model.parameters(), expected.parameters(), strict=True):
        assert ours.device.type == DEVICE
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)
