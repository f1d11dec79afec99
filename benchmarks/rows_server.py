"""Rows about the server itself: memory, growth of its database."""

from __future__ import annotations

import time

from benchmarks.processes import disk_bytes, parts_of, peak_resident_mb, resident_mb
from benchmarks.rows_forwarding import errors
from benchmarks.stage import Stage, gateway
from benchmarks.table import Row, Target
from skyrl.cli.demo.server import DemoServer
from skyrl.storage.db.database import Database

IN_FLIGHT = 2048
RETENTION_S, QUICK_RETENTION_S = 15, 8
RECLAIM_AT_MOST_S = 100.0
BETWEEN_SWEEPS_S = 15.0


def memory(stage: Stage) -> list[Row]:
    with gateway(stage.upstream.url) as server:
        api = parts_of(server.pid)["api"]
        idle_mb = resident_mb(api)
        load = stage.forwarded("memory", server, IN_FLIGHT)
        peak_mb = peak_resident_mb(api)
    sent = load["accepted"]
    note = f"fresh server: {idle_mb:.0f} MB before, then {sent:,} samples in all"
    what = f"peak RSS of the API, {IN_FLIGHT:,} in flight"
    return [Row("memory", what, "MB", peak_mb, Target(250), errors=errors(load), note=note)]


def growth(stage: Stage) -> list[Row]:
    """Bytes on disk per sample, and the share that is left after the retention (waits for a sweep)."""
    retention_s = QUICK_RETENTION_S if stage.quick else RETENTION_S
    with gateway(stage.upstream.url, result_retention_s=retention_s) as server:
        before = disk_bytes(server.state_dir)
        load = stage.forwarded("growth", server, 64)
        # SQLite's log has a fixed bound, so it is left out of the growth.
        Database(f"sqlite:///{server.state_dir / 'skyrl.db'}").empty_log()
        grown = disk_bytes(server.state_dir)
        kept = _after_retention(server, grown)
    stage.raw.append({"row": "growth", "path": "disk", "bytes": {"before": before, "grown": grown, "kept": kept}})
    per_sample = (grown - before) / max(1, load["accepted"]) / 1e3
    left = (kept - before) / max(1, grown - before) * 100
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in (before, grown, kept))
    note = f"{load['accepted']:,} samples; MB on disk before, after and when retention is over: {sizes}"
    return [
        Row("growth", "growth on disk per sample", "kB", per_sample, Target(6), errors=errors(load), note=note),
        Row("growth", "part of the growth left after retention", "%", left),
    ]


def _after_retention(server: DemoServer, grown: int) -> int:
    """Bytes on disk after they have shrunk and stay the same, or after RECLAIM_AT_MOST_S."""
    began, smallest, since = time.monotonic(), grown, time.monotonic()
    while time.monotonic() - began < RECLAIM_AT_MOST_S:
        time.sleep(1)
        size = disk_bytes(server.state_dir)
        if size < smallest:
            smallest, since = size, time.monotonic()
        if smallest < grown and time.monotonic() - since > BETWEEN_SWEEPS_S:
            break
    return smallest
