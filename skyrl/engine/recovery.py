"""After a restart: bring every living model back to where it was, from its last snapshot and the commands after it.

Every command that changed a model is in its new state once, in the old order. Where the backend `repeats_exactly` (on a
CPU whose passes are not merged), the model is the same to the last bit. Elsewhere (on CUDA, or with merged passes) the
commands since the last snapshot are repeated up to rounding: kernels may add in another order, and passes that ran
together are repeated one by one. No model is failed for such a difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from skyrl.backends.base import Backend, InvalidRequest, OutOfMemory, TrainingPass
from skyrl.db import futures as rows
from skyrl.db import models as model_rows
from skyrl.db.checkpoints import find_checkpoint
from skyrl.db.database import Database
from skyrl.db.faults import is_transient
from skyrl.db.fence import Displaced
from skyrl.db.models import ModelRecord
from skyrl.engine.barriers import adam_params
from skyrl.engine.commands import Command, command_of
from skyrl.engine.crash_ledger import POISON, CrashLedger
from skyrl.engine.passes import decode_pass
from skyrl.engine.snapshots import Snapshots
from skyrl.storage.base import CheckpointStore, NotStored, StoreError
from skyrl.types.kinds import ENGINE_KINDS, Kind
from skyrl.wire.errors import RequestError
from skyrl.wire.paths import parse_path
from skyrl.wire.requests import LoadWeightsCommand, OptimStepRequest, decode_json

if TYPE_CHECKING:
    from skyrl.engine.loop import Engine

logger = logging.getLogger(__name__)

SKIPPED = (
    f"skipped: the engine died {POISON} times while it ran this command, so it is not tried again; its model is as the "
    "commands before left it"
)


def _repeat_step(row: Any, body: bytes, model_id: str, backend: Backend) -> None:
    """What a step has done. A failed one is not tried again, because rounding might let it succeed now: either its
    hyper-parameters were refused, which changed nothing, or its gradient was not finite and was dropped."""
    if row.status == "done":
        params = adam_params(decode_json(OptimStepRequest, body))
        with _unless_rounding(row, model_id, backend, FloatingPointError):
            backend.optim_step(model_id, params)
        return
    try:
        backend.check_step(adam_params(decode_json(OptimStepRequest, body)))
    except (InvalidRequest, RequestError):
        return
    backend.clear_gradient(model_id)


def _repeat_pass(row: Any, training_pass: TrainingPass, backend: Backend) -> None:
    """Raises what the pass fails of, now that it is repeated."""
    for result in backend.run([training_pass]):
        with _unless_rounding(row, training_pass.model_id, backend, InvalidRequest):
            if isinstance(result, Exception):
                raise result


@contextlib.contextmanager
def _unless_rounding(row: Any, model_id: str, backend: Backend, error: type[Exception]) -> Iterator[None]:
    """`error` says that a number is not finite. Where repeating is exact it was not finite before either, so the state
    is another: raise. Elsewhere the number was at the end of float32's range; what follows is repeated all the same."""
    try:
        yield
    except error as found:
        if backend.repeats_exactly:
            raise
        logger.warning("model %s: command %d succeeded, and repeated it fails: %s", model_id, row.seq_id, found)


def _repeat(row: Any, body: bytes, model: ModelRecord, backend: Backend, loaded: Mapping[str, Path]) -> None:
    """Do again what a finished command did to its model; saves and forward passes did nothing to it. `loaded`: the
    files of each load, by request id."""
    command = command_of(row)
    if command.kind is Kind.CREATE_MODEL:
        backend.create_model(model.id, model.lora)
    elif command.kind is Kind.FORWARD_BACKWARD:
        training_pass = decode_pass(command, body, backend)
        if training_pass.backward:
            _repeat_pass(row, training_pass, backend)
    elif command.kind is Kind.OPTIM_STEP:
        _repeat_step(row, body, model.id, backend)
    elif command.kind is Kind.LOAD_WEIGHTS:
        if command.seq_id == 0:
            backend.create_model(model.id, model.lora)
        optimizer = decode_json(LoadWeightsCommand, body).optimizer
        backend.load_state(model.id, loaded[command.request_id], optimizer=optimizer)


MEMORY_PAUSE = 9.0
"""After a try to restore models that has found too little memory, others train for so many times as long: each try
repeats commands on the backend's thread."""


class _Ending(Exception):
    """The engine is to end: what is not restored yet is left to the next start."""


