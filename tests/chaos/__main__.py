"""Tenants who differ (`kinds`) work on a real server while a seeded script kills and stalls its processes. Then the
run looks for lost or wrong results, for differences from a run without faults, and for tenants that are too slow.

Before the faults each tenant works alone, for some two minutes; after them all go on until each has made a whole step,
and the training is done again without faults. After `--limit` minutes, or at SIGTERM, the run ends with what it has
found so far.

Prints the faults and the findings; writes chaos.json. Exits with 1 if there is a finding, or if the run was ended.

Usage: python -m tests.chaos [--seed 1] [--minutes 10] [--limit MINUTES] [--model DIRECTORY] [--out DIRECTORY]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine, program
from tests.chaos import report
from tests.chaos.course import Course
from tests.chaos.report import Row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", type=Path, help="a base model in place of the tiny one, with a chat template")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    parser.add_argument("--limit", type=float, help="minutes of the whole run (default: 10 + 2 × --minutes)")
    options = parser.parse_args()
    limit_s = 60 * (2 * options.minutes + 10 if options.limit is None else options.limit)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    directory = Path(tempfile.mkdtemp(prefix="skyrl-chaos-"))
    say(f"logs, journals and state are in {directory}")
    say(f"{options.minutes:g} minutes of faults; the whole run ends after {limit_s / 60:.0f} minutes at most")
    course = Course(directory, options.seed, options.minutes * 60, say, options.model and options.model.resolve())
    with closing(course):
        try:
            with program.ended_after(limit_s):
                course.run()
        finally:
            rows = _report(course, options)
    if any(row.found for row in rows):
        raise SystemExit(1)
    shutil.rmtree(directory)


def _report(course: Course, options: argparse.Namespace) -> list[Row]:
    rows = course.rows()
    print(f"\nseed {options.seed}, {options.minutes:g} minutes: {sum(course.injected.values())} faults")
    print("\n".join(f"{times:>5}  {name}" for name, times in sorted(course.injected.items()) if times))
    print("\n".join(["", course.work, *course.times, "", report.text(rows)]), flush=True)
    facts = machine.facts() | {"seed": options.seed, "minutes": options.minutes, "work": course.work}
    results = {"facts": facts, "injected": dict(course.injected), "rows": [asdict(row) for row in rows]}
    program.write(options.out / "chaos.json", results)
    return rows


if __name__ == "__main__":
    main()
