"""What the GPU tests measure: one line of JSON for each figure and each test, written at once.

A run may be cut off at any time, and what it has found until then must be left. `tests.gpu.table` makes the table of
docs/gpu.md of such a file.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

REHEARSAL = "a CPU (rehearsal)"
"""Where a run without a GPU took place."""
Column = Literal["alone", "merged", "beside"]
"""Of the table. `alone`: passes one at a time, or what has no other way. `beside`: PEFT or transformers, in the same
run."""


@dataclass
class Figures:
    """`lines`: all records of this run, in order. They are appended to the file `target`, if there is one."""

    target: Path | None
    started: float = field(default_factory=time.monotonic)
    lines: list[dict[str, Any]] = field(default_factory=list)
    _told: int = 0

    def record(self, what: str, value: Any, column: Column = "alone") -> None:
        """A measured value. `what` names it with its unit."""
        self.add(what=what, column=column, value=value)

    def add(self, **line: Any) -> None:
        self.lines.append({"at_s": round(time.monotonic() - self.started, 1), **line})
        if self.target is not None:
            with self.target.open("a") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")

    def untold(self) -> list[str]:
        """The figures since the last call, as text."""
        new, self._told = self.lines[self._told :], len(self.lines)
        return [f"  {line['what']}, {line['column']}: {said(line['value'])}" for line in new if "what" in line]


def said(value: Any) -> str:
    """A value as the table and the terminal show it: four digits, or whole numbers with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


FIGURES = Figures(Path(target) if (target := os.environ.get("SKYRL_TEST_FIGURES")) else None)
