"""The outcome of a command that raised: a message for the client, and details for the log only."""

from __future__ import annotations

import logging

from skyrl.base.types.requests import Command
from skyrl.base.wire.errors import ErrorCategory, FailedRequest, RequestError
from skyrl.runtime.processes.host_resources import is_full_disk
from skyrl.storage.checkpoint_store.base import NotStored, StoreError
from skyrl.storage.db.futures import Outcome
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
