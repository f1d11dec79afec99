"""Where the engine's time goes, by phase, how large its micro-batches are, and how long its recoveries take."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from skyrl.base.types.kinds import SAVES, Kind

Phase = Literal["pass", "step", "save", "load", "snapshot", "other", "idle"]
PHASES: tuple[Phase, ...] = ("pass", "step", "save", "load", "snapshot", "other", "idle")
RECOVERY_BOUNDS = (1, 2.5, 5, 10, 30, 60, 300, 1800)


def phase_of(kind: Kind) -> Phase:
    """The phase in which a barrier runs."""
    if kind in SAVES:
        return "save"
    return {Kind.OPTIM_STEP: "step", Kind.LOAD_WEIGHTS: "load"}.get(kind, "other")  # type: ignore[return-value]


class PhaseMetrics:
    """Several threads may count. Time counts when a phase ends: the counter of an engine that hangs stands still."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Time that the engine has spent in each phase; saves and loads run beside the others."
        busy = Counter("skyrl_engine_busy_seconds", about, ["phase"], registry=registry)
        self._busy = {phase: busy.labels(phase) for phase in PHASES}
        about = "Tokens that a micro-batch of the trainer has at most."
        self._micro_batch = Gauge("skyrl_micro_batch_tokens", about, registry=registry)
        about = "Time from the last heartbeat of an engine that died until its successor trains."
        self._recovery = Histogram("skyrl_recovery_seconds", about, buckets=RECOVERY_BOUNDS, registry=registry)

    @contextmanager
    def phase(self, phase: Phase) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._busy[phase].inc(time.perf_counter() - began)

    def micro_batch_tokens(self, tokens: int) -> None:
        """The bound of the trainer that has been started."""
        self._micro_batch.set(tokens)

    def recovered(self, died_at: float) -> None:
        """`died_at` is in seconds since the epoch."""
        self._recovery.observe(max(0.0, time.time() - died_at))
