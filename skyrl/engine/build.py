"""Building an engine: makes its parts and connects them. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.backends.base import Backend
from skyrl.config.server import ServerConfig
from skyrl.db.fence import FencedDatabase
from skyrl.engine.barriers import Barriers
from skyrl.engine.command_log import CommandLog
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.execution import Execution
from skyrl.engine.file_commands import FileCommands
from skyrl.engine.loop import Engine
from skyrl.engine.model_ends import ModelEnds
from skyrl.engine.publishing import AdapterPublisher
from skyrl.engine.reclaim import FileSweeper
from skyrl.engine.recovery import Recovery
from skyrl.engine.sample_turns import SampleTurns
from skyrl.engine.sampling import ColocatedSampler
from skyrl.engine.scheduler import FILES_AT_ONCE, Scheduler
from skyrl.engine.settlement import Settlement
from skyrl.engine.signals import EngineSignals
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.sweeping import Sweep
from skyrl.engine.threads import EngineThreads
from skyrl.inference.engine_group import EngineGroup
from skyrl.notify.doorbell import Doorbell
from skyrl.storage.base import CheckpointStore

BYTES_PER_TOKEN = 20
"""A training token on the wire: 4 bytes of input, 8 of target, 4 each of logprob and advantage."""


@dataclass(frozen=True)
class EngineParts:
    """An engine, and its parts for tests. Run `recovery` first, then `engine`."""

    engine: Engine
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
) -> EngineParts:
    """Must be called on the event loop.

    `group` is None where skyrl does not run the inference server. `sampler` is None where API processes forward
    samples.
    """
    threads = EngineThreads(FILES_AT_ONCE)
    # Two micro-batches: enough to fill one, and few enough that every model's turn comes soon.
    scheduler = Scheduler(2 * config.backend_config.trainer.micro_batch_tokens * BYTES_PER_TOKEN)
    snapshots = Snapshots(config, database, backend)
    settlement = Settlement(database, api)
    log = CommandLog(database, scheduler, settlement)
    model_ends = ModelEnds(database, backend, snapshots, threads, log, api)
    execution = Execution(
        database,
        backend,
        Barriers(config, database, backend, store, threads),
        snapshots,
        settlement,
        ledger,
        threads,
        scheduler,
        AdapterPublisher(group, threads),
        model_ends,
    )
    file_commands = FileCommands(log, scheduler, execution, signals)
    sweeper = FileSweeper(config, database, store, database.confirm_claim)
    sweep = Sweep(sweeper, group, scheduler, signals)
    samples = SampleTurns(database, scheduler, settlement, sampler)
    engine = Engine(
        signals,
        threads,
        scheduler,
        log,
        execution,
        file_commands,
        samples,
        model_ends,
        sweep,
        merges_passes=backend.merges_passes,
    )
    recovery = Recovery(database, backend, scheduler, log, settlement, threads, snapshots, store, ledger, signals)
    return EngineParts(
        engine,
        recovery,
        signals,
        threads,
        scheduler,
        log,
        settlement,
        snapshots,
        file_commands,
        model_ends,
        sweeper,
        sweep,
    )
