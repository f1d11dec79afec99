"""The engine's side of the command log: new commands go from the database to the scheduler, and outcomes come back.

`Settlement` writes outcomes, then rings the API: of all requests that the engine ends, except those of ended sessions
(`model_ends`). `failed` makes the outcome of a command that raised: a message for the client, and details for the log
only. `CommandLog` reads. Commands whose model is closed are refused instead, and so are commands whose turn has passed
because their number was missing for too long.

`Gaps` knows how long commands wait for a missing number, and why they fail afterwards. A client never sends a number
again after a refusal or after its own death, so a command behind a missing number would wait until its session ends.
`Gaps` knows views of the scheduler and times, and settles nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from skyrl.base.types.requests import ENGINE_KINDS, Command, Kind
from skyrl.base.types.weights import Scope
from skyrl.base.wire.errors import ErrorCategory, FailedRequest, RequestError
from skyrl.base.wire.results import encode_json
from skyrl.engine.exclusive_commands import model_is_gone, unloaded
from skyrl.engine.metrics import CommandMetrics
from skyrl.engine.queues import ModelView
from skyrl.engine.scheduler import Scheduler
from skyrl.engine.snapshots import Snapshots
from skyrl.runtime.processes.host_resources import is_full_disk
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db import futures
from skyrl.storage.db import models as rows
from skyrl.storage.db.database import Change, Connection, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import living_among, set_status
from skyrl.storage.doorbell import Doorbell
from skyrl.trainer.protocol import InvalidRequest, OutOfMemory

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "the server had too little memory for this command, which has changed nothing; send it again later, or fewer "
    "tokens at a time"
)
"""The client's message for OutOfMemory. The log says where memory ran out."""


def failed(error: Exception, command: Command) -> Outcome:
    """The outcome of `command`, which raised `error`.

    The text of an error goes to the client if the client made the mistake. For a failure of the server, the client gets
    a general sentence, and the error goes to the log with the request id: its text may name paths or addresses.
    """
    if isinstance(error, FailedRequest):
        return Outcome(error=error.message, error_category=error.category)
    # FloatingPointError: the gradient is not finite.
    if isinstance(error, RequestError | InvalidRequest | FloatingPointError):
        return Outcome(error=str(error), error_category=ErrorCategory.USER)
    return Outcome(error=_sentence(error, command), error_category=ErrorCategory.SERVER)


def _sentence(error: Exception, command: Command) -> str:
    """The client's message for a failure of the server. Logs the details."""
    if is_full_disk(error):
        logger.error("%s %s failed: no space left on the disk: %s", command.kind, command.request_id, error)
        return "no space left on the server's disk; tell the server's operator, and try again when there is space"
    if isinstance(error, StoreError):  # its text names the operator's store
        logger.warning("%s %s failed: %s", command.kind, command.request_id, error)
        lost = isinstance(error, NotStored)
        return "the checkpoint's files are gone" if lost else "the server's checkpoint store cannot be used now"
    logger.error("%s %s failed", command.kind, command.request_id, exc_info=error)
    if isinstance(error, OutOfMemory):
        return OUT_OF_MEMORY
    return f"the server failed while it ran this command; the server's log says why, under {command.request_id}"


