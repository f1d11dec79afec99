"""Usage as CSV (RFC 4180), for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets run as a formula."""


def as_csv(names: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """The lines, with a line of names first. A text that a spreadsheet would take for a formula gets a `'` in front of
    it: the ids of runs come from clients."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
