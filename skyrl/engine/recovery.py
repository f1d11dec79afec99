"""After a restart: bring every living model back to where it was, from its last snapshot and the commands after it.

Passes and steps are bitwise repeatable whatever they were batched with, so the model continues as if nothing had been.
Snapshots are taken after an optimizer step when the last one is old enough, which bounds how much is repeated; and
after every load, because the checkpoint may be replaced or deleted later.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.backends.base import Backend, InvalidRequest
from skyrl.config import ServerConfig
from skyrl.db import futures as rows
from skyrl.db import models as model_rows
from skyrl.db.checkpoints import find_checkpoint
from skyrl.db.database import Database
from skyrl.db.models import adapter_of
from skyrl.engine.commands import command_of
from skyrl.engine.handlers import adam_params, lora_spec
from skyrl.engine.passes import decode_pass
from skyrl.futures.kinds import Kind
from skyrl.storage.base import CheckpointStore
from skyrl.storage.directories import atomic_directory, remove, safe_name
from skyrl.wire.errors import RequestError
from skyrl.wire.paths import parse_path
from skyrl.wire.requests import LoadWeightsCommand, OptimStepRequest, decode_json

if TYPE_CHECKING:
    from skyrl.engine.loop import Engine

logger = logging.getLogger(__name__)


class Snapshots:
    """The newest state of each model on disk: `snapshots/<model>/<first command that is not in it>`."""

    def __init__(self, config: ServerConfig, database: Database, backend: Backend) -> None:
        self._root = config.snapshots_dir
        self._interval_s = config.snapshot_interval_s
        self._database = database
        self._backend = backend
        self._taken_at: dict[str, float] = {}

    def after_step(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model that has just stepped, if its last snapshot is old. Runs on the backend's thread."""
        now = time.monotonic()
        if now - self._taken_at.setdefault(model_id, now) >= self._interval_s:
            self.take(model_id, next_seq)

    def take(self, model_id: str, next_seq: int) -> None:
        """Snapshot a model in which all commands before `next_seq` are done. Runs on the backend's thread."""
        target = self.path(model_id, next_seq)
        remove(target)
        with atomic_directory(target) as scratch:
            self._backend.save_state(model_id, scratch)
        self._database.write(model_rows.set_model(model_id, next_seq=next_seq), power_safe=True)
        for old in target.parent.iterdir():
            if old != target:
                remove(old)
        self._taken_at[model_id] = time.monotonic()

    def path(self, model_id: str, next_seq: int) -> Path:
        return self._root / safe_name(model_id) / str(next_seq)

    def forget(self, model_id: str) -> None:
        self._taken_at.pop(model_id, None)
        remove(self._root / safe_name(model_id))


def _repeat_step(row: Any, body: bytes, model_id: str, backend: Backend) -> None:
    """A step that failed by the caller's fault fails again, and drops a gradient that is not finite again."""
    try:
        backend.optim_step(model_id, adam_params(decode_json(OptimStepRequest, body)))
    except (FloatingPointError, InvalidRequest, RequestError) as error:
        if row.status == "done":
            raise
        logger.info("model %s: the step of command %d fails again, as it did: %s", model_id, row.seq_id, error)
        return
    if row.status != "done":
        raise RuntimeError(f"command {row.seq_id} failed when it was run, and now it does not: the state is another")


def _repeat(row: Any, body: bytes, model: Any, database: Database, backend: Backend, store: CheckpointStore) -> None:
    """Do again what a finished command did to its model; saves and forward passes did nothing to it."""
    command = command_of(row)
    if command.kind is Kind.CREATE_MODEL:
        backend.create_model(model.id, lora_spec(adapter_of(model)))
    elif command.kind is Kind.FORWARD_BACKWARD:
        training_pass = decode_pass(command, body, backend)
        if training_pass.backward:
            for result in backend.run([training_pass]):
                if isinstance(result, Exception):
                    raise result
    elif command.kind is Kind.OPTIM_STEP:
        _repeat_step(row, body, model.id, backend)
    elif command.kind is Kind.LOAD_WEIGHTS:
        load = decode_json(LoadWeightsCommand, body)
        reader = load.source_tenant or model.tenant
        saved = database.read(lambda c: find_checkpoint(c, parse_path(load.path), reader))
        if saved is None or saved.created_at > row.completed_at:
            raise FileNotFoundError(f"checkpoint {load.path} has been deleted or replaced since it was loaded")
        with store.reading(saved.store_key) as directory:
            if command.seq_id == 0:
                backend.create_model(model.id, lora_spec(adapter_of(model)))
            backend.load_state(model.id, directory, optimizer=load.optimizer)


def _restore(model: Any, snapshots: Snapshots, database: Database, backend: Backend, store: CheckpointStore) -> int:
    """Bring one model back; returns the next command's number."""
    if model.next_seq > 0:
        backend.create_model(model.id, lora_spec(adapter_of(model)))
        backend.load_state(model.id, snapshots.path(model.id, model.next_seq), optimizer=True)
    commands = database.read(lambda c: rows.executed(c, model.id, model.next_seq))
    for row in commands:
        body = database.read(lambda c, ids=[row.id]: rows.bodies(c, ids))[row.id]
        _repeat(row, body, model, database, backend, store)
    logger.info("model %s: %d commands repeated", model.id, len(commands))
    return max(model.next_seq, database.read(lambda c: rows.highest_settled_seq(c, model.id)) + 1)


async def recover(
    engine: Engine, database: Database, backend: Backend, snapshots: Snapshots, store: CheckpointStore
) -> None:
    """Restore all living models. One that cannot be restored is failed, with its reason in the log; others go on."""
    for model in database.read(model_rows.living):
        try:
            next_seq = await engine.on_backend(lambda model=model: _restore(model, snapshots, database, backend, store))
        except Exception:
            logger.exception("model %s cannot be restored", model.id)
            backend.delete_model(model.id)
            database.write(model_rows.set_model(model.id, status="failed"))
            continue
        engine.scheduler.open_model(model.id, next_seq)
