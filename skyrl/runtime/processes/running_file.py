"""The file in which the engine keeps what it runs now. `skyrl.training.engine.crash_ledger` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_running_file(file: Path) -> dict[str, Any]:
    """`running`: the keys that ran when the file was written; `deaths`: the engine's deaths, by key.

    Raises FileNotFoundError, and ValueError for a damaged file. After the first line the file may hold the rest of a
    longer one.
    """
    found = json.loads(file.read_text().partition("\n")[0])
    if not isinstance(found, dict) or not {"running", "deaths"} <= found.keys():
        raise ValueError(f"{file} has other content")
    return found


def running_now(file: Path) -> list[str]:
    """The keys that ran when the file was last written; none if it is missing or damaged."""
    try:
        return [str(key) for key in read_running_file(file)["running"]]
    except (OSError, ValueError):
        return []
