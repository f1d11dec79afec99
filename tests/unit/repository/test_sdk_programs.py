from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.sdk_programs import TRACED, succeeded

ABORTED = "Fatal Python error: Aborted\n\nThread 0x00007fe44a658b80 (most recent call first):\n  <no Python frame>\n"
WORKING = 'Thread 0x00007fe44a659b80 (most recent call first):\n  File "train.py", line 7 in step\n'


@pytest.mark.parametrize(
    ("program", "well"),
    [("print(1)", True), ("raise SystemExit(1)", False), ("import os; os.abort()", False)],
)
def test_a_program_that_fails_or_aborts_midway_has_not_succeeded(program: str, well: bool) -> None:
    done = subprocess.run([sys.executable, "-S", "-c", program], env=TRACED, capture_output=True, text=True)
    assert succeeded(done.returncode, done.stderr) == well


def test_an_abort_counts_as_success_only_when_no_thread_runs_python() -> None:
    assert succeeded(-signal.SIGABRT, ABORTED)
    assert not succeeded(-signal.SIGABRT, ABORTED + WORKING)
    assert not succeeded(-signal.SIGABRT, "")
    assert not succeeded(-signal.SIGSEGV, ABORTED)
