"""The metrics of each kind of process: one registry, and an object for each part that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from skyrl.runtime.metrics.adapters import AdapterMetrics
from skyrl.runtime.metrics.agents import AgentMetrics
from skyrl.runtime.metrics.commands import CommandMetrics
from skyrl.runtime.metrics.database import CommitMetrics, DatabaseGauges
from skyrl.runtime.metrics.files import Labelled
from skyrl.runtime.metrics.http import HttpMetrics
from skyrl.runtime.metrics.images import ImageMetrics
from skyrl.runtime.metrics.phases import PhaseMetrics
from skyrl.runtime.metrics.process import LoopLag
from skyrl.runtime.metrics.restarts import RestartMetrics
from skyrl.runtime.metrics.samples import RefusalMetrics, SampleMetrics
from skyrl.runtime.metrics.storage import TrafficMetrics

ONLY: Sequence[Mapping[str, str]] = ({},)
"""The labels of the base models of a server that has one."""


def _registry_for(labels: Mapping[str, str], of_process: CollectorRegistry) -> CollectorRegistry:
    """The registry of a base model. Its series get the labels; without labels it is the process's own registry."""
    return CollectorRegistry() if labels else of_process


@dataclass(frozen=True)
class ModelMetrics:
    """What an API process counts for one base model. `labels` are its `Role.labels`."""

    labels: Mapping[str, str]
    registry: CollectorRegistry
    samples: SampleMetrics
    adapters: AdapterMetrics

    @classmethod
    def new(cls, labels: Mapping[str, str], of_process: CollectorRegistry) -> Self:
        registry = _registry_for(labels, of_process)
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
    """`of_models` are the restarts of each base model, in the order of the configuration; `labelled` are their
    registries beside that of the process."""

    registry: CollectorRegistry
    lag: LoopLag
    of_models: tuple[RestartMetrics, ...]
    labelled: tuple[Labelled, ...] = ()

    @classmethod
    def new(cls, models: Sequence[Mapping[str, str]] = ONLY) -> Self:
        """`models`: the `Role.labels` of each base model."""
        registry = CollectorRegistry()
        registries = [_registry_for(labels, registry) for labels in models]
        return cls(
            registry,
            LoopLag(registry),
            tuple(map(RestartMetrics, registries)),
            tuple((of_model, labels) for of_model, labels in zip(registries, models, strict=True) if labels),
        )

    @property
    def restarts(self) -> RestartMetrics:
        """Those of the only base model."""
        (only,) = self.of_models
        return only
