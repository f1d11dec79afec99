"""How long a tenant's step may take beside the others: its share, which is the number of tenants times its step alone,
and one pass, the longest update of another tenant alone. Knows journals, no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.chaos.journal import Step
from tests.chaos.kinds import KINDS


@dataclass
class Times:
    """The steps of each tenant alone. The first one, in which caches get warm, counts if it is the only one."""

    alone: dict[str, Sequence[Step]] = field(default_factory=dict)

    def own_s(self, kind: str) -> float:
        return median(step.seconds for step in self.alone[kind][1:] or self.alone[kind])

    def pass_s(self, kind: str) -> float:
        return max(step.train_s for other in KINDS if other != kind for step in self.alone[other])

    def bound_s(self, kind: str) -> float:
        return len(KINDS) * self.own_s(kind) + self.pass_s(kind)

    @property
    def calm_s(self) -> float:
        """After this time a tenant without a whole step is beyond its bound: it had to end the step that ran, too."""
        return 2 * max(map(self.bound_s, KINDS)) + 1.0

    def compared(self, calm: Mapping[str, Sequence[Step]], waited_s: float) -> tuple[list[str], list[str]]:
        """A line for each tenant with `calm`, its whole steps beside all others without faults, and the lines of those
        whose steps took too long. `waited_s`: how long all worked without faults."""
        told: list[str] = []
        slow: list[str] = []
        for kind, steps in calm.items():
            seconds = [step.seconds for step in steps]
            line = f"{kind}: {self.own_s(kind):.1f} s alone, bound {len(KINDS)} × {self.own_s(kind):.1f} "
            line += f"+ {self.pass_s(kind):.1f} = {self.bound_s(kind):.1f} s, beside the others "
            if seconds:
                line += f"{len(seconds)} steps: {median(seconds):.1f} s (median), {max(seconds):.1f} s at most"
            else:
                line += f"no whole step in {waited_s:.0f} s"
            told.append(line)
            if (median(seconds) if seconds else waited_s / 2) > self.bound_s(kind):
                slow.append(line)
        return told, slow