class Settlement:
    """Several threads may call one object. Every method waits for the database on the calling thread, and raises
    DatabaseError or Displaced."""

    def __init__(self, database: Database, api: Doorbell, metrics: CommandMetrics) -> None:
        self._database = database
        self._api = api
        self._metrics = metrics

    def settle(
        self,
        outcomes: Sequence[tuple[str, Outcome]],
        change: Change | None = None,
        *,
        power_safe: bool = False,
    ) -> None:
        """Write outcomes by request id, and `change`, in one transaction; then ring the API processes.

        With `power_safe`, the transaction survives a power cut after this method has returned.
        """
        now = time.time()
        attempts = count()

        def write(connection: Connection) -> None:
            if next(attempts) and futures.settled_as(connection, outcomes):
                return  # an earlier attempt did commit, although its answer was lost
            if change is not None:
                change(connection)
            futures.settle(connection, outcomes, now)

        self._database.write(write, power_safe=power_safe)
        self._api.ring([request_id for request_id, _ in outcomes])

    def skip(self, command: Command, message: str) -> None:
        """Fail a command without running it. Its model is unchanged, and the model's later commands run."""
        outcome = Outcome(error=message, error_category=ErrorCategory.SERVER)
        self.end([(command, outcome)], fails_model(command))

    def refuse(
        self,
        commands: Sequence[Command],
        why: Callable[[Command], FailedRequest],
        change: Change | None = None,
    ) -> None:
        """Fail commands whose model is closed, and make `change`. A command that unloads the model succeeds."""

        def outcome(command: Command) -> Outcome:
            if command.kind is Kind.UNLOAD_MODEL:
                return Outcome(encode_json(unloaded(command.model_id)))
            return failed(why(command), command)

        self.end([(command, outcome(command)) for command in commands], change)

    def end(self, ended: Sequence[tuple[Command, Outcome]], change: Change | None = None) -> None:
        """`settle`, and count these commands."""
        self.settle([(command.request_id, outcome) for command, outcome in ended], change)
        for command, outcome in ended:
            self._metrics.ended(command.kind, outcome.error, outcome.error_category)


def fails_model(command: Command) -> Change | None:
    """The change that the failure of a command makes besides its outcome: the failure of a model's first command fails
    the model."""
    if command.seq_id == 0 and command.model_id is not None:
        return set_status(command.model_id, "failed")
    return None


class CommandLog:
    """The commands of models in `scope`. Several tasks may call the methods; a lock runs them one at a time."""

    def __init__(
        self,
        database: Database,
        scheduler: Scheduler,
        settlement: Settlement,
        snapshots: Snapshots,
        scope: Scope,
        gaps: Gaps,
    ) -> None:
        self._database = database
        self._scope = scope
        self._gaps = gaps
        self._scheduler = scheduler
        self._settlement = settlement
        self._snapshots = snapshots
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
                    self._snapshots.refused(model_id)

    async def close_queue(self, model_id: str) -> None:
        """Close the queue of a closed or failed model: fail its waiting commands, also commands that wait for a missing
        seq_id."""
        async with self._reading:  # a running `read` may be about to queue a command of this model
            await self._refuse(self._scheduler.close_model(model_id))

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


@dataclass(frozen=True, slots=True)
class _Gap:
    """`missing` is the number that has not arrived. `last_row` is the row of the model's newest command."""

    missing: int
    last_row: int


class Gaps:
    """Times are monotonic, in seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._since: dict[str, tuple[_Gap, float]] = {}

    def overdue(self, views: Mapping[str, ModelView], now: float) -> dict[str, int]:
        """The models whose commands have waited for `timeout_s` for a number, each with that number.

        The time begins when the model's earlier commands have ended, and again with each command of the model that
        arrives: the SDK sends the first chunk of a pass after all others, which may take long on a slow network.
        """
        found: dict[str, tuple[_Gap, float]] = {}
        for model_id, view in views.items():
            if not view.missing or view.held:  # number 0 makes the model, and is recorded with it
                continue
            gap = _Gap(view.missing, max(command.n for command in view.commands))
            before, since = self._since.get(model_id, (gap, now))
            found[model_id] = gap, since if before == gap else now
        self._since = found
        return {model: gap.missing for model, (gap, since) in found.items() if now - since >= self.timeout_s}

    def never_came(self, missing: int) -> FailedRequest:
        """Why a command fails that waited for the number `missing`."""
        return FailedRequest(
            f"seq_id: command {missing} of this model has not arrived within {self.timeout_s:g} s, so this later "
            "command was not run: commands run in the order of their numbers. The client or the network has lost it; "
            "send the commands from there on again, under new numbers",
            ErrorCategory.UNKNOWN,
        )


def came_late(command: Command) -> FailedRequest:
    """Why a command fails whose number was waited for in vain."""
    return FailedRequest(
        f"seq_id: command {command.seq_id} of this model arrived after later commands had ended, so it was not run: "
        "commands run in the order of their numbers. Send it again under a new number",
        ErrorCategory.UNKNOWN,
    )
