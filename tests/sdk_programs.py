"""How a process that uses the SDK ends."""

from __future__ import annotations

import signal

TRACED = {"PYTHONFAULTHANDLER": "1"}
"""Variables of the process, for `succeeded`: Python writes to stderr where it was when the process aborted."""


def succeeded(code: int, stderr: str) -> bool:
    """Whether the program ran to its end.

    pyqwest, the HTTP library of the SDK since 0.25, sometimes aborts the process after Python has ended, on a busy
    machine in some five of a hundred runs (https://github.com/curioswitch/pyqwest/issues/164). No Python runs then, so
    the program was over, well or with an exception: look at its output, too. An abort that comes earlier is a failure.
    """
    if code != -signal.SIGABRT:
        return code == 0
    threads = stderr.rpartition("Fatal Python error: Aborted")[2]
    return "<no Python frame>" in threads and 'File "' not in threads
