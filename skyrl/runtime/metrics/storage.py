"""Traffic of the checkpoint store, and the space that is left on the disk of the state directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge


class TrafficMetrics:
    """Bytes of checkpoints."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Bytes of checkpoints that went to the checkpoint store or came from it."
        traffic = Counter("skyrl_checkpoint_bytes", about, ["direction"], registry=registry)
        self.written, self.read = traffic.labels("written"), traffic.labels("read")


def show_free_space(registry: CollectorRegistry, state_dir: Path) -> None:
    gauge = Gauge("skyrl_state_dir_free_bytes", "Free bytes on the disk of the state directory.", registry=registry)
    gauge.set_function(lambda: shutil.disk_usage(state_dir).free)
