"""Runs every benchmark: prints the table, and writes JSON with the raw results.

Usage: python -m benchmarks [--quick] [--only ROW ...] [--out DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import tinker

from benchmarks import (
    affinity,
    agent_sessions,
    agent_tokenising,
    beside_pictures,
    machine,
    program,
    radix,
    restarts,
    routers,
    rows_forwarding,
    rows_server,
    several_models,
    training,
    weights,
)
from benchmarks.calibration import calibrate
from benchmarks.stage import NullUpstream, Stage
from benchmarks.table import Row, text_table
from skyrl.cli.demo.server import ServerFailed

STEPS: dict[str, Callable[[Stage], list[Row]]] = {
    "latency": rows_forwarding.latency,
    **{f"throughput-{number}": partial(rows_forwarding.throughput, in_flight=number) for number in (64, 512, 2048)},
    "delayed": rows_forwarding.delayed,
    "sequences": rows_forwarding.sequences,
    "sdk": rows_forwarding.sdk,
    "memory": rows_server.memory,
    "training": training.training,
    "restarts": restarts.restarts,
    "growth": rows_server.growth,
    "routers": routers.compare_routers,
    "through-router": rows_forwarding.through_router,
    "radix": radix.compare,
    "affinity": affinity.compare,
    "weights": weights.compare,
    "beside-pictures": beside_pictures.compare,
    "several-models": several_models.compare,
    "agent-sessions": agent_sessions.compare,
    "agent-tokenising": agent_tokenising.compare,
}
DISTURBED_CORES = 0.3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows, rougher")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="ROW", help=f"of: {', '.join(STEPS)}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="directory for bench.json")
    return parser.parse_args()


def run(stage: Stage, names: list[str]) -> list[Row]:
    """Run the named benchmarks. If one fails, its row counts an error and the others run all the same."""
    rows: list[Row] = []
    try:
        for name in names:
            print(f"{name}...", end=" ", flush=True)
            began = time.perf_counter()
            try:
                rows += STEPS[name](stage)
            except (OSError, ServerFailed, subprocess.SubprocessError, tinker.TinkerError) as error:
                rows.append(Row(name, name, "", float("nan"), errors=1, note=str(error)[-300:]))
            print(f"{time.perf_counter() - began:.0f} s", flush=True)
    finally:
        stage.close()
    return rows


def main() -> None:
    options = _arguments()
    os.environ.setdefault("SKYRL_THREADS", "1")  # of the servers: the recorded tables are of one thread
    began = time.perf_counter()
    facts = machine.facts()
    with NullUpstream() as upstream:
        stage = Stage(upstream, options.quick, facts["calibration_cpu_s"])
        rows = run(stage, options.only or list(STEPS))
    facts |= {
        "calibration_after_cpu_s": calibrate(),
        "wall_s": round(time.perf_counter() - began),
        "quick": options.quick,
    }
    foreign = max((load.get("foreign_cores", 0.0) for load in stage.raw), default=0.0)
    facts["foreign_cores"] = round(foreign, 2)
    print("\n" + text_table(rows) + "\n")
    if foreign > DISTURBED_CORES:
        print(f"Disturbed: other programs took up to {foreign:.1f} cores, so the figures are worse than the server.")
    table = [asdict(row) | {"met": row.met, "ratio": row.ratio} for row in rows]
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    program.write(options.out / "bench.json", {"facts": facts, "rows": table, "raw": stage.raw})
    if any(row.errors for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
