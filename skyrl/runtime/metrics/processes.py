"""The metrics of each kind of process: one registry, and an object for each part that counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from skyrl.runtime.metrics.adapters import AdapterMetrics
from skyrl.runtime.metrics.commands import CommandMetrics
from skyrl.runtime.metrics.database import CommitMetrics, DatabaseGauges
from skyrl.runtime.metrics.http import HttpMetrics
from skyrl.runtime.metrics.images import ImageMetrics
from skyrl.runtime.metrics.phases import PhaseMetrics
from skyrl.runtime.metrics.process import LoopLag
from skyrl.runtime.metrics.restarts import RestartMetrics
from skyrl.runtime.metrics.samples import SampleMetrics
from skyrl.runtime.metrics.storage import TrafficMetrics


@dataclass(frozen=True)
class ApiMetrics:
    registry: CollectorRegistry
    lag: LoopLag
    http: HttpMetrics
    samples: SampleMetrics
    images: ImageMetrics
    adapters: AdapterMetrics
    commits: CommitMetrics
    traffic: TrafficMetrics

    @classmethod
    def new(cls) -> Self:
        registry = CollectorRegistry()
        return cls(
            registry,
            LoopLag(registry),
            HttpMetrics(registry),
            SampleMetrics(registry),
            ImageMetrics(registry),
            AdapterMetrics(registry),
            CommitMetrics(registry),
            TrafficMetrics(registry),
        )


@dataclass(frozen=True)
class EngineMetrics:
    registry: CollectorRegistry
    lag: LoopLag
    commands: CommandMetrics
    phases: PhaseMetrics
    adapters: AdapterMetrics
    traffic: TrafficMetrics
    database: DatabaseGauges

    @classmethod
    def new(cls, *, of_server: bool = True) -> Self:
        """`of_server`: as in `DatabaseGauges`."""
        registry = CollectorRegistry()
        return cls(
            registry,
            LoopLag(registry),
            CommandMetrics(registry),
            PhaseMetrics(registry),
            AdapterMetrics(registry),
            TrafficMetrics(registry),
            DatabaseGauges(registry, of_server=of_server),
        )


@dataclass(frozen=True)
class LauncherMetrics:
    registry: CollectorRegistry
    lag: LoopLag
    restarts: RestartMetrics

    @classmethod
    def new(cls) -> Self:
        registry = CollectorRegistry()
        return cls(registry, LoopLag(registry), RestartMetrics(registry))
