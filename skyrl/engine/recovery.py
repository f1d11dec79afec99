"""After a restart: bring every living model back, from its last snapshot and the commands that ran after it.

Every command that changed a model is repeated once, in the old order. Where the backend `repeats_exactly` (on a CPU
whose passes are not merged), the model is then the same to the last bit. Elsewhere (on CUDA, or with merged passes) it
is the same up to rounding: kernels may add in another order, and passes that ran together are repeated one by one. No
model is failed for such a difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from skyrl.backends.base import Backend, OutOfMemory
from skyrl.db import futures as rows
from skyrl.db import models as model_rows
from skyrl.db.checkpoints import Checkpoint, find_checkpoint
from skyrl.db.database import Connection, Database
from skyrl.db.faults import is_transient
from skyrl.db.fence import Displaced
from skyrl.db.models import ModelRecord
from skyrl.engine.command_log import CommandLog
from skyrl.engine.crash_ledger import POISON, CrashLedger
from skyrl.engine.repeating import repeat_command
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.settlement import Settlement
from skyrl.engine.signals import EngineSignals
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.threads import EngineThreads
from skyrl.storage.base import CheckpointStore, NotStored, StoreError
from skyrl.types.command import Command, ExecutedCommand
from skyrl.types.kinds import ENGINE_KINDS, Kind
from skyrl.wire.paths import parse_path
from skyrl.wire.requests import LoadWeightsCommand, decode_json

logger = logging.getLogger(__name__)

SKIPPED = (
    f"skipped: the engine died {POISON} times while it ran this command, so it is not tried again; its model is as the "
    "commands before left it"
)
MEMORY_PAUSE = 9.0
"""A try to restore models that found too little memory is followed by a pause of so many times its length. Each try
repeats commands on the backend's thread; in the pause other models train."""


class _Stopped(Exception):
    """The engine is stopped: models that are not restored yet are left to the next start."""


