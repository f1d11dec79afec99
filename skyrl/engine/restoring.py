"""Restoring one model after a restart: its last snapshot, and the commands that ran after it.

Every command that changed the model is repeated once, in the old order, and must end as it ended before. Where the
backend `repeats_exactly` (on a CPU without merged passes), the restored model is the same to the last bit. Elsewhere
(on CUDA, or with merged passes) it is the same up to rounding: kernels may add in another order, and passes that ran
together are repeated one by one; a number near the end of float32's range may overflow now. Such a difference is
logged as a warning and fails no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from skyrl.base.types.requests import Command, ExecutedCommand, Kind
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import LoadWeightsCommand
from skyrl.engine.activity import Holds
from skyrl.engine.crash_ledger import DEATHS_TO_BLAME, CrashLedger
from skyrl.engine.exclusive_commands import adam_params
from skyrl.engine.execution import PassPictures, decode_pass
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.stored_losses import StoredLosses
from skyrl.engine.telemetry import CommandTracing
from skyrl.engine.threads import EngineSignals, EngineThreads
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db import models as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import ModelRecord
from skyrl.trainer.protocol import Backend, InvalidRequest

logger = logging.getLogger(__name__)

SUSPECTS_S = 0.01
"""How often it is looked whether a command runs alone, because the engine may have died of it."""


class Stopped(Exception):
    """The engine is stopped: the next start restores the remaining models."""


class Closed(Exception):
    """The model was closed while it was being restored."""


class NotAllowedNow(Exception):
    """The server's settings of now refuse the model, or one of its commands. The message says which and why."""


