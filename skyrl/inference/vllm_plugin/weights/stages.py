"""Where the time of an update goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Stages:
    """Seconds by the name of a stage, added up over all calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, stage: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work, and count its time for the stage, also if it raises."""
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began
