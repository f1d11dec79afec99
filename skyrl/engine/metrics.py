"""What the engine counts: training commands, and where its time goes.

Commands: how many ended and how, how long they waited and ran, their tokens, and the sampler's gap. Time: by phase,
with the size of micro-batches and the length of recoveries. `EngineMetrics` has one registry, and an object for each
part that counts. `RunTimes` keeps how long commands run (means by kind), from which the engine estimates when a waiting
command starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self

from cachetools import LRUCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from skyrl.base.types.activity import WaitsFor
from skyrl.base.types.requests import ENGINE_KINDS, SAVES, Command, Kind
from skyrl.inference.metrics import AdapterMetrics
from skyrl.runtime.metrics.process import LoopLag
from skyrl.runtime.metrics.storage import DatabaseGauges, TrafficMetrics
from skyrl.runtime.metrics.tallies import OUTCOMES, outcome_label

WAIT_BOUNDS = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 1800)
RUN_BOUNDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300)
MODELS_BOUNDS = (1, 2, 4, 8, 16, 32)
GAP_BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1)
MAX_GAP = 1e4
"""In nats per token. A model's logprobs are never so far apart: a client has sent other numbers."""
READY_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)


def _by_kind(
    name: str, about: str, bounds: Iterable[float], registry: CollectorRegistry | None
) -> dict[Kind, Histogram]:
    family = Histogram(name, about, ["kind"], buckets=tuple(bounds), registry=registry)
    return {kind: family.labels(kind.lower()) for kind in sorted(ENGINE_KINDS)}


class CommandMetrics:
    """`kind` is the kind of a command; times are seconds since the epoch, durations are seconds."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        family = Counter("skyrl_commands", "Commands of the engine that ended.", ["kind", "outcome"], registry=registry)
        self._ended = {
            (kind, outcome): family.labels(kind.lower(), outcome)
            for kind in sorted(ENGINE_KINDS)
            for outcome in OUTCOMES[:3]
        }
        about = "Time from a command's acceptance to its begin."
        self._wait = _by_kind("skyrl_command_wait_seconds", about, WAIT_BOUNDS, registry)
        about = "Time from a command's begin to its stored outcome."
        self._run = _by_kind("skyrl_command_run_seconds", about, RUN_BOUNDS, registry)
        self._tokens = Counter("skyrl_training_tokens", "Tokens of passes that succeeded.", registry=registry)
        about = "Models whose passes ran together."
        self._models = Histogram("skyrl_pass_models", about, buckets=MODELS_BOUNDS, registry=registry)
        about = "Distance of the trainer's logprobs from the sampler's in one pass: the absolute value of kl:mean."
        self._gap = Histogram("skyrl_logprob_gap_nats", about, buckets=GAP_BOUNDS, registry=registry)
        about = "Time from the acceptance of a save to the moment in which its weights can be sampled from."
        self._ready = Histogram("skyrl_weights_ready_seconds", about, buckets=READY_BOUNDS, registry=registry)
        about = "Age of the oldest command that runs or could run; 0 without one."
        Gauge("skyrl_commands_oldest_seconds", about, registry=registry).set_function(self._oldest_s)
        about = "Commands that wait, by what the next command of their model waits for."
        family = Gauge("skyrl_commands_waiting", about, ["reason"], registry=registry)
        self._waiting = {reason: family.labels(reason) for reason in WaitsFor if reason is not WaitsFor.NOTHING}
        self.oldest_accepted_at: float | None = None
        """When the oldest command that runs or could run was accepted. The engine's loop sets it; the age grows also if
        the loop hangs."""

    def waiting(self, counts: Mapping[WaitsFor, int]) -> None:
        """So many commands wait now. Commands behind a running command of their model count as waiting for a turn."""
        behind = counts.get(WaitsFor.NOTHING, 0)
        for reason, gauge in self._waiting.items():
            gauge.set(counts.get(reason, 0) + (behind if reason is WaitsFor.TURN else 0))

    def _oldest_s(self) -> float:
        at = self.oldest_accepted_at
        return 0.0 if at is None else max(0.0, time.time() - at)

    def began(self, kind: Kind, accepted_at: float) -> None:
        """A clock of another machine may have stamped the acceptance, so the wait may come out below 0."""
        self._wait[kind].observe(max(0.0, time.time() - accepted_at))

    def ran(self, kind: Kind, seconds: float) -> None:
        self._run[kind].observe(seconds)

    def ended(self, kind: Kind, error: str | None, category: str | None) -> None:
        self._ended[kind, outcome_label(error, category)].inc()

    def passed(self, models: int, tokens: int, gaps: Iterable[float]) -> None:
        """Count a batch of passes. A gap above MAX_GAP is left out: one of them would make the sum useless for ever."""
        self._models.observe(models)
        self._tokens.inc(tokens)
        for gap in gaps:
            if abs(gap) <= MAX_GAP:
                self._gap.observe(abs(gap))

    def weights_ready(self, accepted_at: float) -> None:
        self._ready.observe(max(0.0, time.time() - accepted_at))


Phase = Literal["pass", "step", "save", "load", "snapshot", "other", "idle"]
PHASES: tuple[Phase, ...] = ("pass", "step", "save", "load", "snapshot", "other", "idle")
RECOVERY_BOUNDS = (1, 2.5, 5, 10, 30, 60, 300, 1800)


def phase_of(kind: Kind) -> Phase:
    """The phase in which an exclusive command runs."""
    if kind in SAVES:
        return "save"
    return {Kind.OPTIM_STEP: "step", Kind.LOAD_WEIGHTS: "load"}.get(kind, "other")  # type: ignore[return-value]


class PhaseMetrics:
    """Several threads may count. Time counts when a phase ends: the counter of an engine that hangs stands still."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Time that the engine has spent in each phase; saves and loads run beside the others."
        busy = Counter("skyrl_engine_busy_seconds", about, ["phase"], registry=registry)
        self._busy = {phase: busy.labels(phase) for phase in PHASES}
        self._inner = threading.local()
        """`seconds`: of the phases that have ended inside the thread's present one."""
        about = "Tokens that a micro-batch of the trainer has at most."
        self._micro_batch = Gauge("skyrl_micro_batch_tokens", about, registry=registry)
        about = "Time from the last heartbeat of an engine that died until its successor trains."
        self._recovery = Histogram("skyrl_recovery_seconds", about, buckets=RECOVERY_BOUNDS, registry=registry)

    @contextmanager
    def phase(self, phase: Phase) -> Generator[None]:
        """A phase inside another one of the same thread counts in its own phase alone."""
        began, outer_s = time.perf_counter(), getattr(self._inner, "seconds", 0.0)
        self._inner.seconds = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._busy[phase].inc(seconds - self._inner.seconds)
            self._inner.seconds = outer_s + seconds

    def micro_batch_tokens(self, tokens: int) -> None:
        """The bound of the trainer that has been started."""
        self._micro_batch.set(tokens)

    def recovered(self, died_at: float) -> None:
        """`died_at` is in seconds since the epoch."""
        self._recovery.observe(max(0.0, time.time() - died_at))


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


