"""Rows of the result: what was wanted, what was measured, and what the direct way took in the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = ("what", "target", "measured", "direct", "ratio", "met")


@dataclass(frozen=True)
class Target:
    """A bound on a measured value, in the unit that the value has."""

    bound: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """NaN, which is what a run without results gives, meets nothing."""
        return value <= self.bound if self.at_most else value >= self.bound

    def text(self, unit: str) -> str:
        return f"{'≤' if self.at_most else '≥'} {number(self.bound)} {unit}".strip()


@dataclass(frozen=True)
class Row:
    """One line. `direct` and `other` are the same quantity by another way, in the same unit; `errors` counts failures
    of every kind, and one is enough for a target not to be met; `note` says what the figure alone does not."""

    name: str
    what: str
    unit: str
    measured: float
    target: Target | None = None
    direct: float | None = None
    other: float | None = None
    errors: int = 0
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        return None if self.target is None else not self.errors and self.target.met(self.measured)

    @property
    def ratio(self) -> float | None:
        """Measured over direct."""
        return self.measured / self.direct if self.direct else None

    def cells(self, compared: bool) -> list[str]:
        cells = [
            self.what,
            self.target.text(self.unit) if self.target else "",
            f"{number(self.measured)} {self.unit}" + (f", {self.errors} errors" if self.errors else ""),
            number(self.direct),
            number(self.ratio),
            {True: "yes", False: "NO", None: ""}[self.met],
        ]
        return [*cells[:4], number(self.other), *cells[4:]] if compared else cells


def number(value: float | None) -> str:
    """Three significant digits, thousands with commas; nothing for None."""
    if value is None:
        return ""
    if math.isnan(value):
        return "none"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def headers(compared: bool) -> list[str]:
    return [*COLUMNS[:4], "other", *COLUMNS[4:]] if compared else list(COLUMNS)


def text_table(rows: Sequence[Row]) -> str:
    """Aligned lines; a row's note stands below it."""
    compared = any(row.other is not None for row in rows)
    lines = [headers(compared), *(row.cells(compared) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def aligned(line: list[str]) -> str:
        first, *others = (cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in _cells(line))
        return "  ".join([first, *others]).rstrip()

    def _cells(line: list[str]) -> enumerate[tuple[str, int]]:
        return enumerate(zip(line, widths, strict=True))

    out = [aligned(lines[0]), "  ".join("-" * width for width in widths)]
    for row, line in zip(rows, lines[1:], strict=True):
        out.append(aligned(line))
        if row.note:
            out.append(f"    {row.note}")
    return "\n".join(out)
