"""What a run has found, as rows of which each must be nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.ledger import Findings
from tests.chaos.reference import Comparison


@dataclass(frozen=True)
class Row:
    """`found` must be empty; `told` is said of it either way."""

    what: str
    found: list[str]
    told: str = ""


@dataclass
class Results:
    """Everything that was looked at. `weights` names the tenants whose final weights are others than without faults,
    `left` what is there after the server's end, `unsound` what is wrong with its database."""

    troubles: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        compared = self.comparisons
        samples = sum(each.samples for each in compared.values())
        steps = sum(each.steps for each in compared.values())
        wrong = [f"{name}: {each.wrong}" for name, each in compared.items() if each.wrong]
        differing = [f"{name}: steps {each.differing}" for name, each in compared.items() if each.differing]
        largest = max((each.largest for each in compared.values()), default=0.0)
        apart = [value for each in compared.values() for value in each.apart]
        other = f", the next step's {median(apart):.2g}" if apart else ""
        return [
            Row("troubles of the run, and exceptions that clients saw", self.troubles),
            Row(f"lost, of {self.findings.accepted:,} accepted requests", self.findings.lost),
            Row("results that were others when they were read again", self.findings.differing),
            Row(
                f"samples from wrong weights, of {samples:,}",
                wrong,
                f"their own weights differ by {largest:.1g} at most{other}",
            ),
            Row(f"RL steps with other losses than without faults, of {steps:,}", differing),
            Row(f"tenants with other final weights than without faults, of {len(compared)}", self.weights),
            Row("processes, sockets and files that the server left behind", self.left),
            Row("what `skyrl db check` found", self.unsound),
        ]


def text(rows: Sequence[Row]) -> str:
    """One line per row, and what was found below it."""
    lines = []
    for row in rows:
        lines.append(f"{len(row.found):>5}  {row.what}{f' ({row.told})' if row.told else ''}")
        lines += [f"         {found}" for found in row.found]
    return "\n".join(lines)
