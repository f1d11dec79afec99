"""Answered HTTP requests, by route. A route is its template, so ids in paths make no series."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl.runtime.metrics.tallies import Spread, Tally

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
