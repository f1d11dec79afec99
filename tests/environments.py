"""Isolated Python environments for tests that run other versions of a client than this environment has.

uv (which `make setup` installs) makes an environment from a file of pinned requirements, and makes it anew after the
file has changed. If several processes want the same environment, the first makes it and the others wait.
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
        return _make_if_outdated(home, requirements)


def _make_if_outdated(home: Path, requirements: Path) -> Path:
    python, stamp = home / "bin" / "python", home / "made-from"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    uv = Path(sys.executable).parent / "uv"
    # uv does not read pip's find-links. Without find-links, `--torch-backend cpu` makes uv use PyTorch's own index.
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    env = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    torch = [] if links else ["--torch-backend", "cpu"]
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home], check=True, env=env)
    install = [uv, "pip", "install", "--quiet", "--python", python, *torch, "--no-deps", "-r", requirements]
    subprocess.run(install, check=True, env=env)
    stamp.write_text(digest)
    return python
