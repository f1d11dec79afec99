"""Garbage collection of a process that serves: small passes by the clock, and a rare one over everything.

Python begins a pass after a number of new objects, less those that were freed meanwhile. Renewed long polls free as
many as they make, so the new ones gather without a pass, and then one pass over all of them stops the event loop for
0.1 to 0.4 s. By the clock, a pass looks at what one period has made. Hardly anything here makes cycles, so what
survives its first pass is looked at again only every ALL_S, or when the process has grown.
"""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

from skyrl.runtime.processes.usage import resident_bytes

YOUNG_S = 0.1
"""Seconds between two passes over the new objects. The event loop makes at most about 20,000 that stay in this time,
which takes some milliseconds; an idle process pays some microseconds."""
ALL_S = 600.0
"""Seconds between two passes over all objects but those of the start: 0.1 to 0.4 s beside 8,192 waiting polls."""
LOOK_S, GROWN_BYTES = 5.0, 2**30
"""Seconds between two looks at the resident memory, and the growth since the last pass over all objects that asks for
another: old cycles may hold much, such as a traceback with a body. 8,192 polls take a quarter of that."""


def collect_by_the_clock() -> None:
    """From now on the running event loop collects garbage. Modules and services, which live until the end, are
    excluded."""
    gc.collect()
    gc.freeze()
    gc.disable()
    _schedule(YOUNG_S, 0)
    _schedule(ALL_S, 2)
    if Path("/proc/self").exists():
        _look(resident_bytes(os.getpid()))


def _schedule(period_s: float, generation: int) -> None:
    asyncio.get_running_loop().call_later(period_s, _collect, period_s, generation)


def _collect(period_s: float, generation: int) -> None:
    gc.collect(generation)
    _schedule(period_s, generation)


def _look(after_pass: int) -> None:
    """`after_pass`: the resident bytes after the last pass that growth has asked for."""
    now = resident_bytes(os.getpid())
    if now > after_pass + GROWN_BYTES:
        gc.collect()
        now = resident_bytes(os.getpid())
        after_pass = now
    asyncio.get_running_loop().call_later(LOOK_S, _look, min(after_pass, now))
