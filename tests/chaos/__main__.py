"""Two tenants' RL on a real server whose processes are killed and stalled at random: is anything lost, or other than
without that? Prints what was done to it and what was found; writes chaos.json. Exits with 1 if anything was found.

Usage: python -m tests.chaos [--seed 1] [--minutes 10] [--out DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine
from tests.chaos import report
from tests.chaos.course import Course


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    asked = parser.parse_args()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    asked.out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="skyrl-chaos-"))
    say(f"logs, journals and state are in {directory}")
    course = Course(directory, asked.seed, asked.minutes * 60, say)
    rows = course.run()
    print(f"\nseed {asked.seed}, {asked.minutes:g} minutes: {sum(course.injected.values())} faults")
    print("\n".join(f"{times:>5}  {name}" for name, times in sorted(course.injected.items()) if times))
    print(f"\n{course.work}\n\n{report.text(rows)}")
    facts = machine.facts() | {"seed": asked.seed, "minutes": asked.minutes, "work": course.work}
    results = {"facts": facts, "injected": dict(course.injected), "rows": [asdict(row) for row in rows]}
    (asked.out / "chaos.json").write_text(json.dumps(results, indent=1) + "\n")
    if any(row.found for row in rows):
        raise SystemExit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