@dataclass(eq=False)
class Restoring:
    """Restores models, also several at a time. `suspected`: the commands that run alone, because the engine may have
    died of one of them."""

    _database: Database
    _backend: Backend
    _scheduler: Scheduler
    _threads: EngineThreads
    _snapshots: Snapshots
    _store: CheckpointStore
    _ledger: CrashLedger
    _signals: EngineSignals
    _holds: Holds
    _tracing: CommandTracing
    _pictures: PassPictures
    _losses: StoredLosses

    def __post_init__(self) -> None:
        self._counts = self._ledger.counts
        self.suspected: set[str] = set()

    async def restore(self, model: ModelRecord) -> None:
        """Restore one model. The files of all loads are fetched first, so that the backend thread never waits for the
        network. Each command is repeated by itself, so that commands of other models run in between. Raises Stopped,
        Closed, NotAllowedNow, and what a command raises."""
        commands = await self._database.read_async(lambda c: rows.executed(c, model.id, model.next_seq))
        files = contextlib.ExitStack()
        try:
            loaded = await asyncio.to_thread(self._fetch, commands, files)
            self._snapshots.restoring(model.id, model.next_seq)
            await self._alone(model.id, lambda: self._load_snapshot(model))
            for executed in commands:
                await self._alone(model.id, lambda executed=executed: self._repeat(executed, model, loaded))
                self._holds.repeated()
        finally:
            await asyncio.to_thread(files.close)
        self._snapshots.restored(model.id, self._scheduler.next_seq(model.id) or 0)
        logger.info("model %s: %d commands repeated", model.id, len(commands))

    def _fetch(self, commands: Sequence[ExecutedCommand], files: contextlib.ExitStack) -> dict[str, Path]:
        """By request id, the directory of each checkpoint that these commands have loaded, until `files` is closed.
        Raises StoreError."""
        return {
            executed.command.request_id: files.enter_context(self._store.reading(self._loaded_from(executed)))
            for executed in commands
            if executed.command.kind == Kind.LOAD_WEIGHTS
        }

    async def _alone(self, model_id: str, work: Callable[[], None]) -> None:
        """Run on the backend thread, and not beside a suspect, so that a death is blamed on one of them."""
        while self._scheduler.suspect_is_due and not self._signals.is_stopped:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(SUSPECTS_S)
        if self._signals.is_stopped:
            raise Stopped
        if model_id not in self._scheduler:
            raise Closed
        with self._scheduler.repeating():
            await self._threads.on_backend(work)
        if self.suspected:
            self._signals.wake()

    def _loaded_from(self, executed: ExecutedCommand) -> str:
        """The checkpoint store's key of the checkpoint that a command has loaded. The checkpoint may have been deleted
        or replaced since: the sweep keeps its files until a snapshot holds the load."""
        key = decode_json(LoadWeightsCommand, self._body(executed.command)).loaded_key
        assert key is not None  # written with the outcome
        return key

    def _load_snapshot(self, model: ModelRecord) -> None:
        """Runs on the backend thread, also for a model without a snapshot: an earlier try may have left something. The
        crash ledger records this and each command, because the engine may die of it again. Raises NotAllowedNow."""
        self._backend.delete_model(model.id)
        if model.next_seq == 0:
            return
        with self._recorded(f"snapshot {model.id}", "its snapshot was loaded"), _allowed_now():
            self._backend.restore_model(model.id, model.lora, self._snapshots.path(model.id, model.next_seq))

    def _repeat(self, executed: ExecutedCommand, model: ModelRecord, loaded: Mapping[str, Path]) -> None:
        """Runs on the backend thread. Takes snapshots after steps, as training does, so that another stop or death
        repeats little of this."""
        command, began_at = executed.command, time.time()
        assert command.seq_id is not None
        with self._recorded(f"again {command.request_id}", f"command {command.seq_id} was repeated"):
            self._change(executed, self._body(command), model, loaded)
        self._tracing.repeated(command, began_at)
        self._snapshots.ran(model.id, command.kind)
        if command.kind is Kind.OPTIM_STEP:
            self._snapshots.attempt(self._snapshots.after_step, model.id, command.seq_id + 1)

    def _change(self, executed: ExecutedCommand, body: bytes, model: ModelRecord, loaded: Mapping[str, Path]) -> None:
        """Repeat a command's change of its model. Saves and forward passes change nothing. `loaded`: by request id of a
        load, the directory with its files. Raises NotAllowedNow."""
        command, backend = executed.command, self._backend
        if command.kind is Kind.CREATE_MODEL:
            with _allowed_now():
                backend.create_model(model.id, model.lora)
        elif command.kind is Kind.FORWARD_BACKWARD:
            with _allowed_now():
                training_pass = decode_pass(command, body, backend, self._pictures, self._losses)
            for result in backend.run([training_pass]) if training_pass.backward else ():
                with _unless_rounding(command, backend, InvalidRequest):
                    if isinstance(result, Exception):
                        raise result
        elif command.kind is Kind.OPTIM_STEP:
            _repeat_step(executed, body, model.id, backend)
        elif command.kind is Kind.LOAD_WEIGHTS:
            if command.seq_id == 0:
                with _allowed_now():
                    backend.create_model(model.id, model.lora)
            optimizer = decode_json(LoadWeightsCommand, body).optimizer
            backend.load_state(model.id, loaded[command.request_id], optimizer=optimizer)

    def _body(self, command: Command) -> bytes:
        return self._database.read(lambda c: rows.bodies(c, [command.request_id]))[command.request_id]

    def _recorded(self, key: str, action: str) -> AbstractContextManager[None]:
        if self._counts.get(key, 0) >= DEATHS_TO_BLAME:
            raise RuntimeError(f"the engine died {DEATHS_TO_BLAME} times while {action}")
        return self._ledger.running([key], not_blamed=(Exception,))


def _repeat_step(executed: ExecutedCommand, body: bytes, model_id: str, backend: Backend) -> None:
    """A step that failed is not repeated, because rounding might let it succeed now. The step had either refused
    hyper-parameters, which changed nothing, or a gradient that was not finite and was dropped."""
    if executed.status == "done":
        params = adam_params(body)
        with _unless_rounding(executed.command, backend, FloatingPointError):
            backend.optim_step(model_id, params)
        return
    try:
        backend.check_step(adam_params(body))
    except (InvalidRequest, RequestError):
        return
    backend.clear_gradient(model_id)


@contextlib.contextmanager
def _allowed_now() -> Iterator[None]:
    """What was accepted when it first ran is refused now only if the server's settings have changed."""
    try:
        yield
    except InvalidRequest as error:
        raise NotAllowedNow(str(error)) from error


@contextlib.contextmanager
def _unless_rounding(command: Command, backend: Backend, error: type[Exception]) -> Iterator[None]:
    """`error` means that a number is not finite now, but was finite when the command first ran. Where repeating is
    exact, raise the error: the model's state must differ. Elsewhere rounding explains the error: log it and go on."""
    try:
        yield
    except error as found:
        if backend.repeats_exactly:
            raise
        name = command.model_id, command.seq_id
        logger.warning("model %s: command %d succeeded before and fails when repeated: %s", *name, found)
