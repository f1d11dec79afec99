"""Settling commands: write their outcomes to the database, then ring the API.

All requests that the engine ends are settled here, except the requests of ended sessions (`model_ends`). `failed` makes
the outcome of a command that raised: a message for the client, and details for the log only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count

from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire.errors import ErrorCategory, FailedRequest, RequestError
from skyrl.base.wire.results import encode_json
from skyrl.engine.exclusive_commands import model_is_gone, unloaded
from skyrl.engine.metrics import CommandMetrics
from skyrl.runtime.processes.host_resources import is_full_disk
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db import futures as rows
from skyrl.storage.db.database import Change, Connection, Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.models import set_model
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
