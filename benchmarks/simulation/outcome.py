"""What is read from a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

Waits = list[tuple[float, float, int]]
"""Of each sample, step or save: when it ended, how long it took in seconds, and its tenant."""


@dataclass
class Outcome:
    """`utilisation` is the busy share of each part's cores, `cpu_ms` CPU per sample, `wakes` the wake-ups of a part's
    threads per sample, `per_second` the samples that ended in each second, `repeated` the samples that were lost with a
    replica and sent again."""

    samples_per_s: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    cpu_ms: dict[str, float]
    utilisation: dict[str, float]
    wakes: dict[str, float] = field(default_factory=dict[str, float])
    per_second: list[int] = field(default_factory=list[int])
    waits: Waits = field(default_factory=Waits)
    trained: Waits = field(default_factory=Waits)
    saved: Waits = field(default_factory=Waits)
    repeated: int = 0
    events: int = 0
