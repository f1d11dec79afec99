"""Running what was taken, from its body to the ring: read, run, write the outcome, tell the API, all on one thread.

In one go, because for a small command each hop to another thread costs more than the reading or the writing. Does not
know what runs next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count

from sqlalchemy import Connection

from skyrl.backends.base import Backend
from skyrl.db import futures as rows
from skyrl.db import usage
from skyrl.db.database import Database
from skyrl.db.fence import Displaced
from skyrl.db.futures import Outcome
from skyrl.db.models import set_model
from skyrl.engine.barriers import Barriers, OnBackend, model_is_gone, unloaded
from skyrl.engine.commands import Change, Command
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.passes import failed, run_passes
from skyrl.engine.snapshots import Snapshots
from skyrl.notify.doorbell import Doorbell
from skyrl.types.kinds import SAVES, Kind
from skyrl.types.weights import AdapterVersion
from skyrl.wire.errors import ErrorCategory
from skyrl.wire.results import encode_json

logger = logging.getLogger(__name__)

PublishAdapter = Callable[[AdapterVersion], None]
"""Tells the inference servers of a new adapter, from the thread that saved it."""


NextSeq = Callable[[str], int | None]
"""The number of a model's next command, while none of its commands waits to run or runs but the caller's; None for a
model that is closed."""


class Execution:
    """Every method runs to its end on the calling thread; raises what the database raises."""

    def __init__(
        self,
        database: Database,
        backend: Backend,
        barriers: Barriers,
        snapshots: Snapshots,
        ledger: CrashLedger,
        api: Doorbell,
        on_backend: OnBackend,
        publish_adapter: PublishAdapter,
        next_seq: NextSeq,
    ) -> None:
        self._database = database
        self._backend = backend
        self._barriers = barriers
        self._snapshots = snapshots
        self._ledger = ledger
        self._api = api
        self._on_backend = on_backend
        self._publish_adapter = publish_adapter
        self._next_seq = next_seq

    def passes(self, commands: Sequence[Command]) -> None:
        """Run passes on the backend's thread; those whose rows are gone are skipped."""
        with self._ledger.watching([command.request_id for command in commands]):
            self._run_passes(commands)

    def _run_passes(self, commands: Sequence[Command]) -> None:
        bodies = self._bodies(commands)
        here = [command for command in commands if command.request_id in bodies]
        started = time.perf_counter()
        ran = run_passes(here, bodies, self._backend)
        logger.debug("%d passes in %.1f ms", len(here), (time.perf_counter() - started) * 1e3)
        outcomes = [(command.request_id, outcome) for command, outcome in ran.outcomes]
        self.settle(outcomes, lambda connection: usage.count_training(connection, ran.tokens))
        for command in here:
            assert command.model_id is not None
            self._snapshots.ran(command.model_id, command.kind)

    def barrier(self, command: Command) -> Outcome | None:
        """Run one on the backend's thread, or a save or a load on another; None when its row is gone."""
        with self._ledger.watching([command.request_id]):
            outcome = self._run_barrier(command)
        if outcome is not None and command.model_id is not None and command.seq_id is not None:
            self._snapshots.ran(command.model_id, command.kind)
            if outcome.error is None:
                self._snapshot_after(command.kind, command.model_id)
        return outcome

    def _run_barrier(self, command: Command) -> Outcome | None:
        body = self._bodies([command]).get(command.request_id)
        if body is None:
            return None
        change: Change | None = None
        try:
            done = self._barriers.run(command, body)
            outcome = Outcome(encode_json(done.result))
            change = done.change
            if done.adapter is not None:
                self._publish_adapter(done.adapter)
        except Exception as error:
            outcome, change = failed(error, command), _fails_model(command)
        self.settle([(command.request_id, outcome)], change, power_safe=command.kind in SAVES)
        return outcome

    def skip(self, command: Command, why: str) -> None:
        """A command fails without being run. Nothing was done to its model, and what follows it runs."""
        outcome = Outcome(error=why, error_category=ErrorCategory.SERVER)
        self.settle([(command.request_id, outcome)], _fails_model(command))

    def refuse(self, commands: Sequence[Command]) -> None:
        """Commands of a model that is gone fail, but for those that wanted just that."""

        def outcome(command: Command) -> Outcome:
            if command.kind is Kind.UNLOAD_MODEL:
                return Outcome(encode_json(unloaded(command.model_id)))
            return failed(model_is_gone(command), command)

        self.settle([(command.request_id, outcome(command)) for command in commands])

    def settle(
        self,
        outcomes: Sequence[tuple[str, Outcome]],
        change: Change | None = None,
        *,
        power_safe: bool = False,
    ) -> None:
        """Write outcomes (and what belongs with them) in one transaction, then tell the API."""
        now = time.time()
        attempts = count()

        def write(connection: Connection) -> None:
            if next(attempts) and rows.settled_at(connection, [request_id for request_id, _ in outcomes], now):
                return  # the first attempt's commit seemed lost, and was not
            if change is not None:
                change(connection)
            if outcomes:
                connection.execute(rows.SETTLE, [rows.settlement(request_id, o, now) for request_id, o in outcomes])

        self._database.write(write, power_safe=power_safe)
        self._api.ring([request_id for request_id, _ in outcomes])

    def _bodies(self, commands: Sequence[Command]) -> dict[str, bytes]:
        ids = [command.request_id for command in commands]
        return self._database.read(lambda c: rows.bodies(c, ids))

    def snapshot_overdue(self, model_id: str) -> None:
        """Of a model that has not stepped for long, on the backend's thread; none of its commands may run."""
        if not self._snapshot(model_id, self._snapshots.take):
            self._snapshots.put_off(model_id)

    def _snapshot_after(self, kind: Kind, model_id: str) -> None:
        """After a step if it is time, and after every load."""
        if kind is Kind.OPTIM_STEP:
            self._snapshot(model_id, self._snapshots.after_step)
        elif kind is Kind.LOAD_WEIGHTS:
            self._on_backend(lambda: self._snapshot(model_id, self._snapshots.take))

    def _snapshot(self, model_id: str, take: Callable[[str, int], None]) -> bool:
        """One that fails costs time after a crash, and nothing now."""
        next_seq = self._next_seq(model_id)
        if next_seq is None:
            return True
        try:
            take(model_id, next_seq)
        except Displaced:
            raise
        except Exception:
            logger.exception("model %s has no snapshot at command %d", model_id, next_seq)
            return False
        return True


def _fails_model(command: Command) -> Change | None:
    """What else a failure changes: without its first command there is no model."""
    if command.seq_id == 0 and command.model_id is not None:
        return set_model(command.model_id, status="failed")
    return None
