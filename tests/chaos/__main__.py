"""Tenants who differ (`kinds`) work on a real server while a seeded script kills and stalls its processes. Then the
run looks for lost or wrong results, for differences from a run without faults, and for tenants that are too slow.

Prints the faults and the findings; writes chaos.json. Exits with 1 if there is a finding.

Usage: python -m tests.chaos [--seed 1] [--minutes 10] [--model DIRECTORY] [--out DIRECTORY]
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
    parser.add_argument("--model", type=Path, help="a base model in place of the tiny one, with a chat template")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    options = parser.parse_args()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    options.out.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="skyrl-chaos-"))
    say(f"logs, journals and state are in {directory}")
    course = Course(directory, options.seed, options.minutes * 60, say, options.model and options.model.resolve())
    rows = course.run()
    print(f"\nseed {options.seed}, {options.minutes:g} minutes: {sum(course.injected.values())} faults")
    print("\n".join(f"{times:>5}  {name}" for name, times in sorted(course.injected.items()) if times))
    print(f"\n{course.work}\n\n{report.text(rows)}")
    facts = machine.facts() | {"seed": options.seed, "minutes": options.minutes, "work": course.work}
    results = {"facts": facts, "injected": dict(course.injected), "rows": [asdict(row) for row in rows]}
    (options.out / "chaos.json").write_text(json.dumps(results, indent=1) + "\n")
    if any(row.found for row in rows):
        raise SystemExit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
