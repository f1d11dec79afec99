"""Simulates what cannot run on one machine: 100 replicas behind the router and the engine's group, 100,000 sessions in
the database. All replicas are fake and in one process; router, group, database and API process are the real ones.

Usage: python -m benchmarks.scale [--quick] [--only PART ...] [--out DIRECTORY]

Prints one table for each part and writes scale.json. Takes some eight minutes, `--quick` some three; everything is on
loopback. The parts are router, policies, group, statements (SQLite and PostgreSQL) and api (the same).
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, scale_database, scale_group, scale_router
from benchmarks.series import without_nan
from benchmarks.table import number

Result = dict[str, Any]
WORKERS = (1, 10, 100)
SESSIONS = (1_000, 10_000, 100_000)
KINDS: tuple[scale_database.DatabaseKind, ...] = ("sqlite", "postgres")
RESULTS = Path("out/scale")


def _parts(quick: bool) -> dict[str, list[Callable[[], Result]]]:
    """By part: its measurements, in the order of the table's columns."""
    seconds = 3.0 if quick else 8.0
    sessions = SESSIONS[:2] if quick else SESSIONS
    on: list[tuple[scale_database.DatabaseKind, int]] = [(kind, count) for kind in KINDS for count in sessions]
    return {
        "router": [lambda n=n: scale_router.router(n, seconds) for n in WORKERS],
        "policies": [lambda n=n: scale_router.policies(n, sessions[-1]) for n in WORKERS],
        "group": [lambda n=n: scale_group.group(n, seconds) for n in WORKERS],
        "statements": [lambda k=k, n=n: scale_database.statements(k, n) for k, n in on],
        "api": [lambda k=k, n=n: scale_database.api(k, n, seconds) for k, n in on],
    }


def table(results: list[Result]) -> str:
    """One line for each value and one column for each measurement. A value that is itself a table is spread."""
    flat = [_flat(result) for result in results]
    names = list(dict.fromkeys(name for result in flat for name in result))
    lines = [[name, *(_text(result.get(name)) for result in flat)] for name in names]
    widths = [max(len(line[column]) for line in lines) for column in range(len(flat) + 1)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: list[str], widths: list[int]) -> str:
    cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
    return "  ".join([line[0].ljust(widths[0]), *cells])


def _flat(result: Result, prefix: str = "") -> Result:
    flat: Result = {}
    for name, value in result.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _text(value: float | str | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else number(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    names = list(_parts(quick=True))
    parser.add_argument("--quick", action="store_true", help="short windows, at most 10,000 sessions")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="PART", help=f"of: {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for scale.json (default: out/scale)")
    options = parser.parse_args()
    logging.getLogger("skyrl").setLevel(logging.CRITICAL)  # a killed replica is no news here
    began, facts, results = time.perf_counter(), machine.facts(), {}
    for name in options.only:
        results[name] = [run() for run in _parts(options.quick)[name]]
        print(f"{name}\n{table(results[name])}\n", flush=True)
    facts |= {"wall_s": round(time.perf_counter() - began), "quick": options.quick}
    options.out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(without_nan({"facts": facts, "results": results}), indent=1)
    (options.out / "scale.json").write_text(written + "\n")
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"written: {options.out / 'scale.json'}")


if __name__ == "__main__":
    main()
