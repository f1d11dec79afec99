"""How vLLM's process starts: its module without garbage collection, and torchvision beside a torch for CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTED = """
import gc

COLLECTS = gc.isenabled()
KEPT = [[] for _ in range(10_000)]
"""
STARTED = """
import gc
import json
import multiprocessing
import sys

import imported


def doubled(value):
    return 2 * value


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(doubled, (21,))
    print(json.dumps([__spec__.name, sys.argv, imported.COLLECTS, gc.isenabled(), gc.get_freeze_count(), spawned]))
"""


def test_the_module_runs_as_the_main_module_and_its_imports_are_not_collected(tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text(IMPORTED)
    (tmp_path / "started.py").write_text(STARTED)
    command = [sys.executable, "-m", "skyrl.inference.vllm_plugin.start", "started", "--port", "1"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    name, arguments, collected_imports, collects, frozen, spawned = json.loads(ran.stdout)
    assert (name, arguments) == ("started", [str(tmp_path / "started.py"), "--port", "1"])
    assert (collected_imports, collects) == (False, True)
    assert frozen > 10_000
    assert spawned == 42, "a spawned process finds the main module's functions"


AS_TORCH_CALLS = "from skyrl.inference.vllm_plugin.torchvision_names import define; define(); define()"


def _run(program: str, first_on_path: Path | None = None) -> str:
    paths = [*([str(first_on_path)] if first_on_path else []), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
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
