"""Work on a thread beside an event loop that must stay quick."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

SHORT_SWITCH_S, NORMAL_SWITCH_S = 0.0002, sys.getswitchinterval()
"""Python's switch interval during such work, and otherwise. After this time a thread gives the interpreter lock to
another thread that waits."""

T = TypeVar("T")


def with_short_switches(work: Callable[[], T]) -> T:
    """Run `work` with SHORT_SWITCH_S. The event loop gives up the lock at each system call; with NORMAL_SWITCH_S it
    would wait 5 ms each time to get the lock back. If two calls overlap, the first that ends sets NORMAL_SWITCH_S for
    both, so SHORT_SWITCH_S never stays."""
    sys.setswitchinterval(SHORT_SWITCH_S)
    try:
        return work()
    finally:
        sys.setswitchinterval(NORMAL_SWITCH_S)
