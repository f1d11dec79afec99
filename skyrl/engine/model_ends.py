"""Ends of models: their session has ended, they were unloaded, they could not be made, or the server does not train
their base model any more.

A model ends in four steps: its row is closed, its waiting commands fail, the backend drops the model, its snapshots are
deleted.

`fail_foreign` ends models whose base model was taken out of `base_models`, or is only sampled from now. They must not
be restored onto another base model: the shapes may fit by chance. Only a server with several base models can tell; a
server with one has always taken models of any name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from skyrl.base.config.base_models import BaseModelSlot
from skyrl.base.types.requests import ENGINE_KINDS, Command, Kind
from skyrl.base.types.weights import Scope
from skyrl.base.wire.errors import FailedRequest
from skyrl.engine.command_log import CommandLog, Settlement
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.threads import EngineThreads
from skyrl.storage.db import models as rows
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import ModelRecord, living, set_status
from skyrl.storage.db.session_ends import end_sessions
from skyrl.storage.doorbell import Doorbell
from skyrl.trainer.protocol import Backend


@dataclass(eq=False)
class ModelEnds:
    """Ends the models in `scope`. Call all methods on the event loop."""

    _database: Database
    _backend: Backend
    _snapshots: Snapshots
    _threads: EngineThreads
    _log: CommandLog
    _api: Doorbell
    _scope: Scope

    def __post_init__(self) -> None:
        self.on_end: Callable[[], None] = lambda: None
        """Called when a model was dropped."""

    async def end_sessions(self) -> None:
        """Close the models and fail the requests of the sessions that have ended since the last call."""
        ended = await asyncio.to_thread(end_sessions, self._database, self._scope)
        for model_id in ended.model_ids:
            await self._drop(model_id)
        if ended.request_ids:
            self._api.ring(ended.request_ids)

    async def end_after(self, command: Command, outcome: Outcome) -> None:
        """Drop the model that `command` has unloaded, or has failed to make."""
        if command.model_id is None:
            return
        if outcome.error is None and command.kind is Kind.UNLOAD_MODEL:
            await self._drop(command.model_id)
        elif outcome.error is not None and command.seq_id == 0:
            await self._log.close_queue(command.model_id)

    async def _drop(self, model_id: str) -> None:
        """The model's row is closed already."""

        def forget() -> None:
            self._backend.delete_model(model_id)
            self._snapshots.forget(model_id)

        await self._log.close_queue(model_id)
        await self._threads.on_backend(forget)
        self.on_end()


logger = logging.getLogger(__name__)


def fail_foreign(database: Database, settlement: Settlement, role: BaseModelSlot) -> None:
    """Fail the models that are in the scope of this engine and of no base model that trains, and their commands. Raises
    DatabaseError and Displaced."""
    if role.own.is_everything or not role.scope.has_rest:
        return

    def read(connection: Connection) -> tuple[dict[str, ModelRecord], list[Command]]:
        foreign = {model.id: model for model in living(connection, role.scope) if model.base_model not in role.own}
        pending = rows.pending(connection, sorted(ENGINE_KINDS), scope=role.scope) if foreign else []
        return foreign, [command for command in pending if command.model_id in foreign]

    foreign, commands = database.read(read)
    if not foreign:
        return

    def why(command: Command) -> FailedRequest:
        return FailedRequest(f"model_id: {_sentence(foreign[str(command.model_id)])}")

    def fail_models(connection: Connection) -> None:
        for model_id in foreign:
            set_status(model_id, "failed")(connection)

    settlement.refuse(commands, why, fail_models)
    for model in foreign.values():
        logger.error("%s", _sentence(model))


def _sentence(model: ModelRecord) -> str:
    return f"model {model.id!r} cannot go on: this server does not train its base model {model.base_model!r} any more"
