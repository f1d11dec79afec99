"""Rows about forwarded samples: latency, throughput and CPU, each beside the direct upstream of the same minute."""

from __future__ import annotations

from typing import Any

from benchmarks.stage import Stage
from benchmarks.table import Row, Target

THROUGHPUT = {64: 2500, 512: 2000, 2048: 1500}
"""Samples per second that are wanted at so many in flight."""
DELAY_MS = 200
CPU_S_PER_1000 = 0.45
CORES = {"API": "server_cores", "generator": "generator_cores", "foreign": "foreign_cores"}

Result = dict[str, Any]


class Beside:
    """A forwarded load between two direct ones, which show by how much the machine drifted meanwhile."""

    def __init__(self, stage: Stage, row: str, in_flight: int, **changes: Any) -> None:
        before = stage.direct(row, in_flight, **changes)
        self.forwarded = stage.forwarded(row, stage.server, in_flight, **changes)
        self.other = stage.compared(row, in_flight, **changes)
        self.directs = (before, stage.direct(row, in_flight, **changes))

    def direct(self, key: str) -> float:
        return sum(result[key] for result in self.directs) / len(self.directs)

    def of_other(self, key: str) -> float | None:
        return None if self.other is None else self.other[key]

    def added(self, result: Result | None) -> float | None:
        """Median milliseconds more than the direct way."""
        return None if result is None else result["p50_ms"] - self.direct("p50_ms")

    @property
    def errors(self) -> int:
        """Of this server and of the direct way: without a sound floor the row says nothing."""
        return sum(errors(result) for result in (self.forwarded, *self.directs))

    @property
    def note(self) -> str:
        """What limits the figure, and how far the two direct loads are from each other."""
        before, after = (result["samples_per_s"] for result in self.directs)
        load = self.forwarded
        cores = [f"{whose} {load[key]:.2f}" for whose, key in CORES.items()]
        said = f"cores: {', '.join(cores)}"
        said += f"; p50 {load['p50_ms']:.2f} ms, p99 {load['p99_ms']:.2f} ms"
        said += f"; direct after / before {after / before:.2f}"
        if load["told_to_wait"]:
            said += f"; told to wait {load['told_to_wait']} times"
        if self.other is not None and errors(self.other):
            said += f"; other: {errors(self.other)} errors"
        failed = [result["errors"] for result in (load, *self.directs) if result["errors"]]
        return said + (f"; errors: {failed}" if failed else "")


def errors(result: Result) -> int:
    """Failures of every kind; a lost sample whose failure was seen is one of them already."""
    return max(sum(result["errors"].values()), result.get("lost", 0))


def latency(stage: Stage) -> list[Row]:
    beside = Beside(stage, "latency", 1)
    added = beside.added(beside.forwarded)
    assert added is not None
    return [
        Row(
            "latency",
            "added p50, 1 in flight",
            "ms",
            added,
            Target(1.2),
            beside.direct("p50_ms"),
            beside.added(beside.other),
            beside.errors,
            beside.note,
        )
    ]


def _throughput(stage: Stage, in_flight: int) -> list[Row]:
    name = f"throughput-{in_flight}"
    beside = Beside(stage, name, in_flight)
    key, target = "samples_per_s", Target(THROUGHPUT[in_flight], at_most=False)
    rows = [
        Row(
            name,
            f"samples/s, {in_flight:,} in flight",
            "/s",
            beside.forwarded[key],
            target,
            beside.direct(key),
            beside.of_other(key),
            beside.errors,
            beside.note,
        )
    ]
    if in_flight == 64:
        key, load = "server_cpu_s_per_1000", beside.forwarded
        note = f"{load[key] / stage.calibration_s:.1f} calibration loops"
        note += f"; the generator takes {load['generator_cpu_s_per_1000']:.3f} s per 1,000"
        what = "API CPU per 1,000 samples, 64 in flight"
        rows.append(Row(name, what, "s", load[key], Target(CPU_S_PER_1000), beside.direct(key), None, 0, note))
    return rows


def throughput_64(stage: Stage) -> list[Row]:
    return _throughput(stage, 64)


def throughput_512(stage: Stage) -> list[Row]:
    return _throughput(stage, 512)


def throughput_2048(stage: Stage) -> list[Row]:
    return _throughput(stage, 2048)


def delayed(stage: Stage) -> list[Row]:
    with stage.upstream.delayed(DELAY_MS):
        beside = Beside(stage, "delayed", 512)
    added = beside.added(beside.forwarded)
    assert added is not None
    what = f"added p50, 512 in flight, upstream {DELAY_MS} ms"
    direct, other = beside.direct("p50_ms"), beside.added(beside.other)
    return [Row("delayed", what, "ms", added, Target(50), direct, other, beside.errors, beside.note)]


def sequences(stage: Stage) -> list[Row]:
    beside = Beside(stage, "sequences", 64, sequences=8)
    key, target = "samples_per_s", Target(700, at_most=False)
    measured, direct, other = beside.forwarded[key], beside.direct(key), beside.of_other(key)
    what = "samples/s of 8 sequences, 64 in flight"
    return [Row("sequences", what, "/s", measured, target, direct, other, beside.errors, beside.note)]


def sdk(stage: Stage) -> list[Row]:
    """The Tinker SDK in a process of its own. "direct" is the plain generator on the same server."""
    seconds = str(2 * stage.window_s)
    plain = stage.forwarded("sdk", stage.server, 512)
    found = stage.generate("sdk", "sdk", "benchmarks.sdk_load", stage.server.url, "512", seconds)
    rate, cores = found["samples_per_s"], found["generator_cores"]
    note = f"the SDK's own process takes {cores:.2f} cores, {found['generator_cpu_s_per_1000']:.2f} s per 1,000"
    if found["errors"]:
        note += f"; errors: {found['errors']}"
    what = "samples/s, Tinker SDK, 512 in flight (direct: the generator)"
    return [Row("sdk", what, "/s", rate, None, plain["samples_per_s"], None, errors(found), note)]
