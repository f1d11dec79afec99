"""Isolated Python environments for tests that run other versions of a client than this environment has.

An environment is made once from a file of pinned requirements, by uv (which `make setup` installs), and made anew when
the file changes. Processes that want one at the same time wait for the first, which makes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv" / "environments"


def environment(requirements: Path) -> Path:
    """The Python of an environment that holds exactly these requirements (without resolving dependencies)."""
    home = ENVIRONMENTS / requirements.stem
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(home, requirements)


def _made(home: Path, requirements: Path) -> Path:
    python, stamp = home / "bin" / "python", home / "made-from"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    uv = Path(sys.executable).parent / "uv"
    # uv does not read pip's find-links; where there are none, it knows where PyTorch keeps its CPU builds.
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    env = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    torch = [] if links else ["--torch-backend", "cpu"]
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home], check=True, env=env)
    install = [uv, "pip", "install", "--quiet", "--python", python, *torch, "--no-deps", "-r", requirements]
    subprocess.run(install, check=True, env=env)
    stamp.write_text(wanted)
    return python