MEAN_WEIGHT = 1 / 8
"""The weight of the newest run in a mean. The first run is the mean of one run."""


MODELS = 4096
"""So many models are remembered. The wait of a forgotten model's command counts from its arrival."""


class ModelWaits:
    """How long each model's commands have waited while none of the model's ran. Threads may share one object."""

    def __init__(self) -> None:
        self._ended: LRUCache[str, float] = LRUCache(MODELS)
        self._lock = threading.Lock()

    def began(self, commands: Sequence[Command], now: float) -> dict[str, float]:
        """By model, the seconds that these commands, which begin now (seconds since the epoch), have waited: from the
        first one's arrival, or from the end of the model's command before."""
        waits: dict[str, float] = {}
        with self._lock:
            for command in commands:
                if command.model_id is not None:
                    since = max(command.accepted_at, self._ended.get(command.model_id, 0.0))
                    waits[command.model_id] = max(waits.get(command.model_id, 0.0), now - since)
        return waits

    def ended(self, commands: Sequence[Command], now: float) -> None:
        with self._lock:
            for command in commands:
                if command.model_id is not None:
                    self._ended[command.model_id] = now


class RunTimes:
    """The mean seconds of one command of each kind and, for passes, of one byte of their bodies. Threads may share one
    object. The means are forgotten with the process."""

    def __init__(self) -> None:
        self._seconds: dict[Kind, float] = {}
        self._pass_byte_s: float | None = None
        self._lock = threading.Lock()

    def ran(self, commands: Sequence[Command], seconds: float) -> None:
        """These commands have run together, for `seconds`. They are passes, or one other command."""
        size = sum(command.size for command in commands)
        with self._lock:
            for command in commands:
                part = command.size / size if size else 1 / len(commands)
                self._seconds[command.kind] = _mean(self._seconds.get(command.kind), seconds * part)
            if commands and commands[0].is_pass and size:
                self._pass_byte_s = _mean(self._pass_byte_s, seconds / size)

    def estimate(self, command: Command) -> float | None:
        """The expected run time in seconds; None while no command of this kind has run."""
        if command.is_pass:
            return None if self._pass_byte_s is None else command.size * self._pass_byte_s
        return self._seconds.get(command.kind)

    def total(self, commands: Sequence[Command]) -> float | None:
        """The expected run time of all these commands; None if one of them has no estimate."""
        estimates = [self.estimate(command) for command in commands]
        known = [estimate for estimate in estimates if estimate is not None]
        return sum(known) if len(known) == len(estimates) else None

    def means(self) -> dict[str, float]:
        """The mean seconds of a command, by kind."""
        with self._lock:
            return {str(kind): seconds for kind, seconds in self._seconds.items()}


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + MEAN_WEIGHT * (newest - before)
