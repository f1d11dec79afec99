"""Reading the command log: new commands go from the database to the scheduler.

Commands whose model is closed are refused instead, and so are commands whose turn has passed because their number was
missing for too long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from skyrl.base.types.requests import ENGINE_KINDS, Command
from skyrl.base.types.weights import Scope
from skyrl.base.wire.errors import FailedRequest
from skyrl.storage.db import commands as rows
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.db.models import living_among
from skyrl.training.engine.barriers import model_is_gone
from skyrl.training.engine.gaps import Gaps, came_late
from skyrl.training.engine.scheduler import Scheduler
from skyrl.training.engine.settlement import Settlement

logger = logging.getLogger(__name__)


class CommandLog:
    """The commands of models in `scope`. Several tasks may call the methods; a lock runs them one at a time."""

    def __init__(
        self, database: Database, scheduler: Scheduler, settlement: Settlement, scope: Scope, gaps: Gaps
    ) -> None:
        self._database = database
        self._scope = scope
        self._gaps = gaps
        self._scheduler = scheduler
        self._settlement = settlement
        self._has_news = True
        """Whether commands may have arrived since the log was last read."""
        self._reading = asyncio.Lock()

    def note_news(self) -> None:
        """Commands may have arrived: let the next `read` ask the database."""
        self._has_news = True

    async def read(self) -> None:
        """Queue new commands, and delayed commands that may start now."""
        async with self._reading:
            if self._has_news:
                self._has_news = False
                try:
                    await self._queue_new()
                except BaseException:
                    self._has_news = True
                    raise
        self._scheduler.start_due(time.time())

    async def give_up_gaps(self) -> None:
        """Fail the commands that have waited too long for a number of their model that has not arrived."""
        async with self._reading:
            overdue = self._gaps.overdue(self._scheduler.views(), time.monotonic())
            if not overdue:
                return
            await self._queue_new()  # the number may have arrived meanwhile
            views = self._scheduler.views()
            for model_id, missing in overdue.items():
                if (view := views.get(model_id)) is not None and view.missing == missing:
                    waited = self._scheduler.give_up(model_id)
                    logger.warning("model %s: command %d never came; %d commands fail", model_id, missing, len(waited))
                    await self._refuse(waited, lambda _, missing=missing: self._gaps.never_came(missing))

    async def close_queue(self, model_id: str) -> None:
        """Close the queue of a closed or failed model: fail its waiting commands, also commands that wait for a missing
        seq_id."""
        async with self._reading:  # a running `read` may be about to queue a command of this model
            waiting = self._scheduler.close_model(model_id)
        await self._refuse(waiting)

    async def _queue_new(self) -> None:
        last_row, known = self._scheduler.last_row, self._scheduler.model_ids

        def read(connection: Connection) -> tuple[list[Command], set[str]]:
            new = rows.pending(connection, sorted(ENGINE_KINDS), last_row, self._scope)
            unknown = {c.model_id for c in new if c.model_id is not None} - known
            return new, unknown - living_among(connection, unknown)

        new, closed = await self._database.read_async(read)
        # Refuse first. If that raises, nothing is queued, `last_row` stays, and the next read finds the same commands.
        await self._refuse([command for command in new if command.model_id in closed])
        living = [command for command in new if command.model_id not in closed]
        await self._refuse([command for command in living if self._scheduler.is_late(command)], came_late)
        for command in living:
            if not self._scheduler.is_late(command):
                self._scheduler.add(command)

    async def _refuse(
        self, commands: Sequence[Command], why: Callable[[Command], FailedRequest] = model_is_gone
    ) -> None:
        if commands:
            await asyncio.to_thread(self._settlement.refuse, commands, why)