class Recovery:
    """Once, when an engine starts: `run`. After that `retry`, now and then, for models whose checkpoint store was away
    or for which there was too little memory."""

    def __init__(
        self,
        engine: Engine,
        database: Database,
        backend: Backend,
        snapshots: Snapshots,
        store: CheckpointStore,
        ledger: CrashLedger,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ending` says whether the process is to end. Then, or when the engine ends by itself, recovery stops between
        two commands."""
        self._engine = engine
        self._database = database
        self._backend = backend
        self._snapshots = snapshots
        self._store = store
        self._ledger = ledger
        self._ending = ending
        self._counts = ledger.counts
        self._held: set[str] = set()
        self._without_memory: set[str] = set()
        """Those of the held models that wait for memory."""
        self._memory_due = 0.0
        """Not before this moment (monotonic seconds) are they tried again."""

    async def run(self) -> None:
        """Skip what kills the engine, and restore all living models. One that cannot be restored is failed, with its
        reason in the log; one whose store is away, or for which there is too little memory, is held: its commands wait.
        Others go on."""
        suspects = await asyncio.to_thread(self._skip_poison)
        scheduler = self._engine.scheduler
        for model in await self._database.read_async(model_rows.living):
            next_seq = await self._database.read_async(lambda c, model=model: _next_seq(c, model))
            scheduler.open_model(model.id, next_seq)
            scheduler.hold(model.id)
            await self._restore(model)
        if self._ends():
            return
        suspected = {command.request_id for command in suspects if command.model_id in scheduler.model_ids}
        scheduler.suspect(suspected)
        self._ledger.forget_all_but(suspected)

    async def retry(self) -> None:
        """Try again to restore the models that are held."""
        for gone in self._held - self._engine.scheduler.model_ids:
            self._let_go(gone)
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
        """Bring one model back, and let its commands run. Raises, and fails no model, when the database is away and the
        engine is to end, and when the claim is lost."""
        if self._ends():
            return
        try:
            await asyncio.to_thread(self._bring_back, model)
        except _Ending:
            return
        except Exception as error:
            if is_transient(error) or isinstance(error, Displaced):
                raise
            if self._ends():  # its threads may be gone already, which says nothing of the model
                logger.info("model %s is left to the next start: %s", model.id, error)
                return
            if isinstance(error, StoreError) and not isinstance(error, NotStored):
                logger.warning("model %s waits for a checkpoint that it has loaded: %s", model.id, error)
                self._held.add(model.id)
                self._without_memory.discard(model.id)
                return
            if isinstance(error, OutOfMemory):
                logger.warning("model %s waits for memory to be restored in: %s", model.id, error)
                await self._engine.on_backend(lambda: self._backend.delete_model(model.id))
                self._held.add(model.id)
                self._without_memory.add(model.id)
                return
            logger.exception("model %s cannot be restored", model.id)
            failed = model_rows.set_model(model.id, status="failed")
            await asyncio.to_thread(self._database.write, failed)
            await self._engine.close_queue(model.id)
        if model.id not in self._engine.scheduler:  # failed, or its session has ended meanwhile
            await self._engine.on_backend(lambda: self._backend.delete_model(model.id))
        self._let_go(model.id)

    def _ends(self) -> bool:
        return self._ending() or self._engine.ends

    def _let_go(self, model_id: str) -> None:
        self._held.discard(model_id)
        self._without_memory.discard(model_id)
        self._engine.scheduler.release(model_id)
        self._engine.ring()

    def _bring_back(self, model: ModelRecord) -> None:
        """The files come first, so that the backend's thread waits for no network."""
        commands = self._database.read(lambda c: rows.executed(c, model.id, model.next_seq))
        with contextlib.ExitStack() as files:
            loaded = {
                row.id: files.enter_context(self._store.reading(self._loaded_from(row, model)))
                for row in commands
                if row.kind == Kind.LOAD_WEIGHTS
            }
            self._engine.wait_for_backend(lambda: self._repeat_all(model, commands, loaded))
        self._snapshots.restored(model.id, model.next_seq, commands)

    def _loaded_from(self, row: Any, model: ModelRecord) -> str:
        """The store's key of the checkpoint that a command has loaded."""
        load = decode_json(LoadWeightsCommand, self._body(row))
        reader = load.source_tenant or model.tenant
        saved = self._database.read(lambda c: find_checkpoint(c, parse_path(load.path), reader))
        if saved is None or saved.store_key is None or saved.created_at > row.completed_at:
            raise FileNotFoundError(f"checkpoint {load.path} has been deleted or replaced since it was loaded")
        return saved.store_key

    def _repeat_all(self, model: ModelRecord, commands: Sequence[Any], loaded: Mapping[str, Path]) -> None:
        """On the backend's thread. Leaves marks of what it is at: the engine may die of that, too."""
        if model.next_seq > 0:
            with self._watching(f"snapshot {model.id}", "its snapshot was loaded"):
                self._backend.create_model(model.id, model.lora)
                self._backend.load_state(model.id, self._snapshots.path(model.id, model.next_seq), optimizer=True)
        for row in commands:
            if self._ends():
                raise _Ending
            with self._watching(f"again {row.id}", f"command {row.seq_id} was repeated"):
                _repeat(row, self._body(row), model, self._backend, loaded)
        logger.info("model %s: %d commands repeated", model.id, len(commands))

    def _body(self, row: Any) -> bytes:
        return self._database.read(lambda c: rows.bodies(c, [row.id]))[row.id]

    def _watching(self, key: str, what: str) -> AbstractContextManager[None]:
        if self._counts.get(key, 0) >= POISON:
            raise RuntimeError(f"the engine died {POISON} times while {what}")
        return self._ledger.watching([key], innocent=(Exception,))

    def _skip_poison(self) -> list[Command]:
        """Fail what has killed the engine too often; returns what else was running when it died."""
        if not self._counts:
            return []
        pending = [command_of(row) for row in self._database.read(lambda c: rows.pending(c, sorted(ENGINE_KINDS)))]
        left = []
        for command in pending:
            if (died := self._counts.get(command.request_id, 0)) == 0:
                continue
            what = f"{command.kind} {command.request_id} (model {command.model_id}, command {command.seq_id})"
            logger.warning("the engine died while it ran %s; deaths so far: %d", what, died)
            if died >= POISON:
                self._engine.execution.skip(command, SKIPPED)
            else:
                left.append(command)
        return left


def _next_seq(connection: Connection, model: ModelRecord) -> int:
    """The number of a model's next command."""
    return max(model.next_seq, rows.highest_settled_seq(connection, model.id) + 1)
