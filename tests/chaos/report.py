"""The findings of a run as rows. A good run has no finding in any row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.ledger import Findings
from tests.chaos.reference import Comparison


@dataclass(frozen=True)
class Row:
    """The findings of one kind; a good run has none. `told` is a remark for the printed line, with or without
    findings."""

    what: str
    found: list[str]
    told: str = ""


@dataclass
class Results:
    """Everything that the run compared. `tenants_with_other_weights` names the tenants whose final weights differ from
    those of the run without faults. `leftovers` lists processes and files that remained after the server's end.
    `times`: of each tenant's steps alone and after the last fault; `slow`: those above their bounds. `unchecked`: the
    parts of the run that were not done, because it was ended before.
    `database_faults` holds the output of `skyrl db check` if it failed."""

    unchecked: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    slow: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    tenants_with_other_weights: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    database_faults: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        by_tenant = self.comparisons
        samples = sum(comparison.samples for comparison in by_tenant.values())
        steps = sum(comparison.steps for comparison in by_tenant.values())
        wrong = [f"{name}: {comparison.wrong}" for name, comparison in by_tenant.items() if comparison.wrong]
        differing = [
            f"{name}: steps {comparison.differing}" for name, comparison in by_tenant.items() if comparison.differing
        ]
        largest = max((comparison.largest for comparison in by_tenant.values()), default=0.0)
        apart = [value for comparison in by_tenant.values() for value in comparison.apart]
        next_step = f", the next step's by {median(apart):.2g}" if apart else ""
        return [
            Row("parts of the run that were not done, so that rows below may have less", self.unchecked),
            Row("faults that the server did not recover from, and tenants that did not finish", self.troubles),
            Row(f"lost, of {self.findings.accepted:,} accepted requests", self.findings.lost),
            Row("results that differed when they were read again", self.findings.differing),
            Row(
                f"samples from wrong weights, of {samples:,}",
                wrong,
                f"the logprobs of their own weights differ by {largest:.1g} at most{next_step}",
            ),
            Row(f"RL steps with other answers than without faults, of {steps:,}", differing),
            Row(
                f"tenants with other final weights than without faults, of {len(by_tenant)}",
                self.tenants_with_other_weights,
            ),
            Row(f"tenants with steps above their share and a pass, of {len(self.times)}", self.slow),
            Row("processes, sockets and files that the server left behind", self.leftovers),
            Row("faults that `skyrl db check` found", self.database_faults),
        ]


def text(rows: Sequence[Row]) -> str:
    """One line per row, and its findings below."""
    lines = []
    for row in rows:
        lines.append(f"{len(row.found):>5}  {row.what}{f' ({row.told})' if row.told else ''}")
        lines += [f"         {found}" for found in row.found]
    return "\n".join(lines)
