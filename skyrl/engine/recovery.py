"""Recovery after a restart: every living model is restored from its last snapshot and the commands that ran after it.

Models are restored in the background, a few at a time, between the commands of other models: first those whose commands
wait, then those whose clients live. A model whose client is gone is restored when the client comes back; mostly its
session ends before. Commands of a model wait until it is restored.

Knows which models are wanted, and what becomes of those that cannot be restored. `restoring` knows how one is restored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from skyrl.base.config.base_models import BaseModelSlot
from skyrl.base.types.activity import WaitsFor
from skyrl.base.types.requests import ENGINE_KINDS, Command
from skyrl.engine.activity import Holds
from skyrl.engine.command_log import CommandLog, Settlement
from skyrl.engine.crash_ledger import DEATHS_TO_BLAME, CrashLedger
from skyrl.engine.model_ends import ModelEnds, fail_foreign
from skyrl.engine.restoring import Closed, NotAllowedNow, Restoring, Stopped
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.threads import EngineSignals, EngineThreads
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db import models as model_rows
from skyrl.storage.db import models as rows
from skyrl.storage.db.database import Connection, Database, Displaced
from skyrl.storage.db.faults import is_transient
from skyrl.storage.db.models import ModelRecord
from skyrl.trainer.protocol import Backend, OutOfMemory

logger = logging.getLogger(__name__)

SKIPPED = (
    f"skipped: the engine died {DEATHS_TO_BLAME} times while it ran this command, so the command is not tried again; "
    "it has not changed its model"
)
GONE_S = 60.0
"""A client is gone if its last heartbeat came longer than this before the engine's start. The SDK sends one every
10 s."""
LOOK_S = 1.0
"""How often recovery looks which models are wanted by now."""
AT_ONCE = 4
"""How many models are restored at a time. Their commands take turns: a long restoration delays a short one little."""
SPARED = 9.0
"""A try that found too little memory, or files that cannot be used, is followed by a pause of SPARED times the try's
duration. Each try repeats commands on the backend thread; in the pause other models train."""


@dataclass(eq=False)
class Recovery:
    """Call all methods on the event loop: `begin` once, before the engine's loop; then `restore_wanted` every LOOK_S,
    and `retry` now and then for held models, whose files or checkpoint store were away or whose memory was short. After
    `signals.stop()`, recovery ends before the next command. `wants_all`: also restore models whose clients are gone."""

    _database: Database
    _backend: Backend
    _scheduler: Scheduler
    _log: CommandLog
    _settlement: Settlement
    _threads: EngineThreads
    _snapshots: Snapshots
    _ledger: CrashLedger
    _signals: EngineSignals
    _holds: Holds
    restoring: Restoring
    _model_ends: ModelEnds
    _role: BaseModelSlot
    _: KW_ONLY
    wants_all: bool

    def __post_init__(self) -> None:
        self._counts = self._ledger.counts
        self.on_failed: Callable[[], None] = lambda: None
        """Called when a model has failed for good."""
        self._unrestored: set[str] = set()
        """Models that were not tried yet."""
        self._counted: set[str] = set()
        """Those whose commands are in the progress."""
        self._heard_at: dict[str, float] = {}
        """By model, the last heartbeat of its client before the start, in seconds since the epoch."""
        self._began_at = 0.0
        """The engine's start, in seconds since the epoch."""
        self._held: set[str] = set()
        self._spared: set[str] = set()
        """The held models of which each try may repeat commands."""
        self._spared_until = 0.0
        """When these models are tried again, in monotonic seconds."""

    async def begin(self) -> None:
        """Close the models of ended sessions, skip commands that have killed the engine too often, and hold all living
        models until they are restored."""
        await self._model_ends.end_sessions()
        suspects = await asyncio.to_thread(self._skip_poison)
        await asyncio.to_thread(fail_foreign, self._database, self._settlement, self._role)
        self._heard_at = await self._heartbeats()
        self._began_at = time.time()
        for model in await self._living():
            next_seq = await self._database.read_async(lambda c, model=model: _next_seq(c, model))
            self._scheduler.open_model(model.id, next_seq)
            self._scheduler.hold(model.id)
            self._unrestored.add(model.id)
            self._holds.models.add(model.id)
        self.restoring.suspected = {command.request_id for command in suspects if command.model_id in self._unrestored}
        self._scheduler.suspect(self.restoring.suspected)
        self._forget_deaths_at_end()

    async def run(self) -> None:
        """`begin`, and restore the models that are wanted then."""
        await self.begin()
        await self.restore_wanted()

    async def restore_wanted(self) -> None:
        """Restore models, AT_ONCE at a time in turns, as long as there is one that is not restored and is wanted.

        A model that cannot be restored is failed, and the log says why. A model is held while its checkpoint store is
        away or memory is short: its commands wait. Other models go on.
        """
        wanted, look_due, running = list[ModelRecord](), 0.0, dict[str, asyncio.Task[None]]()
        try:
            while self._unrestored or running:
                if time.monotonic() >= look_due:
                    wanted, look_due = await self._look(), time.monotonic() + LOOK_S
                while wanted and len(running) < AT_ONCE and not self._signals.is_stopped:
                    model = wanted.pop(0)
                    if model.id in self._unrestored and model.id not in running:  # it may have ended since the look
                        running[model.id] = asyncio.create_task(self._restore(model))
                if not running:
                    break
                await asyncio.wait(running.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for model_id in [model_id for model_id, task in running.items() if task.done()]:
                    await running.pop(model_id)
        finally:
            self._holds.end()
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def _look(self) -> list[ModelRecord]:
        """The models that are not restored and are wanted: those with commands first, then those whose clients live."""
        for closed in self._unrestored - self._scheduler.model_ids:
            self._release(closed)
        models = [model for model in await self._living() if model.id in self._unrestored]
        asked = await self._database.read_async(rows.models_with_pending)
        heartbeats = await self._heartbeats()
        wanted = [m for m in models if m.id in asked or self.wants_all or self._lives(m.id, heartbeats.get(m.id))]
        uncounted = [model for model in wanted if model.id not in self._counted]
        if uncounted:
            self._counted.update(model.id for model in uncounted)
            self._holds.begin(
                await self._database.read_async(
                    lambda c: sum(rows.count_executed(c, model.id, model.next_seq) for model in uncounted)
                )
            )
        return sorted(wanted, key=lambda model: model.id not in asked)

    def _lives(self, model_id: str, heard_at: float | None) -> bool:
        if heard_at is None:
            return False
        return heard_at >= self._began_at - GONE_S or heard_at != self._heard_at.get(model_id)

    async def _heartbeats(self) -> dict[str, float]:
        return await self._database.read_async(lambda c: model_rows.heartbeats(c, self._role.scope))

    async def retry(self) -> None:
        """Try again to restore the models that are held, except those that settings refuse until the next start."""
        for closed in self._held - self._scheduler.model_ids:
            self._release(closed)
        began = time.monotonic()
        refused = {model_id for model_id, reason in self._holds.reasons.items() if reason is WaitsFor.SETTINGS}
        due = self._held - refused - (self._spared if began < self._spared_until else set())
        if due:
            for model in await self._living():
                if model.id in due:
                    await self._restore(model)
        if due & self._spared:
            now = time.monotonic()
            self._spared_until = now + SPARED * (now - began)

    async def _living(self) -> list[ModelRecord]:
        return await self._database.read_async(lambda c: model_rows.living(c, self._role.scope))

    async def _restore(self, model: ModelRecord) -> None:
        """Restore one model and let its commands run; or hold the model, or fail it.

        Raises Displaced when the claim is lost, and DatabaseError when the database is away and the engine is stopped.
        In these cases no model is failed.
        """
        if self._signals.is_stopped:
            return
        try:
            await self.restoring.restore(model)
        except Stopped:
            return
        except Closed:
            pass
        except Exception as error:  # one model's error must not keep the others from training
            if is_transient(error) or isinstance(error, Displaced):
                raise
            if self._signals.is_stopped:  # the error may come from the shutdown, so the model may be intact
                logger.info("model %s is left to the next start: %s", model.id, error)
                return
            self._snapshots.stop_tracking(model.id)
            if await self._hold(model.id, error):
                return
            logger.exception("model %s cannot be restored", model.id)
            await asyncio.to_thread(self._database.write, model_rows.set_status(model.id, "failed"))
            await self._log.close_queue(model.id)
            self.on_failed()
        if model.id not in self._scheduler:  # the model has failed, or its session has ended meanwhile
            self._snapshots.stop_tracking(model.id)
            await self._threads.on_backend(lambda: self._backend.delete_model(model.id))
        self._release(model.id)

    async def _hold(self, model_id: str, error: Exception) -> bool:
        """Hold the model if a later try may succeed after `error`, perhaps at the next start. Returns whether the model
        is held."""
        if isinstance(error, StoreError) and not isinstance(error, NotStored):
            waits_for, why = WaitsFor.STORE, "waits for a checkpoint that it has loaded"
        elif isinstance(error, OutOfMemory):
            waits_for, why = WaitsFor.MEMORY, "waits until there is memory to restore it"
        elif isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            waits_for, why = WaitsFor.FILES, "waits until its files can be read, and written where that is needed"
        elif isinstance(error, NotAllowedNow):
            waits_for, why = WaitsFor.SETTINGS, "waits for a start with settings that allow it, as those before did"
        else:
            return False
        logger.warning("model %s %s: %s", model_id, why, error)
        if waits_for is not WaitsFor.STORE:
            await self._threads.on_backend(lambda: self._backend.delete_model(model_id))
        (self._spared.discard if waits_for is WaitsFor.STORE else self._spared.add)(model_id)
        self._holds.reasons[model_id] = waits_for
        self._held.add(model_id)
        self._tried(model_id)
        return True

    def _release(self, model_id: str) -> None:
        self._held.discard(model_id)
        self._spared.discard(model_id)
        self._holds.reasons.pop(model_id, None)
        self._holds.models.discard(model_id)
        self._scheduler.release(model_id)
        self._tried(model_id)
        self._signals.wake()

    def _tried(self, model_id: str) -> None:
        if model_id in self._unrestored:
            self._unrestored.discard(model_id)
            self._forget_deaths_at_end()

    def _forget_deaths_at_end(self) -> None:
        """When every model was tried: forget the deaths of all commands but those that still run alone."""
        if not self._unrestored:
            self._ledger.forget_all_but(self.restoring.suspected)

    def _skip_poison(self) -> list[Command]:
        """Fail the commands that have killed the engine too often. Returns the other commands that were running when
        the engine died."""
        if not self._counts:
            return []
        pending = self._database.read(lambda c: rows.pending(c, sorted(ENGINE_KINDS), scope=self._role.scope))
        suspects: list[Command] = []
        for command in pending:
            if (deaths := self._counts.get(command.request_id, 0)) == 0:
                continue
            description = f"{command.kind} {command.request_id} (model {command.model_id}, command {command.seq_id})"
            logger.warning("the engine died while it ran %s; deaths so far: %d", description, deaths)
            if deaths >= DEATHS_TO_BLAME:
                self._settlement.skip(command, SKIPPED)
            else:
                suspects.append(command)
        return suspects


def _next_seq(connection: Connection, model: ModelRecord) -> int:
    return max(model.next_seq, rows.highest_settled_seq(connection, model.id) + 1)
