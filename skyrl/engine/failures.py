"""The outcome of a command that raised: what its client is told, and what only the log says."""

from __future__ import annotations

import logging

from skyrl.backends.base import InvalidRequest, OutOfMemory
from skyrl.db.futures import Outcome
from skyrl.storage.base import NotStored, StoreError
from skyrl.storage.space import is_full_disk
from skyrl.types.command import Command
from skyrl.wire.errors import ErrorCategory, FailedRequest, RequestError

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "the server had too little memory for this command, which has changed nothing; send it again later, or fewer "
    "tokens at a time"
)
"""What a client is told of OutOfMemory. The log says where memory ran out."""


def failed(error: Exception, command: Command) -> Outcome:
    """The outcome of `command`, which raised `error`.

    A client is told of its own mistakes in the error's words. Of the server's failures it is told a plain sentence: the
    error may name paths or addresses, so it goes to the log, with the request's id.
    """
    if isinstance(error, FailedRequest):
        return Outcome(error=error.message, error_category=error.category)
    if isinstance(error, RequestError | InvalidRequest | FloatingPointError):  # the last: a gradient that is not finite
        return Outcome(error=str(error), error_category=ErrorCategory.USER)
    return Outcome(error=_sentence(error, command), error_category=ErrorCategory.SERVER)


def _sentence(error: Exception, command: Command) -> str:
    """What the client is told of a failure of the server; the details are logged."""
    if is_full_disk(error):
        logger.error("%s %s failed: no space left on the disk: %s", command.kind, command.request_id, error)
        return "no space left on the server's disk; tell the server's operator, and try again when there is"
    if isinstance(error, StoreError):  # its text names the operator's store
        logger.warning("%s %s failed: %s", command.kind, command.request_id, error)
        lost = isinstance(error, NotStored)
        return "the checkpoint's files are gone" if lost else "the server's checkpoint store cannot be used now"
    logger.error("%s %s failed", command.kind, command.request_id, exc_info=error)
    if isinstance(error, OutOfMemory):
        return OUT_OF_MEMORY
    return f"the server failed while it ran this command; the server's log says why, under {command.request_id}"
