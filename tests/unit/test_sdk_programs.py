from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sdk_programs import TRACED, succeeded


@pytest.mark.parametrize(
    ("program", "well"),
    [("print(1)", True), ("raise SystemExit(1)", False), ("import os; os.abort()", False)],
)
def test_a_program_that_fails_or_aborts_midway_has_not_succeeded(program: str, well: bool) -> None:
    done = subprocess.run([sys.executable, "-S", "-c", program], env=TRACED, capture_output=True, text=True)
    assert succeeded(done.returncode, done.stderr) == well
    assert succeeded(-6, "Fatal Python error: Aborted\n\nThread 0x00007fe44a658b80:\n  <no Python frame>\n")
