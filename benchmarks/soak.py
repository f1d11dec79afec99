"""A long steady load that shows whether memory grows, answers slow down or samples get lost. Prints the verdicts, and
writes soak.json with all points.

Usage: python -m benchmarks.soak [--minutes 30] [--rate 500] [--delay-ms 200] [--retention-s 120] [--out FILE]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import uvloop

from benchmarks import machine, program
from benchmarks.open_loop import OpenLoop
from benchmarks.processes import cpu_seconds, disk_bytes, open_files, parts_of, resident_mb, threads
from benchmarks.samples import LoadSpec
from benchmarks.series import drift, quantile
from benchmarks.stage import NullUpstream, gateway
from benchmarks.table import Row, Target, text_table
from skyrl.cli.demo.server import DemoServer

EVERY_S = 10.0
READ_AGAIN_AT = 0.8
"""Results are read again after this part of their retention."""
SETTLED = 1 / 3
"""After this part of the run caches and pools are full, and old results are swept. Drift is computed from the rest."""
FLAT = {
    "p50_ms": ("p50, ms", 10),
    "p99_ms": ("p99, ms", 50),
    "rss_mb": ("RSS of the API, MB", 10),
    "disk_mb": ("state on disk, MB", 25),
    "open_files": ("open files", 10),
    "threads": ("threads", 25),
}
"""What each series is, and its allowed drift in percent."""
Point = dict[str, float]


class Watch:
    """Records one point every ten seconds: the API process, the disk, and the samples that ended since the last
    point."""

    def __init__(self, server: DemoServer, loop: OpenLoop) -> None:
        self._pid = parts_of(server.pid)["api"]
        self._state, self._loop = server.state_dir, loop
        self._began = self._last = time.perf_counter()
        self._cpu_s, self._own_s = cpu_seconds(self._pid), time.process_time()
        self.points: list[Point] = []

    async def run(self, seconds: float) -> None:
        """Record and print points for `seconds`."""
        while time.perf_counter() - self._began < seconds:
            await asyncio.sleep(EVERY_S)
            self.points.append(self._point())
            print(", ".join(f"{key} {value:.4g}" for key, value in self.points[-1].items()), flush=True)

    def _point(self) -> Point:
        now, latencies = time.perf_counter(), self._loop.take_latencies()
        cpu_s, own_s = cpu_seconds(self._pid), time.process_time()
        passed, used, own = now - self._last, cpu_s - self._cpu_s, own_s - self._own_s
        self._last, self._cpu_s, self._own_s = now, cpu_s, own_s
        return {
            "second": now - self._began,
            "samples_per_s": len(latencies) / passed,
            "in_flight": self._loop.in_flight,
            "p50_ms": quantile(latencies, 0.5) * 1e3,
            "p99_ms": quantile(latencies, 0.99) * 1e3,
            "rss_mb": resident_mb(self._pid),
            "cores": used / passed,
            "generator_cores": own / passed,
            "disk_mb": disk_bytes(self._state) / 1e6,
            "open_files": open_files(self._pid),
            "threads": threads(self._pid),
        }


def verdicts(points: Sequence[Point], totals: dict[str, Any]) -> list[Row]:
    """Rows for the counts that must be 0, and for the drift of each series, in percent of its median over the settled
    part of the run."""
    failed = sum(totals["errors"].values())
    rows = [
        Row("soak", f"lost, of {totals['accepted']:,} accepted", "", totals["lost"], Target(0)),
        Row("soak", "errors", "", failed, Target(0), note=str(totals["errors"] or "")),
        Row("soak", f"other bytes when read again, of {totals['read_again']:,}", "", totals["differing"], Target(0)),
    ]
    settled = list(points)[int(len(points) * SETTLED) :]
    times = [point["second"] for point in settled]
    for key, (what, bound) in FLAT.items():
        values = [point[key] for point in settled]
        note = f"{quantile(values, 0):.4g} to {quantile(values, 1):.4g}, median {quantile(values, 0.5):.4g}"
        percent = drift(times, values) * 100
        rows.append(Row("soak", f"drift of {what}", "%", percent, Target(bound), note=note))
    return rows


async def soak(
    server: DemoServer, rate: float, seconds: float, retention_s: float
) -> tuple[list[Point], dict[str, Any]]:
    loop = OpenLoop(LoadSpec(server.url, "tinker", 0, seconds), rate, READ_AGAIN_AT * retention_s)
    watch = Watch(server, loop)
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        group.create_task(watch.run(seconds))
    return watch.points, loop.totals()


def main() -> None:
    parser = program.parser("soak", __doc__, out="soak/soak.json")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=500, help="samples per second")
    parser.add_argument("--delay-ms", type=float, default=200, help="delay of the null upstream's answers")
    parser.add_argument("--retention-s", type=float, default=120, help="how long the server keeps results")
    options = parser.parse_args()
    facts = machine.facts() | {"minutes": options.minutes, "rate": options.rate, "delay_ms": options.delay_ms}
    with NullUpstream() as upstream, gateway(upstream.url, result_retention_s=options.retention_s) as server:
        upstream.control(f"delay_ms={options.delay_ms}")
        points, totals = uvloop.run(soak(server, options.rate, options.minutes * 60, options.retention_s))
    rows = verdicts(points, totals)
    print("\n" + text_table(rows))
    table = [asdict(row) | {"met": row.met} for row in rows]
    results = {"facts": facts, "rows": table, "totals": totals, "points": points}
    program.write(options.out, results)
    if not all(row.met for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
