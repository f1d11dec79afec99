"""The agents of npm, Claude Code and Codex, installed outside the repository."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PACKAGES = {"@anthropic-ai/claude-code": "2.1.332", "@openai/codex": "0.171.0"}
"""Their versions. Together they take 660 MB."""
PROGRAMS = ("claude", "codex")
NEEDED = ("node", "npm", "unshare", "ip")
"""Programs of the machine: two to run the agents, two to run them without a network."""
INSTALL_S = 400.0


class CannotInstall(Exception):
    """Why there are no agents on this machine."""


def programs() -> Path:
    """The directory of the agents' programs. They are installed when they are first needed, in SKYRL_TEST_NPM_AGENTS or
    in the user's cache. Raises CannotInstall."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise CannotInstall(f"not on this machine: {', '.join(missing)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl" / "npm-agents"
    home = Path(os.environ.get("SKYRL_TEST_NPM_AGENTS") or cache)
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(_version(home, name) != version for name, version in PACKAGES.items()):
            installed(home, PACKAGES)
    found = home / "node_modules" / ".bin"
    if missing := [name for name in PROGRAMS if not (found / name).exists()]:
        raise CannotInstall(f"npm installed no {', '.join(missing)}")
    return found


def has_namespaces() -> bool:
    """Whether this user may run a program with a network of its own."""
    command = ["unshare", "-rn", "ip", "link", "set", "lo", "up"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _version(home: Path, package: str) -> str | None:
    try:
        return json.loads((home / "node_modules" / package / "package.json").read_text())["version"]
    except (OSError, ValueError, KeyError):
        return None


def installed(home: Path, packages: Mapping[str, str]) -> dict[str, str]:
    """Install packages of npm, given with their versions, in a directory. Returns the versions that came. Raises
    CannotInstall."""
    wanted = [f"{name}@{version}" for name, version in packages.items()]
    command = ["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", "--loglevel", "error", *wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"npm install took longer than {INSTALL_S:.0f} s") from error
    if done.returncode:
        raise CannotInstall(f"npm install: {done.stderr.strip()[-300:]}")
    return {name: _version(home, name) or "" for name in packages}
