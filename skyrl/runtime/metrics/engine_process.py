"""The metrics of the engine: one registry, and an object for each part that counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from skyrl.runtime.metrics.adapters import AdapterMetrics
from skyrl.runtime.metrics.commands import CommandMetrics
from skyrl.runtime.metrics.database import DatabaseGauges
from skyrl.runtime.metrics.phases import PhaseMetrics
from skyrl.runtime.metrics.process import LoopLag
from skyrl.runtime.metrics.storage import TrafficMetrics


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
