"""Loads of adapters into vLLM, by the engine after a save and by API processes when vLLM has lost one."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

LOAD_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


@dataclass
class Load:
    ok: bool = False


class AdapterMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Loads of adapters into vLLM."
        loads = Counter("skyrl_adapter_loads", about, ["outcome"], registry=registry)
        self._loaded, self._failed = loads.labels("ok"), loads.labels("failed")
        about = "Time of one load of an adapter, with bringing its files to vLLM."
        self._seconds = Histogram("skyrl_adapter_load_seconds", about, buckets=LOAD_BOUNDS, registry=registry)

    @contextmanager
    def load(self) -> Generator[Load]:
        """One load. The body says when the adapter is loaded; otherwise the load has failed."""
        began, load = time.perf_counter(), Load()
        try:
            yield load
        finally:
            self._seconds.observe(time.perf_counter() - began)
            (self._loaded if load.ok else self._failed).inc()
