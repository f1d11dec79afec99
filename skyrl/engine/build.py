"""Building an engine: makes its parts and connects them. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from skyrl.base.config.server import ServerConfig, vision_of
from skyrl.engine.activity import ActivityWatch, Holds
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.engine.command_log import CommandLog, Gaps, Settlement
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.exclusive_commands import ExclusiveCommands
from skyrl.engine.execution import Execution, PassPictures
from skyrl.engine.loop import Engine, FileCommands, SampleTurns
from skyrl.engine.metrics import EngineMetrics, RunTimes
from skyrl.engine.model_ends import ModelEnds
from skyrl.engine.publishing import WeightPublisher
from skyrl.engine.recovery import Recovery
from skyrl.engine.restoring import Restoring
from skyrl.engine.scheduler import FILES_AT_ONCE, Scheduler
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.sweeping import FileSweeper, Sweep
from skyrl.engine.telemetry import CommandTracing
from skyrl.engine.threads import EngineSignals, EngineThreads
from skyrl.inference.engine_group import EngineGroup
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db.database import FencedDatabase
from skyrl.storage.doorbell import Doorbell
from skyrl.trainer.protocol import Backend

BYTES_PER_TOKEN = 20
"""A training token on the wire: 4 bytes of input, 8 of target, 4 each of logprob and advantage."""


@dataclass(frozen=True)
class EngineParts:
    """An engine, and its parts for tests. Run `recovery` first, then `engine`; `activity` beside both."""

    engine: Engine
    activity: ActivityWatch
    recovery: Recovery
    signals: EngineSignals
    threads: EngineThreads
    scheduler: Scheduler
    log: CommandLog
    settlement: Settlement
    snapshots: Snapshots
    file_commands: FileCommands
    model_ends: ModelEnds
    sweeper: FileSweeper
    sweep: Sweep
    publisher: WeightPublisher
    metrics: EngineMetrics


@dataclass(frozen=True)
class _Base:
    """What the other parts stand on."""

    config: ServerConfig
    database: FencedDatabase
    backend: Backend
    store: CheckpointStore
    threads: EngineThreads
    scheduler: Scheduler
    snapshots: Snapshots
    settlement: Settlement
    log: CommandLog
    model_ends: ModelEnds
    run_times: RunTimes
    holds: Holds
    metrics: EngineMetrics
    tracing: CommandTracing
    pictures: PassPictures

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        database: FencedDatabase,
        backend: Backend,
        store: CheckpointStore,
        api: Doorbell,
        metrics: EngineMetrics,
        tracing: CommandTracing,
    ) -> Self:
        threads = EngineThreads(FILES_AT_ONCE)
        metrics.phases.micro_batch_tokens(backend.micro_batch_tokens)
        # Twice the micro-batch: enough to fill one, and small enough that every model's turn comes soon.
        scheduler = Scheduler(2 * backend.micro_batch_tokens * BYTES_PER_TOKEN)
        snapshots = Snapshots(config, database, backend)
        settlement = Settlement(database, api, metrics.commands)
        scope = config.role.scope
        log = CommandLog(database, scheduler, settlement, scope, Gaps(config.missing_seq_id_timeout_s))
        model_ends = ModelEnds(database, backend, snapshots, threads, log, api, scope)
        return cls(
            config,
            database,
            backend,
            store,
            threads,
            scheduler,
            snapshots,
            settlement,
            log,
            model_ends,
            RunTimes(),
            Holds(),
            metrics,
            tracing,
            PassPictures(database, vision_of(config)),
        )


def build_engine(
    config: ServerConfig,
    database: FencedDatabase,
    backend: Backend,
    store: CheckpointStore,
    ledger: CrashLedger,
    api: Doorbell,
    signals: EngineSignals,
    group: EngineGroup | None = None,
    sampler: ColocatedSampler | None = None,
    metrics: EngineMetrics | None = None,
    tracing: CommandTracing | None = None,
) -> EngineParts:
    """Must be called on the event loop.

    `group` is None where skyrl does not run the inference server. `sampler` is None where API processes forward
    samples.
    """
    seen = metrics or EngineMetrics.new(), tracing or CommandTracing()
    base = _Base.of(config, database, backend, store, api, *seen)
    publisher = WeightPublisher(config, database, group, base.threads)
    base.model_ends.on_end = publisher.restore_current
    recovery = _recovery(base, signals, ledger)
    recovery.on_failed = publisher.restore_current
    execution = _execution(base, ledger, publisher)
    file_commands = FileCommands(base.log, base.scheduler, execution, signals)
    sweeper = FileSweeper(config, database, store, database.confirm_claim)
    sweep = Sweep(sweeper, group, base.scheduler, signals)
    samples = SampleTurns(database, base.scheduler, base.settlement, sampler)
    inference_ready = None if group is None else lambda: group.ready
    return EngineParts(
        engine=_engine(base, signals, execution, file_commands, samples, sweep),
        activity=ActivityWatch(base.scheduler, base.run_times, base.holds, inference_ready, base.metrics.commands),
        recovery=recovery,
        signals=signals,
        threads=base.threads,
        scheduler=base.scheduler,
        log=base.log,
        settlement=base.settlement,
        snapshots=base.snapshots,
        file_commands=file_commands,
        model_ends=base.model_ends,
        sweeper=sweeper,
        sweep=sweep,
        publisher=publisher,
        metrics=base.metrics,
    )


def _execution(base: _Base, ledger: CrashLedger, publisher: WeightPublisher) -> Execution:
    return Execution(
        base.database,
        base.backend,
        ExclusiveCommands(base.config, base.database, base.backend, base.store, base.threads),
        base.snapshots,
        base.settlement,
        ledger,
        base.threads,
        base.scheduler,
        publisher,
        base.model_ends,
        base.run_times,
        base.metrics,
        base.tracing,
        base.pictures,
    )


def _engine(
    base: _Base,
    signals: EngineSignals,
    execution: Execution,
    file_commands: FileCommands,
    samples: SampleTurns,
    sweep: Sweep,
) -> Engine:
    return Engine(
        signals,
        base.threads,
        base.scheduler,
        base.log,
        execution,
        file_commands,
        samples,
        base.model_ends,
        sweep,
        base.metrics,
        merges_passes=base.backend.merges_passes,
        stop_grace_s=base.config.stop_grace_s,
    )


def _recovery(base: _Base, signals: EngineSignals, ledger: CrashLedger) -> Recovery:
    restoring = Restoring(
        base.database,
        base.backend,
        base.scheduler,
        base.threads,
        base.snapshots,
        base.store,
        ledger,
        signals,
        base.holds,
        base.tracing,
        base.pictures,
    )
    return Recovery(
        base.database,
        base.backend,
        base.scheduler,
        base.log,
        base.settlement,
        base.threads,
        base.snapshots,
        ledger,
        signals,
        base.holds,
        restoring,
        base.model_ends,
        base.config.role,
        wants_all=base.config.full_finetuning,  # a living model keeps the only place for whole models
    )
