"""What the programs of this folder have in common: their command lines, and the files that they write."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

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
