"""What the programs of this folder have in common: their command lines, the builds that they compare, and the files
that they write.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from benchmarks.machine import ROOT
from benchmarks.series import without_nan


class _Ended(BaseException):
    """SIGTERM came, or the time is up."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """The first SIGTERM, or so many seconds, end the block: the program goes on with what it has measured. Another
    SIGTERM is ignored."""

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Ended("the time is up" if number == signal.SIGALRM else "SIGTERM came")

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Ended as ended:
        print(f"ended early: {ended}", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def parser(
    name: str, description: str | None, *, out: str | None = None, quick: str | None = None, against: bool = False
) -> argparse.ArgumentParser:
    """The command line of `python -m benchmarks.NAME`. `description`: the module's docstring, whose lines stay. `out`,
    `quick` (its help) and `against`: the program has these options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if against:
        parser.add_argument("--against", metavar="COMMIT", help="also measure the build of this commit")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if out:
        parser.add_argument("--out", type=Path, default=Path("out", out), help=f"the result (default: out/{out})")
    return parser


def write(file: Path, found: Any) -> None:
    """Write JSON, with null for what was not measured, and say where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(without_nan(found), indent=1) + "\n")
    print(f"written: {file}")


def taken_out(commit: str, directory: Path) -> Path:
    """The directory, with the files of that commit of this repository: a build to measure beside this one."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(directory, filter="data")
    return directory


def builds(against: str | None, stack: ExitStack) -> dict[str, Path]:
    """The root of this build, "now", and that of the commit `against`, "before", there until the stack ends."""
    roots = {"now": ROOT}
    if against is not None:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-before-")))
        roots["before"] = taken_out(against, directory)
    return roots
