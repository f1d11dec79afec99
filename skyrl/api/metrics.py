"""What an API process counts, and whether the server can train and sample.

`ApiMetrics` has one registry, and an object for each part that counts, also those of other doors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.api.table import HttpMetrics
from skyrl.chat.agents.live_sessions import AgentMetrics
from skyrl.inference.metrics import AdapterMetrics
from skyrl.runtime.metrics.files import Labelled
from skyrl.runtime.metrics.process import ONLY, LoopLag, registry_for
from skyrl.runtime.metrics.storage import TrafficMetrics
from skyrl.sampling.metrics import ImageMetrics, RefusalMetrics, SampleMetrics
from skyrl.storage.db.writer import CommitMetrics


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


@dataclass(frozen=True)
class ModelMetrics:
    """What an API process counts for one base model. `labels` are its `BaseModelSlot.labels`."""

    labels: Mapping[str, str]
    registry: CollectorRegistry
    samples: SampleMetrics
    adapters: AdapterMetrics

    @classmethod
    def new(cls, labels: Mapping[str, str], of_process: CollectorRegistry) -> Self:
        registry = registry_for(labels, of_process)
        return cls(labels, registry, SampleMetrics(registry), AdapterMetrics(registry))


@dataclass(frozen=True)
class ApiMetrics:
    """`models` are those of the base models, in the order of the configuration."""

    registry: CollectorRegistry
    lag: LoopLag
    http: HttpMetrics
    refusals: RefusalMetrics
    images: ImageMetrics
    agents: AgentMetrics
    commits: CommitMetrics
    traffic: TrafficMetrics
    models: tuple[ModelMetrics, ...]

    @classmethod
    def new(cls, models: Sequence[Mapping[str, str]] = ONLY) -> Self:
        """`models`: the `BaseModelSlot.labels` of each base model."""
        registry = CollectorRegistry()
        return cls(
            registry,
            LoopLag(registry),
            HttpMetrics(registry),
            RefusalMetrics(registry),
            ImageMetrics(registry),
            AgentMetrics(registry),
            CommitMetrics(registry),
            TrafficMetrics(registry),
            tuple(ModelMetrics.new(labels, registry) for labels in models),
        )

    @property
    def labelled(self) -> tuple[Labelled, ...]:
        """The registries beside that of the process."""
        return tuple((model.registry, model.labels) for model in self.models if model.labels)
