"""What every process measures of itself: CPU, memory, open files, garbage collections, and how late its event loop is.

A process has one registry, to which each of its parts adds its own metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from skyrl.runtime.metrics.tallies import Spreads

LAG_PERIOD_S = 0.5
LAG_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 1, 5)


ONLY: Sequence[Mapping[str, str]] = ({},)
"""The labels of the base models of a server that has one."""


def registry_for(labels: Mapping[str, str], of_process: CollectorRegistry) -> CollectorRegistry:
    """The registry of a base model. Its series get the labels; without labels it is the process's own registry."""
    return CollectorRegistry() if labels else of_process


def show_process(registry: CollectorRegistry) -> None:
    """Add the metrics that prometheus-client has of any process: CPU, memory, open files, garbage collections."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


class LoopLag:
    """How late the event loop runs what is due. The early sign of a full core, or of a call that blocks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        about = "How late the event loop was, looked at twice a second."
        self._lag = Spreads(registry, "skyrl_event_loop_lag_seconds", about, LAG_BOUNDS).only

    async def run(self) -> None:
        """Measure until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            due = now() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.add(max(0.0, now() - due))
