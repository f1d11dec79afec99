"""A long steady load that shows whether memory grows, answers slow down or samples get lost. Prints the verdicts;
writes soak.json and soak.html.

Usage: python -m benchmarks.soak [--minutes 30] [--rate 500] [--delay-ms 200] [--retention-s 120] [--out DIRECTORY]
"""

from __future__ import annotations

import argparse
import asyncio
import html
import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import uvloop
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks import machine
from benchmarks.open_loop import OpenLoop
from benchmarks.processes import cpu_seconds, disk_bytes, open_files, parts_of, resident_mb, threads
from benchmarks.samples import LoadSpec
from benchmarks.series import drift, quantile, without_nan
from benchmarks.stage import NullUpstream, gateway
from benchmarks.table import COLUMNS, Row, Target, text_table
from skyrl.cli.demo.server import DemoServer

matplotlib.use("Agg")
EVERY_S = 10.0
READ_AGAIN_AT = 0.8
"""Results are read again after this part of their retention."""
SETTLED = 1 / 3
"""After this part of the run caches and pools are full, and old results are swept. Drift is computed from the rest."""
PLOTTED = {
    "samples_per_s": "samples/s",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "rss_mb": "RSS of the API, MB",
    "cores": "CPU of the API, cores",
    "disk_mb": "state on disk, MB",
    "open_files": "open files",
    "threads": "threads",
}
FLAT = {"rss_mb": 10, "p50_ms": 10, "p99_ms": 50, "open_files": 10, "threads": 25, "disk_mb": 25}
"""The allowed drift of each series in percent."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse; width: 100% } td, th { padding: .3rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-top: 1px solid #dde3ea }
.yes { color: #22763b } .no { color: #b3261e; font-weight: 600 }
small { color: #5b6875 } svg { max-width: 100%; height: auto }
"""

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
    for key, bound in FLAT.items():
        values = [point[key] for point in settled]
        note = f"{quantile(values, 0):.4g} to {quantile(values, 1):.4g}, median {quantile(values, 0.5):.4g}"
        percent = drift(times, values) * 100
        rows.append(Row("soak", f"drift of {PLOTTED[key]}", "%", percent, Target(bound), note=note))
    return rows


def inline_svg(figure: Figure) -> str:
    """The figure as an SVG element for an HTML page. Closes the figure."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "skyrl"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def plots(points: Sequence[Point]) -> str:
    figure, axes = pyplot.subplots(4, 2, figsize=(10, 10), layout="constrained", sharex=True)
    minutes = [point["second"] / 60 for point in points]
    for axis, (key, label) in zip(axes.flat, PLOTTED.items(), strict=True):
        values = [point[key] for point in points]
        axis.plot(minutes, values, color="#2364aa")
        axis.set(title=label, ylim=(0, 1.15 * max([1e-9, *values])))
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("minutes")
    return inline_svg(figure)


def rows_table(rows: Sequence[Row]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{header}</th>" for header in COLUMNS) + "</tr>"]
    for row in rows:
        cells = [html.escape(cell) for cell in row.cells()]
        if row.note:
            cells[0] += f"<br><small>{html.escape(row.note)}</small>"
        kind = {True: "yes", False: "no", None: ""}[row.met]
        inner = "".join(f"<td>{cell}</td>" for cell in cells[:-1])
        lines.append(f'<tr>{inner}<td class="{kind}">{cells[-1]}</td></tr>')
    return "\n".join([*lines, "</table>"])


def page(facts: dict[str, Any], rows: Sequence[Row], points: Sequence[Point]) -> str:
    """A complete HTML page that loads nothing."""
    said = " · ".join(f"{key}: {html.escape(str(value))}" for key, value in facts.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Soak</title><style>{STYLE}</style></head>'
        f"<body><h1>Soak</h1>\n<p><small>{said}</small></p>\n{rows_table(rows)}\n{plots(points)}\n</body></html>\n"
    )


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=500, help="samples per second")
    parser.add_argument("--delay-ms", type=float, default=200, help="delay of the null upstream's answers")
    parser.add_argument("--retention-s", type=float, default=120, help="how long the server keeps results")
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    options = parser.parse_args()
    facts = machine.facts() | {"minutes": options.minutes, "rate": options.rate, "delay_ms": options.delay_ms}
    with NullUpstream() as upstream, gateway(upstream.url, result_retention_s=options.retention_s) as server:
        upstream.control(f"delay_ms={options.delay_ms}")
        points, totals = uvloop.run(soak(server, options.rate, options.minutes * 60, options.retention_s))
    rows = verdicts(points, totals)
    print("\n" + text_table(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    table = [asdict(row) | {"met": row.met} for row in rows]
    results = {"facts": facts, "rows": table, "totals": totals, "points": points}
    (options.out / "soak.json").write_text(json.dumps(without_nan(results), indent=1) + "\n")
    (options.out / "soak.html").write_text(page(facts, rows, points))
    if not all(row.met for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
