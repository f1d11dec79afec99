"""Building an engine: makes its parts and connects them. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.base.config.server import ServerConfig, vision_of
from skyrl.engine.activity import ActivityWatch, Holds
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.engine.command_log import CommandLog, Gaps, Settlement
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.exclusive_commands import ExclusiveCommands
from skyrl.engine.execution import Execution, PassPictures
from skyrl.engine.interludes import Interludes
from skyrl.engine.loop import Engine, FileCommands, SampleTurns
from skyrl.engine.metrics import EngineMetrics, RunTimes
from skyrl.engine.model_ends import ModelEnds
from skyrl.engine.publishing import WeightPublisher
from skyrl.engine.recovery import Recovery
from skyrl.engine.restoring import Restoring
from skyrl.engine.scheduler import FILES_AT_ONCE, Scheduler
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.stored_losses import StoredLosses
from skyrl.engine.sweeping import FileSweeper, Sweep
from skyrl.engine.telemetry import CommandTracing
from skyrl.engine.threads import EngineSignals, EngineThreads
from skyrl.inference.engine_group import EngineGroup
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.checkpoint_store.held import HeldVersions
from skyrl.storage.db.database import FencedDatabase
from skyrl.storage.doorbell import Doorbell
from skyrl.trainer.protocol import Backend

BYTES_PER_TOKEN = 20
"""A training token on the wire: 4 bytes of input, 8 of target, 4 each of logprob and advantage."""


def held_versions(config: ServerConfig, store: CheckpointStore) -> HeldVersions:
    """The versions that an engine of this configuration has in memory, on their way to the disk, or to `store`."""
    return HeldVersions(config.state_dir, config.role.name, store=store if config.weights_travel else None)


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
    metrics, tracing = metrics or EngineMetrics.new(), tracing or CommandTracing()
    metrics.phases.micro_batch_tokens(backend.micro_batch_tokens)
    scope, run_times, holds = config.role.scope, RunTimes(), Holds()
    threads = EngineThreads(FILES_AT_ONCE)
    held = held_versions(config, store)
    # Twice the micro-batch: enough to fill one, and small enough that every model's turn comes soon.
    scheduler = Scheduler(2 * backend.micro_batch_tokens * BYTES_PER_TOKEN)
    snapshots = Snapshots(config, database, backend)
    settlement = Settlement(database, api, metrics.commands)
    log = CommandLog(database, scheduler, settlement, snapshots, scope, Gaps(config.missing_seq_id_timeout_s))
    model_ends = ModelEnds(database, backend, snapshots, threads, log, api, scope)
    pictures, losses = PassPictures(database, vision_of(config)), StoredLosses(database)
    publisher = WeightPublisher(config, database, group, threads)
    model_ends.on_end = publisher.restore_current
    restoring = Restoring(
        database,
        backend,
        scheduler,
        threads,
        snapshots,
        store,
        ledger,
        signals,
        holds,
        tracing,
        pictures,
        losses,
    )
    recovery = Recovery(
        database,
        backend,
        scheduler,
        log,
        settlement,
        threads,
        snapshots,
        ledger,
        signals,
        holds,
        restoring,
        model_ends,
        config.role,
        wants_all=config.full_finetuning,  # a living model keeps the only place for whole models
    )
    recovery.on_failed = publisher.restore_current
    execution = Execution(
        database,
        backend,
        ExclusiveCommands(config, database, backend, store, threads, held),
        snapshots,
        settlement,
        ledger,
        threads,
        scheduler,
        publisher,
        model_ends,
        run_times,
        metrics,
        tracing,
        pictures,
        losses,
        Interludes(scheduler, threads, signals),
    )
    file_commands = FileCommands(log, scheduler, execution, signals)
    sweeper = FileSweeper(config, database, store, database.confirm_claim, lambda: scheduler.saving, held)
    sweep = Sweep(sweeper, group, signals)
    engine = Engine(
        signals,
        threads,
        scheduler,
        log,
        execution,
        file_commands,
        SampleTurns(database, scheduler, settlement, sampler),
        model_ends,
        sweep,
        metrics,
        merges_passes=backend.merges_passes,
        stop_grace_s=config.stop_grace_s,
    )
    inference_ready = None if group is None else lambda: group.ready
    return EngineParts(
        engine=engine,
        activity=ActivityWatch(scheduler, run_times, holds, inference_ready, metrics.commands),
        recovery=recovery,
        signals=signals,
        threads=threads,
        scheduler=scheduler,
        log=log,
        settlement=settlement,
        snapshots=snapshots,
        file_commands=file_commands,
        model_ends=model_ends,
        sweeper=sweeper,
        sweep=sweep,
        publisher=publisher,
        metrics=metrics,
    )
