"""What the tests of each family measured: the file that they write, and the one that the page is made from.

A test of a family calls `record`, which does nothing unless the variable `SKYRL_TEST_FIGURES` names a file. Knows
nothing of models or of the page.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "SKYRL_TEST_FIGURES"
FIGURES = Path(__file__).with_name("figures.json")
"""The committed figures, by family. `make tables NEW=architectures` writes them."""


def record(family: str, **measured: Any) -> None:
    """Keep what a test measured with a family, beside what other tests, also of other processes, kept of it. Numbers
    are kept with two digits."""
    if not (given := os.environ.get(VARIABLE)):
        return
    with Path(given).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        kept[family] = kept.get(family, {}) | {name: _rounded(value) for name, value in measured.items()}
        file.truncate(0)
        file.write(_text(kept))


def read(file: Path = FIGURES) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text())


def write(figures: Mapping[str, Mapping[str, Any]], file: Path = FIGURES) -> None:
    file.write_text(_text(figures))


def _text(figures: Mapping[str, Mapping[str, Any]]) -> str:
    return json.dumps(figures, indent=1, sort_keys=True) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.1e}") if isinstance(value, float) else value
