"""Own Triton kernels: their numbers in Triton's interpreter, and what the compiler of GPUs makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no package triton for this system")
from benchmarks.kernel_registers import CAPABILITIES, SHAPES, compiled, launches


def test_numbers_in_the_interpreter() -> None:
    """In a process of its own: `TRITON_INTERPRET` must be set before triton's first import."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("interpreted.py")
    found = subprocess.run([*command, file], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert "20 passed" in found.stdout


@pytest.mark.parametrize("model", SHAPES)
def test_each_function_starts_one_kernel_compiled_once_for_any_rows(model: str) -> None:
    found = launches(SHAPES[model], 4096)
    assert [launch.function for launch in found] == [
        *("rms_norm", "add_rms_norm", "normed", "rms_norm_backward"),
        *("rotated", "rotated_backward") * 2,
        *("swiglu", "swiglu_backward"),
        *("add_grouped",) * 2,
    ]
    assert [launch.key for launch in launches(SHAPES[model], 37)] == [launch.key for launch in found]


@pytest.mark.parametrize(
    ("model", "capability"),
    [
        pytest.param(*each, marks=[] if each == ("Qwen3-8B", 90) else pytest.mark.slow)
        for each in product(SHAPES, CAPABILITIES)
    ],
)
def test_kernels_compile_without_spills_and_read_whole_words(model: str, capability: int) -> None:
    for launch in launches(SHAPES[model], 4096):
        found = compiled(launch, capability)
        assert found.spilled_bytes == 0, launch.key
        # half of an SM's threads may run at once; a quarter of them in products, which have sums
        assert found.registers <= (128 if launch.function == "add_grouped" else 64), launch.key
        assert found.read_bytes >= 8, launch.key
