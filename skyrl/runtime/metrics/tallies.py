"""Counters and histograms for one writing thread, as prometheus-client shows them.

A forwarded sample makes some ten of these calls on the event loop, and each group commit two. With prometheus-client's
own, which lock, an API process takes 0.395 s of CPU per 1,000 samples instead of 0.372 (`make bench`'s
`throughput-64`, medians of four turns). Metrics that several threads write at once are prometheus-client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from skyrl.base.wire.errors import ErrorCategory

T = TypeVar("T")


class Tally:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Spread:
    """How often values fell into each bucket. `bounds` are the buckets' upper bounds, in rising order."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """For each upper bound, the number of values up to it."""
        found, total = list[tuple[str, float]](), 0
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), total))
        return found

    @property
    def sum(self) -> float:
        return self._sum


class _Series(Collector, Generic[T]):
    """One metric. Its series are made here, before they are used, one for each of `values` of the only label; or one
    without a label."""

    def __init__(
        self,
        registry: CollectorRegistry | None,
        name: str,
        about: str,
        series: Callable[[], T],
        label: str,
        values: Iterable[str],
    ) -> None:
        self._name, self._about, self._labels = name, about, [label] if label else []
        self._series: dict[tuple[str, ...], T] = {(value,): series() for value in values} if label else {(): series()}
        if registry is not None:
            registry.register(self)

    def __getitem__(self, value: str) -> T:
        """Raises KeyError for a value that was not named at the start."""
        return self._series[(value,)]

    @property
    def only(self) -> T:
        """The series of a metric without a label."""
        return self._series[()]


class Tallies(_Series[Tally]):
    """One counter."""

    def __init__(
        self, registry: CollectorRegistry | None, name: str, about: str, label: str = "", values: Iterable[str] = ()
    ) -> None:
        super().__init__(registry, name, about, Tally, label, values)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, tally in self._series.items():
            family.add_metric(labels, tally.value)
        yield family


class Spreads(_Series[Spread]):
    """One histogram."""

    def __init__(
        self,
        registry: CollectorRegistry | None,
        name: str,
        about: str,
        bounds: Sequence[float],
        label: str = "",
        values: Iterable[str] = (),
    ) -> None:
        super().__init__(registry, name, about, lambda: Spread(bounds), label, values)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for labels, spread in self._series.items():
            family.add_metric(labels, spread.buckets(), spread.sum)
        yield family


OK, USER_ERROR, SERVER_ERROR, CANCELLED = "ok", "user_error", "server_error", "cancelled"
OUTCOMES = (OK, USER_ERROR, SERVER_ERROR, CANCELLED)


def outcome_label(error: str | None, category: str | None) -> str:
    """The label for a stored outcome. `cancelled` is not stored apart: who cancels counts that. `unknown` is a command
    that the client or its network has lost."""
    if error is None:
        return OK
    return USER_ERROR if category in (ErrorCategory.USER, ErrorCategory.UNKNOWN) else SERVER_ERROR
