"""Settling commands: write their outcomes to the database, then ring the API.

All requests that the engine ends are settled here, except the requests of ended sessions (`model_ends`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.base.wire.results import encode_json
from skyrl.engine.metrics import CommandMetrics
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Change, Connection, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import set_model
from skyrl.storage.doorbell import Doorbell
from skyrl.training.engine.barriers import model_is_gone, unloaded
from skyrl.training.engine.failures import failed


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
            if next(attempts) and rows.settled_as(connection, outcomes):
                return  # an earlier attempt did commit, although its answer was lost
            if change is not None:
                change(connection)
            rows.settle(connection, outcomes, now)

        self._database.write(write, power_safe=power_safe)
        self._api.ring([request_id for request_id, _ in outcomes])

    def skip(self, command: Command, message: str) -> None:
        """Fail a command without running it. Its model is unchanged, and the model's later commands run."""
        outcome = Outcome(error=message, error_category=ErrorCategory.SERVER)
        self.end([(command, outcome)], fails_model(command))

    def refuse(
        self,
        commands: Sequence[Command],
        why: Callable[[Command], FailedRequest] = model_is_gone,
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
        return set_model(command.model_id, status="failed")
    return None
