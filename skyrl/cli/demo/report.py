"""The results of the demo: a table, a plot, and a JSON file with all figures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from skyrl.cli.demo.latency import Latency
from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.tenants import Run

GAIN_WINDOW = 5
MIN_GAIN = 0.15
"""How much a tenant's reward must rise: the mean of the last 5 steps minus the mean of the first 5, out of 1."""
JUDGED_STEPS = Settings().steps
"""A shorter run cannot reach MIN_GAIN: its rewards are shown and not judged."""


@dataclass
class WallTimes:
    """Seconds for the tenants one after the other (`serial`), and at the same time (`parallel`)."""

    serial: float
    parallel: float

    @property
    def speedup(self) -> float:
        return self.serial / self.parallel


@dataclass
class Findings:
    """All results of one demo. `phases`: seconds per phase, in order."""

    runs: dict[str, Run] = field(default_factory=dict)
    forwarded: int = 0
    engine_served: int = 0
    latency: Latency | None = None
    walls: WallTimes | None = None
    colocated_walls: WallTimes | None = None
    colocated_latency: Latency | None = None
    phases: dict[str, float] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Failed expectations: rewards that did not rise enough, samples that went through the engine."""
        failures = [
            f"tenant {name}: reward rose by {run.gain(GAIN_WINDOW):.2f}, less than {MIN_GAIN}"
            for name, run in self.runs.items()
            if len(run.rewards) >= JUDGED_STEPS and run.gain(GAIN_WINDOW) < MIN_GAIN
        ]
        if self.engine_served:
            failures.append(f"{self.engine_served} samples went through the engine loop")
        return failures

    def notes(self) -> list[str]:
        """Expectations that were not checked, and why."""
        short = [len(run.rewards) for run in self.runs.values() if len(run.rewards) < JUDGED_STEPS]
        if not short:
            return []
        return [f"rewards were not judged: {min(short)} steps are too few, {JUDGED_STEPS} (the default) are enough"]

    def figures(self) -> dict[str, Any]:
        """The figures as JSON: counts, seconds and ratios."""
        figures: dict[str, Any] = {
            "reward": {
                name: {"first": r.rewards[:GAIN_WINDOW], "last": r.rewards[-GAIN_WINDOW:], "gain": r.gain(GAIN_WINDOW)}
                for name, r in self.runs.items()
            },
            "samples_forwarded": self.forwarded,
            "samples_through_engine": self.engine_served,
            "phases_s": self.phases,
        }
        for key, latency in (("latency", self.latency), ("latency_colocated", self.colocated_latency)):
            if latency is not None:
                figures[key] = {
                    "idle_p50_s": latency.quantile(latency.idle, 0.5),
                    "idle_p95_s": latency.quantile(latency.idle, 0.95),
                    "busy_p50_s": latency.quantile(latency.busy, 0.5),
                    "busy_p95_s": latency.quantile(latency.busy, 0.95),
                    "busy_samples": len(latency.busy),
                    "stream_s": latency.stream,
                    "ratio": latency.ratio,
                }
        for key, walls in (("walls", self.walls), ("walls_colocated", self.colocated_walls)):
            if walls is not None:
                figures[key] = {
                    "a_then_b_s": walls.serial,
                    "a_beside_b_s": walls.parallel,
                    "speedup": walls.speedup,
                }
        if self.walls is not None and self.colocated_walls is not None:
            figures["forwarded_over_colocated_beside"] = self.colocated_walls.parallel / self.walls.parallel
        return figures


def print_report(console: Console, findings: Findings) -> None:
    table = Table(title="Results", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, run in findings.runs.items():
        window = min(GAIN_WINDOW, max(1, len(run.rewards) // 2))
        first, last = sum(run.rewards[:window]) / window, sum(run.rewards[-window:]) / window
        table.add_row(f"reward of tenant {name}, first to last {window} steps", f"{first:.2f} → {last:.2f}")
    table.add_row("samples forwarded to vLLM by the API", str(findings.forwarded))
    table.add_row("samples served through the engine loop", str(findings.engine_served))
    for label, latency in (("", findings.latency), (" (colocated)", findings.colocated_latency)):
        if latency is None:
            continue
        idle = f"{latency.quantile(latency.idle, 0.5) * 1e3:.0f} / {latency.quantile(latency.idle, 0.95) * 1e3:.0f} ms"
        busy = f"{latency.quantile(latency.busy, 0.5) * 1e3:.0f} / {latency.quantile(latency.busy, 0.95) * 1e3:.0f} ms"
        table.add_row(f"sample p50 / p95, training idle{label}", idle)
        table.add_row(f"sample p50 / p95, during a training stream{label}", busy)
        table.add_row(
            f"  … as a share of the stream's {latency.stream:.1f} s ({len(latency.busy)} samples)",
            f"{latency.ratio:.3f}",
        )
    for label, walls in (("forwarded", findings.walls), ("colocate_all: true", findings.colocated_walls)):
        if walls is not None:
            table.add_row(f"A then B / A beside B, {label}", f"{walls.serial:.1f} / {walls.parallel:.1f} s")
            table.add_row("  … speed-up", f"{walls.speedup:.2f}×")
    if findings.walls is not None and findings.colocated_walls is not None:
        gain = findings.colocated_walls.parallel / findings.walls.parallel
        table.add_row("A beside B: forwarding is faster than the engine loop by", f"{gain:.2f}×")
    for phase, seconds in findings.phases.items():
        table.add_row(f"time: {phase}", f"{seconds:.1f} s")
    console.print(table)


def plot(runs: dict[str, Run], file: Path) -> None:
    """Reward curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, run in runs.items():
        axes.plot(range(len(run.rewards)), run.rewards, marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Two tenants, one server, side by side")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def write_figures(findings: Findings, file: Path) -> None:
    file.write_text(json.dumps(findings.figures(), indent=2) + "\n")
