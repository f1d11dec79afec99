"""torchvision beside a torch for CPUs, whichever of its builds is installed. Each test is a process of its own, because
torch keeps the names of operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AS_TORCH_CALLS = "from skyrl.inference.vllm_plugin.torchvision_names import define; define(); define()"


def _run(program: str, first_on_path: Path | None = None) -> str:
    paths = [*([str(first_on_path)] if first_on_path else []), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_transforms_of_the_installed_torchvision_work_and_operators_raise_its_own_error() -> None:
    program = """
import torch
from torchvision.transforms.v2 import functional
from transformers import Qwen3VLProcessor
print(tuple(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))
from torchvision import extension, ops
try:
    print(len(ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)) == 1 and extension._has_ops())
except RuntimeError as error:
    print("Couldn't load custom C++ ops" in str(error) and not extension._has_ops())
"""
    assert _run(program).split("\n") == ["(3, 4, 4)", "True"]


@pytest.mark.parametrize(("version", "defined"), [("0.28.0+cu130", True), ("0.28.0+cpu", False), ("0.28.0", False)])
@pytest.mark.slow
def test_only_names_of_a_build_for_cuda_are_defined(tmp_path: Path, version: str, defined: bool) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torchvision" / "version.py").write_text(f"__version__ = '{version}'\n")
    program = f"import torch\n{AS_TORCH_CALLS}\nprint(hasattr(torch.ops.torchvision, 'nms'))"
    assert _run(program, tmp_path) == str(defined)


def test_without_torchvision_no_name_is_defined() -> None:
    program = f"""
import sys
sys.modules["torchvision"] = None
import torch
{AS_TORCH_CALLS}
print(hasattr(torch.ops.torchvision, "nms"))
"""
    assert _run(program) == "False"
