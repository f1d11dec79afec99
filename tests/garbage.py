"""What of skyrl's objects only the garbage collector frees."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Generator


@contextlib.contextmanager
def skyrl_garbage() -> Generator[Counter[str]]:
    """Counts skyrl's objects that become garbage in cycles during the block: the classes' names, filled at its end."""
    found: Counter[str] = Counter()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("skyrl."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_enabled:
            gc.enable()
