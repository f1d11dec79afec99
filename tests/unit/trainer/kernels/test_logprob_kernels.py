"""The Triton kernels of target logprobs: in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton: Any = pytest.importorskip("triton", reason="triton is not installed: the kernels of logprobs were not run")


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: `TRITON_INTERPRET` must be set before triton's first import."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("interpreted_logprobs.py")
    found = subprocess.run([*command, file], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert "11 passed" in found.stdout


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["_norms", "_into_gradient"])
def test_kernels_compile_for_an_h100_and_read_16_bytes_at_once(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a number of logits that is a multiple of 16, as 151,936 is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels: Any = importlib.import_module("skyrl.trainer.kernels.logprobs")
    kernel = getattr(kernels, name)
    types = [f"*{dtype}", "*fp32", "*fp32", "i32", "constexpr"]
    source = importlib.import_module("triton.compiler").ASTSource(
        kernel,
        dict(zip(kernel.arg_names, types, strict=True)),
        {"BLOCK": kernels._BLOCK},
        {(place,): [["tt.divisibility", 16]] for place in (0, 3)},
    )
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": kernels._WARPS}).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
