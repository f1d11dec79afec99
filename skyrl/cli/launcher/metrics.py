"""What the launcher counts: ends of the engine and of vLLM after which it starts them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from prometheus_client import CollectorRegistry, Counter

from skyrl.runtime.metrics.files import Labelled
from skyrl.runtime.metrics.process import ONLY, LoopLag, registry_for

Restarted = Literal["engine", "vllm"]
Why = Literal["died", "hung", "config"]
WHYS: tuple[Why, ...] = ("died", "hung", "config")
"""`hung`: the watchdog has killed it. `config`: it could not start, for example because memory was short."""


class RestartMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._counters = {
            part: Counter(f"skyrl_{part}_restarts", f"Ends of {shown} by itself.", ["reason"], registry=registry)
            for part, shown in (("engine", "the engine"), ("vllm", "a vLLM"))
        }
        for counter in self._counters.values():
            for why in WHYS:
                counter.labels(why)

    def ended(self, part: Restarted, why: Why) -> None:
        self._counters[part].labels(why).inc()


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
        """`models`: the `BaseModelSlot.labels` of each base model."""
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
