"""Rows about forwarded samples: latency, throughput and CPU, each compared with the direct upstream in the same
minute."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.stage import Stage, gateway, router
from benchmarks.table import Row, Target

THROUGHPUT = {64: 4000, 512: 3500, 2048: 3500}
"""Target of samples per second by the number of samples in flight."""
DELAY_MS = 200
CPU_S_PER_1000 = 0.45
CORES = {"API": "server_cores", "generator": "generator_cores", "foreign": "foreign_cores"}

Result = dict[str, Any]


class Comparison:
    """A forwarded load between two direct loads. The direct loads show how much the machine changed meanwhile."""

    def __init__(self, stage: Stage, name: str, in_flight: int, **changes: Any) -> None:
        self._name = name
        before = stage.direct(name, in_flight, **changes)
        self.forwarded = stage.forwarded(name, stage.server, in_flight, **changes)
        self._directs = (before, stage.direct(name, in_flight, **changes))

    def direct(self, key: str) -> float:
        return sum(result[key] for result in self._directs) / len(self._directs)

    def rate_row(self, what: str, target: Target) -> Row:
        key = "samples_per_s"
        return self._row(what, "/s", self.forwarded[key], target, key)

    def added_row(self, what: str, target: Target) -> Row:
        """The median in milliseconds minus the median of the direct loads."""
        key = "p50_ms"
        return self._row(what, "ms", self.forwarded[key] - self.direct(key), target, key)

    def _row(self, what: str, unit: str, value: float, target: Target, key: str) -> Row:
        """With errors in a direct load the comparison means nothing, so its errors count, too."""
        failed = sum(errors(result) for result in (self.forwarded, *self._directs))
        return Row(self._name, what, unit, value, target, self.direct(key), failed, self._note())

    def _note(self) -> str:
        """The cores that each process took, the percentiles, and the ratio of the two direct loads."""
        before, after = (result["samples_per_s"] for result in self._directs)
        load = self.forwarded
        cores = [f"{whose} {load[key]:.2f}" for whose, key in CORES.items()]
        note = f"cores: {', '.join(cores)}"
        note += f"; p50 {load['p50_ms']:.2f} ms, p99 {load['p99_ms']:.2f} ms"
        note += f"; direct after / before {after / before:.2f}"
        if load["told_to_wait"]:
            note += f"; told to wait {load['told_to_wait']} times"
        failed = [result["errors"] for result in (load, *self._directs) if result["errors"]]
        return note + (f"; errors: {failed}" if failed else "")


def errors(result: Result) -> int:
    """The number of failures. Usually a lost sample is counted among the errors too, so the larger number is taken."""
    return max(sum(result["errors"].values()), result.get("lost", 0))


def latency(stage: Stage) -> list[Row]:
    return [Comparison(stage, "latency", 1).added_row("added p50, 1 in flight", Target(1.2))]


def throughput(stage: Stage, in_flight: int) -> list[Row]:
    name = f"throughput-{in_flight}"
    comparison = Comparison(stage, name, in_flight)
    target = Target(THROUGHPUT[in_flight], at_most=False)
    rows = [comparison.rate_row(f"samples/s, {in_flight:,} in flight", target)]
    if in_flight == 64:
        key, load = "server_cpu_s_per_1000", comparison.forwarded
        note = f"{load[key] / stage.calibration_s:.1f} calibration loops"
        note += f"; the generator takes {load['generator_cpu_s_per_1000']:.3f} s per 1,000"
        what = "API CPU per 1,000 samples, 64 in flight"
        rows.append(Row(name, what, "s", load[key], Target(CPU_S_PER_1000), comparison.direct(key), note=note))
    return rows


def delayed(stage: Stage) -> list[Row]:
    with stage.upstream.delayed(DELAY_MS):
        comparison = Comparison(stage, "delayed", 512, spread_s=DELAY_MS / 1e3)
    return [comparison.added_row(f"added p50, 512 in flight, upstream {DELAY_MS} ms", Target(20))]


def sequences(stage: Stage) -> list[Row]:
    comparison = Comparison(stage, "sequences", 64, sequences=8)
    return [comparison.rate_row("samples/s of 8 sequences, 64 in flight", Target(700, at_most=False))]


def sdk(stage: Stage) -> list[Row]:
    """The Tinker SDK in its own process. Here "direct" is the plain load generator on the same server."""
    seconds = str(2 * stage.window_s)
    plain = stage.forwarded("sdk", stage.server, 512)
    sdk_load = stage.generate("sdk", "sdk", "benchmarks.sdk_load", stage.server.url, "512", seconds)
    rate, cores = sdk_load["samples_per_s"], sdk_load["generator_cores"]
    note = f"the SDK's own process takes {cores:.2f} cores, {sdk_load['generator_cpu_s_per_1000']:.2f} s per 1,000"
    if sdk_load["errors"]:
        note += f"; errors: {sdk_load['errors']}"
    what = "samples/s, Tinker SDK, 512 in flight (direct: the generator)"
    return [Row("sdk", what, "/s", rate, None, plain["samples_per_s"], errors(sdk_load), note)]


def through_router(stage: Stage) -> list[Row]:
    """What a router between the server and the upstream adds. Here "direct" is the server without a router."""
    with router(stage.upstream.url) as router_url, gateway(router_url) as routed:
        plain, behind = [], []
        for _ in range(3):
            plain.append(stage.forwarded("through-router", stage.server, 1))
            behind.append(stage.forwarded("through-router", routed, 1))
    without = statistics.median(result["p50_ms"] for result in plain)
    added = statistics.median(result["p50_ms"] for result in behind) - without
    failed = sum(errors(result) for result in (*plain, *behind))
    what = "p50 that a router adds to a sample, 1 in flight (direct: without)"
    return [Row("through-router", what, "ms", added, Target(0.5), without, failed)]
