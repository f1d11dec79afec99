"""Loading takes the memory of the model in its dtype, and of one layer's experts while they are put together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.families import make_family
from tests.quantized import FP8, block_fp8, quantize

LOADED = """
import re, sys, torch
from pathlib import Path
from skyrl.trainer.model.loading import load_model
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
load_model(sys.argv[2], torch.float32)
before = peak()
model = load_model(sys.argv[1], torch.float32)
print(sum(parameter.nbytes for parameter in model.parameters()), peak() - before)
"""
WIDE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "mlp_only_layers": [],
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 24,
}
MIB = 2**20


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "fp8"])
def test_loading_takes_the_model_and_the_experts_of_one_layer(tmp_path: Path, form: str) -> None:
    small = make_family("qwen3-moe", tmp_path / "small")
    path = make_family("qwen3-moe", tmp_path / "wide", **WIDE)
    if form == "fp8":
        path = quantize(path, tmp_path / "release", FP8, block_fp8())
    done = subprocess.run(
        [sys.executable, "-c", LOADED, path, small], capture_output=True, text=True, timeout=300, check=True
    )
    model, above = map(int, done.stdout.split())
    gate_and_up = 4 * WIDE["num_experts"] * 2 * WIDE["moe_intermediate_size"] * WIDE["hidden_size"]
    assert model > 200 * MIB
    # twice while they are joined, and what the allocator keeps of tensors of single experts
    assert model * 0.9 < above < model + 4 * gate_and_up + 24 * MIB, (model / MIB, above / MIB)
