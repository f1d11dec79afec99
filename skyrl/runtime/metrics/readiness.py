"""Whether the server can train and sample, what it is, and how long ago the engine was last heard of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ReadinessMetrics(Collector):
    """`ready` gives the parts that this server runs, each with whether it is ready. `heartbeat_at` gives the time of
    the engine's last heartbeat; 0 if no engine runs, None on a server that has none. Both are asked at each scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        build: Mapping[str, str],
        ready: Callable[[], Mapping[str, bool]],
        heartbeat_at: Callable[[], float | None],
    ) -> None:
        self._build, self._ready, self._heartbeat_at = dict(build), ready, heartbeat_at
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("skyrl_build_info", "The server, as labels; always 1.", labels=[*self._build])
        build.add_metric([*self._build.values()], 1)
        about = "1 if this part of the server can work, as /readyz says."
        ready = GaugeMetricFamily("skyrl_ready", about, labels=("part",))
        for part, is_ready in self._ready().items():
            ready.add_metric((part,), is_ready)
        about = "Time since the engine was last heard of; +Inf if no engine runs."
        age = GaugeMetricFamily("skyrl_engine_heartbeat_age_seconds", about)
        if (at := self._heartbeat_at()) is not None:
            age.add_metric((), max(0.0, time.time() - at) if at else float("inf"))
        return build, ready, age
