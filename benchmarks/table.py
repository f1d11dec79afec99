"""Rows of the result table: target, measured value, and the value of the direct way in the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = ("what", "target", "measured", "direct", "ratio", "met")


@dataclass(frozen=True)
class Target:
    """A bound on a measured value, in the unit of the value."""

    bound: float
    at_most: bool = True

    def met(self, value: float) -> bool:
        """Whether the value meets the bound. NaN, the value of a run without results, never does."""
        return value <= self.bound if self.at_most else value >= self.bound

    def text(self, unit: str) -> str:
        return f"{'≤' if self.at_most else '≥'} {number(self.bound)} {unit}".strip()


@dataclass(frozen=True)
class Row:
    """One row. `direct` is the same quantity measured in another way, in the same unit. `errors` counts all failures; a
    row with an error misses its target. `note` explains the figure."""

    name: str
    what: str
    unit: str
    measured: float
    target: Target | None = None
    direct: float | None = None
    errors: int = 0
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return None if self.target is None else not self.errors and self.target.met(self.measured)

    @property
    def ratio(self) -> float | None:
        """The measured value divided by the direct one."""
        return self.measured / self.direct if self.direct else None

    def cells(self) -> list[str]:
        return [
            self.what,
            self.target.text(self.unit) if self.target else "",
            f"{number(self.measured)} {self.unit}" + (f", {self.errors} errors" if self.errors else ""),
            number(self.direct),
            number(self.ratio),
            {True: "yes", False: "NO", None: ""}[self.met],
        ]


def number(value: float | None) -> str:
    """The value with three significant digits, or with commas between thousands; "" for None."""
    if value is None:
        return ""
    if math.isnan(value):
        return "none"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells: the first column to the left, the others to the right. A line whose other cells are empty may be
    as long as it likes."""
    widths = [max(len(line[column]) for line in lines if column or any(line[1:])) for column in range(len(lines[0]))]
    texts = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        texts.append("  ".join([line[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(texts)


def text_table(rows: Sequence[Row]) -> str:
    """The table as aligned lines; the note of a row follows the row."""
    header, *lines = aligned([COLUMNS, *(row.cells() for row in rows)]).splitlines()
    out = [header, "-" * max(map(len, (header, *lines)))]
    for row, line in zip(rows, lines, strict=True):
        out += [line, f"    {row.note}"] if row.note else [line]
    return "\n".join(out)
