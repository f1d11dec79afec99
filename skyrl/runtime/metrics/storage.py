"""What a process measures of storage: the numbers of rows (in the engine), the traffic of the checkpoint store, and the
space that is left on the disk of the state directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge


class DatabaseGauges:
    """Numbers of rows, which the engine reads now and then. NaN until the first reading. If a server has several
    engines, each publishes the numbers of its base model, and one of them (`of_server`) also those of the server."""

    def __init__(self, registry: CollectorRegistry | None = None, *, of_server: bool = True) -> None:
        def gauge(name: str, about: str, registry: CollectorRegistry | None = registry) -> Gauge:
            made = Gauge(f"skyrl_{name}", about, registry=registry)
            made.set(float("nan"))
            return made

        self.models = gauge("models", "Models in training.")
        self.adapters = gauge("adapters_servable", "Versions of adapters that open sampling sessions sample from.")
        server = registry if of_server else None
        self.sessions = gauge("sessions", "Active sessions.", server)
        about = "Tenants with a session that was heard of in the last 5 minutes."
        self.tenants = gauge("tenants_active", about, server)
        self.size = gauge("db_size_bytes", "Size of the database.", server)


class TrafficMetrics:
    """Bytes of checkpoints."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Bytes of checkpoints that went to the checkpoint store or came from it."
        self._bytes = Counter("skyrl_checkpoint_bytes", about, ["direction"], registry=registry)
        self.count("written", 0)
        self.count("read", 0)

    def count(self, direction: str, size: int) -> None:
        """Count bytes that were written to the store, or read from it."""
        self._bytes.labels(direction).inc(size)


def show_free_space(registry: CollectorRegistry, state_dir: Path) -> None:
    gauge = Gauge("skyrl_state_dir_free_bytes", "Free bytes on the disk of the state directory.", registry=registry)
    gauge.set_function(lambda: shutil.disk_usage(state_dir).free)
