"""What an API process counts: answered HTTP requests by route, and whether the server can train and sample.

`ApiMetrics` has one registry, and an object for each part that counts, also those of other doors. A route is its
template, so ids in paths make no series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.chat.agents.metrics import AgentMetrics
from skyrl.inference.metrics import AdapterMetrics
from skyrl.runtime.metrics.files import Labelled
from skyrl.runtime.metrics.process import ONLY, LoopLag, registry_for
from skyrl.runtime.metrics.storage import CommitMetrics, TrafficMetrics
from skyrl.runtime.metrics.tallies import Spread, Tally
from skyrl.sampling.metrics import ImageMetrics, RefusalMetrics, SampleMetrics

DURATION_BOUNDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10)
STATUSES = ("gone", "1xx", "2xx", "3xx", "4xx", "5xx")
"""By the first digit of the status; `gone` if the client went away before its answer."""
OTHER = "other"
"""Route and method of requests that no route takes."""


class RouteTally:
    """The requests of one route. `timed`: their durations are kept."""

    __slots__ = ("duration", "method", "route", "statuses")

    def __init__(self, method: str, route: str, *, timed: bool) -> None:
        self.method, self.route = method, route
        self.statuses = tuple(Tally() for _ in STATUSES)
        self.duration = Spread(DURATION_BOUNDS) if timed else None

    def answered(self, status: int | None, seconds: float) -> None:
        """Count a request. `status` is None if it got no answer."""
        self.statuses[0 if status is None else status // 100].value += 1
        if self.duration is not None:
            self.duration.add(seconds)


class HttpMetrics(Collector):
    """Shows a series once it has counted something: most routes never answer with most statuses."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._routes: dict[tuple[str, str], RouteTally] = {}
        self.other = self.route(OTHER, OTHER)
        if registry is not None:
            registry.register(self)

    def route(self, method: str, route: str, *, timed: bool = True) -> RouteTally:
        """The numbers of a route. Routes are few and known at the start."""
        return self._routes.setdefault((method, route), RouteTally(method, route, timed=timed))

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "skyrl_http_requests", "HTTP requests answered.", labels=("route", "method", "status")
        )
        about = "Time from a request's head to its answer's head, without long polls."
        durations = HistogramMetricFamily("skyrl_http_request_duration_seconds", about, labels=("route", "method"))
        for each in self._routes.values():
            for status, tally in zip(STATUSES, each.statuses, strict=True):
                if tally.value:
                    requests.add_metric((each.route, each.method, status), tally.value)
            if each.duration is not None and (buckets := each.duration.buckets())[-1][1]:
                durations.add_metric((each.route, each.method), buckets, each.duration.sum)
        return requests, durations


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
