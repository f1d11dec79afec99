"""The module that starts vLLM: another module runs as `python -m` runs it, its imports without garbage collection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