class Recovery:
    """`run` once, before the engine's loop. Then `retry` now and then, for models that are held: their checkpoint store
    was away, or there was too little memory."""

    def __init__(
        self,
        database: Database,
        backend: Backend,
        scheduler: Scheduler,
        log: CommandLog,
        settlement: Settlement,
        threads: EngineThreads,
        snapshots: Snapshots,
        store: CheckpointStore,
        ledger: CrashLedger,
        signals: EngineSignals,
    ) -> None:
        """When `signals` say that the engine is stopped, recovery ends between two commands."""
        self._database = database
        self._backend = backend
        self._scheduler = scheduler
        self._log = log
        self._settlement = settlement
        self._threads = threads
        self._snapshots = snapshots
        self._store = store
        self._ledger = ledger
        self._signals = signals
        self._counts = ledger.counts
        self._held: set[str] = set()
        self._without_memory: set[str] = set()
        """The held models that wait for memory."""
        self._memory_due = 0.0
        """When these are tried again, in monotonic seconds."""

    async def run(self) -> None:
        """Skip commands that have killed the engine too often, then restore all living models.

        A model that cannot be restored is failed, and the log says why. A model whose checkpoint store is away, or for
        which there is too little memory, is held: its commands wait. The other models go on.
        """
        suspects = await asyncio.to_thread(self._skip_poison)
        for model in await self._database.read_async(model_rows.living):
            next_seq = await self._database.read_async(lambda c, model=model: _next_seq(c, model))
            self._scheduler.open_model(model.id, next_seq)
            self._scheduler.hold(model.id)
            await self._restore(model)
        if self._signals.is_stopped:
            return
        suspected = {command.request_id for command in suspects if command.model_id in self._scheduler.model_ids}
        self._scheduler.suspect(suspected)
        self._ledger.forget_all_but(suspected)

    async def retry(self) -> None:
        """Try again to restore the models that are held."""
        for gone in self._held - self._scheduler.model_ids:
            self._release(gone)
        began = time.monotonic()
        due = self._held - (self._without_memory if began < self._memory_due else set())
        if due:
            for model in await self._database.read_async(model_rows.living):
                if model.id in due:
                    await self._restore(model)
        if due & self._without_memory:
            now = time.monotonic()
            self._memory_due = now + MEMORY_PAUSE * (now - began)

    async def _restore(self, model: ModelRecord) -> None:
        """Bring one model back, and let its commands run; or hold it, or fail it.

        Raises, and fails no model, when the claim is lost, or when the database is away and the engine is stopped.
        """
        if self._signals.is_stopped:
            return
        try:
            await asyncio.to_thread(self._bring_back, model)
        except _Stopped:
            return
        except Exception as error:
            if is_transient(error) or isinstance(error, Displaced):
                raise
            if self._signals.is_stopped:  # the threads may have been shut down: the model may well be fine
                logger.info("model %s is left to the next start: %s", model.id, error)
                return
            if await self._hold(model.id, error):
                return
            logger.exception("model %s cannot be restored", model.id)
            await asyncio.to_thread(self._database.write, model_rows.set_model(model.id, status="failed"))
            await self._log.close_queue(model.id)
        if model.id not in self._scheduler:  # it has failed, or its session has ended meanwhile
            await self._threads.on_backend(lambda: self._backend.delete_model(model.id))
        self._release(model.id)

    async def _hold(self, model_id: str, error: Exception) -> bool:
        """Whether a later try may succeed; then the model's commands wait for it."""
        if isinstance(error, StoreError) and not isinstance(error, NotStored):
            logger.warning("model %s waits for a checkpoint that it has loaded: %s", model_id, error)
            self._without_memory.discard(model_id)
        elif isinstance(error, OutOfMemory):
            logger.warning("model %s waits for memory to be restored in: %s", model_id, error)
            await self._threads.on_backend(lambda: self._backend.delete_model(model_id))
            self._without_memory.add(model_id)
        else:
            return False
        self._held.add(model_id)
        return True

    def _release(self, model_id: str) -> None:
        self._held.discard(model_id)
        self._without_memory.discard(model_id)
        self._scheduler.release(model_id)
        self._signals.wake()

    def _bring_back(self, model: ModelRecord) -> None:
        """Runs beside the event loop. Fetches the files of all loads first: the backend's thread waits for no
        network."""
        commands = self._database.read(lambda c: rows.executed(c, model.id, model.next_seq))
        with contextlib.ExitStack() as files:
            loaded = {
                executed.command.request_id: files.enter_context(
                    self._store.reading(self._loaded_from(executed, model))
                )
                for executed in commands
                if executed.command.kind == Kind.LOAD_WEIGHTS
            }
            self._threads.wait_for_backend(lambda: self._repeat_all(model, commands, loaded))
        self._snapshots.restored(model.id, model.next_seq, commands)

    def _loaded_from(self, executed: ExecutedCommand, model: ModelRecord) -> str:
        """The store's key of the checkpoint that a command has loaded. Raises FileNotFoundError when the checkpoint has
        been deleted or replaced."""
        load = decode_json(LoadWeightsCommand, self._body(executed.command))
        reader = load.source_tenant or model.tenant
        saved = self._database.read(lambda c: find_checkpoint(c, parse_path(load.path), reader))
        if saved is None or saved.store_key is None or _is_replaced(saved, load, executed):
            raise FileNotFoundError(f"checkpoint {load.path} has been deleted or replaced since it was loaded")
        return saved.store_key

    def _repeat_all(self, model: ModelRecord, commands: Sequence[ExecutedCommand], loaded: Mapping[str, Path]) -> None:
        """On the backend's thread. The crash ledger knows what runs: the engine may die of that, too."""
        if model.next_seq > 0:
            with self._watching(f"snapshot {model.id}", "its snapshot was loaded"):
                directory = self._snapshots.path(model.id, model.next_seq)
                self._backend.restore_model(model.id, model.lora, directory)
        for executed in commands:
            if self._signals.is_stopped:
                raise _Stopped
            command = executed.command
            with self._watching(f"again {command.request_id}", f"command {command.seq_id} was repeated"):
                repeat_command(executed, self._body(command), model, self._backend, loaded)
        logger.info("model %s: %d commands repeated", model.id, len(commands))

    def _body(self, command: Command) -> bytes:
        return self._database.read(lambda c: rows.bodies(c, [command.request_id]))[command.request_id]

    def _watching(self, key: str, what: str) -> AbstractContextManager[None]:
        if self._counts.get(key, 0) >= POISON:
            raise RuntimeError(f"the engine died {POISON} times while {what}")
        return self._ledger.watching([key], innocent=(Exception,))

    def _skip_poison(self) -> list[Command]:
        """Fail the commands that have killed the engine too often. Returns the others that ran when it died."""
        if not self._counts:
            return []
        pending = self._database.read(lambda c: rows.pending(c, sorted(ENGINE_KINDS)))
        left: list[Command] = []
        for command in pending:
            if (died := self._counts.get(command.request_id, 0)) == 0:
                continue
            what = f"{command.kind} {command.request_id} (model {command.model_id}, command {command.seq_id})"
            logger.warning("the engine died while it ran %s; deaths so far: %d", what, died)
            if died >= POISON:
                self._settlement.skip(command, SKIPPED)
            else:
                left.append(command)
        return left


def _next_seq(connection: Connection, model: ModelRecord) -> int:
    """The number of a model's next command."""
    return max(model.next_seq, rows.highest_settled_seq(connection, model.id) + 1)


def _is_replaced(saved: Checkpoint, load: LoadWeightsCommand, executed: ExecutedCommand) -> bool:
    """Whether the checkpoint of that name is another one than the command has loaded. Early versions of skyrl did not
    write the loaded key; their times tell."""
    if load.loaded_key is None:
        return saved.created_at > executed.completed_at
    return saved.store_key != load.loaded_key
