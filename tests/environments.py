"""Isolated Python environments for tests that run other versions of a client than this environment has.

uv (which `make setup` installs) makes an environment from a file of pinned requirements. It lies in the user's cache,
under the digest of what it is made from, and so all checkouts use it, also later ones. If several processes want the
same environment, the first makes it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNUSED_S = 30 * 86400
"""Environments that no test has used for so long are deleted when another one of the same name is made."""


def environment(requirements: Path) -> Path:
    """The Python of an environment that holds exactly these requirements (without resolving dependencies)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl" / "test-environments"
    cache.mkdir(parents=True, exist_ok=True)
    made_from = f"{sys.base_prefix} {sys.version} ".encode() + requirements.read_bytes()
    home = cache / f"{requirements.stem}-{hashlib.sha256(made_from).hexdigest()[:16]}"
    with (cache / f"{requirements.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = home / "whole"
        if not whole.exists():
            _delete_unused(cache, requirements.stem)
            _make(home, requirements)
        whole.touch()
    return home / "bin" / "python"


def _make(home: Path, requirements: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    uv("venv", "--quiet", "--python", sys.executable, home)
    install = ("pip", "install", "--quiet", "--python", home / "bin" / "python", *torch_builds(), "--no-deps")
    uv(*install, "-r", requirements)


def uv(*arguments: str | Path, directory: Path = ROOT) -> None:
    """Run uv, with pip's find-links, which uv does not read by itself. Raises CalledProcessError."""
    links = _links()
    env = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    subprocess.run([Path(sys.executable).parent / "uv", *arguments], check=True, env=env, cwd=directory)


def torch_builds() -> tuple[str, ...]:
    """uv's option that takes CPU builds of torch from PyTorch's own index; none where find-links have them."""
    return () if _links() else ("--torch-backend", "cpu")


def _links() -> str | None:
    return os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")


def _delete_unused(cache: Path, stem: str) -> None:
    for whole in cache.glob(f"{stem}-{'?' * 16}/whole"):
        if whole.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(whole.parent, ignore_errors=True)
