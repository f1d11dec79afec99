"""The metrics of an API process: one registry, and an object for each part that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from skyrl.runtime.metrics.adapters import AdapterMetrics
from skyrl.runtime.metrics.agents import AgentMetrics
from skyrl.runtime.metrics.database import CommitMetrics
from skyrl.runtime.metrics.files import Labelled
from skyrl.runtime.metrics.http import HttpMetrics
from skyrl.runtime.metrics.images import ImageMetrics
from skyrl.runtime.metrics.process import ONLY, LoopLag, registry_for
from skyrl.runtime.metrics.samples import RefusalMetrics, SampleMetrics
from skyrl.runtime.metrics.storage import TrafficMetrics


@dataclass(frozen=True)
class ModelMetrics:
    """What an API process counts for one base model. `labels` are its `Role.labels`."""

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
        """`models`: the `Role.labels` of each base model."""
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
