"""What the programs of this folder have in common: their command lines, and the files that they write."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.series import without_nan


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of `python -m benchmarks.NAME`. `description`: the module's docstring, whose lines stay."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def write(file: Path, found: Any) -> None:
    """Write JSON, with null for what was not measured, and say where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(without_nan(found), indent=1) + "\n")
    print(f"written: {file}")


def taken_out(commit: str, directory: Path) -> Path:
    """The directory, with the files of that commit of this repository: a build to measure beside this one."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(directory, filter="data")
    return directory
