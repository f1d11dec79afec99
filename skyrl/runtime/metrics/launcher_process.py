"""The metrics of the launcher: one registry, and an object for each part that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from skyrl.runtime.metrics.files import Labelled
from skyrl.runtime.metrics.process import ONLY, LoopLag, registry_for
from skyrl.runtime.metrics.restarts import RestartMetrics


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
        registries = [registry_for(labels, registry) for labels in models]
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
