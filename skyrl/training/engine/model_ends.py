"""Ends of models: their session has ended, they were unloaded, or they could not be made.

A model ends in four steps: its row is closed, its waiting commands fail, the backend drops the model, its snapshots are
deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skyrl.base.types.requests import Command, Kind
from skyrl.base.types.weights import Scope
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.session_ends import end_sessions
from skyrl.storage.doorbell import Doorbell
from skyrl.trainer.protocol import Backend
from skyrl.training.engine.command_log import CommandLog
from skyrl.training.engine.snapshots import Snapshots
from skyrl.training.engine.threads import EngineThreads


class ModelEnds:
    """Ends the models in `scope`. Call all methods on the event loop."""

    def __init__(
        self,
        database: Database,
        backend: Backend,
        snapshots: Snapshots,
        threads: EngineThreads,
        log: CommandLog,
        api: Doorbell,
        scope: Scope,
    ) -> None:
        self._database = database
        self._backend = backend
        self._snapshots = snapshots
        self._threads = threads
        self._log = log
        self._api = api
        self._scope = scope
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
