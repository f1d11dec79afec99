"""Ends of the engine and of vLLM after which the launcher starts them again."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter

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
