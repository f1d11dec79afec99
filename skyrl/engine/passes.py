"""A batch of passes: decode each body, check it, run what is left together, encode what came out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl.backends.base import Backend, Datum, InvalidRequest, OutOfMemory, PassResult, TrainingPass
from skyrl.db.futures import Outcome
from skyrl.storage.base import NotStored, StoreError
from skyrl.storage.space import is_full_disk
from skyrl.types.command import Command
from skyrl.types.kinds import Kind
from skyrl.wire.errors import ErrorCategory, FailedRequest, RequestError
from skyrl.wire.results import encode_forward_backward
from skyrl.wire.training import decode_forward_backward

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "the server had too little memory for this command, which has changed nothing; send it again later, or fewer "
    "tokens at a time"
)
"""What a client is told of OutOfMemory. Where memory ran out is in the log."""


@dataclass(frozen=True)
class Ran:
    """One outcome per command, in order; and the tokens that passes which succeeded have trained on, by model id."""

    outcomes: list[tuple[Command, Outcome]]
    tokens: Mapping[str, int] = field(default_factory=dict)


def failed(error: Exception, command: Command) -> Outcome:
    """The outcome of a command that raised.

    The caller's mistakes are told in their own words. Of the server's own failures the client is told a plain sentence;
    the error, which may hold paths or addresses, goes to the log under the request's id.
    """
    if isinstance(error, FailedRequest):
        return Outcome(error=error.message, error_category=error.category)
    if isinstance(error, RequestError | InvalidRequest | FloatingPointError):  # the last: a gradient that is not finite
        return Outcome(error=str(error), error_category=ErrorCategory.USER)
    if isinstance(error, StoreError) and not is_full_disk(error):  # what it said names the operator's store
        logger.warning("%s %s failed: %s", command.kind, command.request_id, error)
        lost = isinstance(error, NotStored)
        what = "the checkpoint's files are gone" if lost else "the server's checkpoint store cannot be used now"
        return Outcome(error=what, error_category=ErrorCategory.SERVER)
    if is_full_disk(error):
        logger.error("%s %s failed: no space left on the disk: %s", command.kind, command.request_id, error)
        what = "no space left on the server's disk; tell the server's operator, and try again when there is"
        return Outcome(error=what, error_category=ErrorCategory.SERVER)
    logger.error("%s %s failed", command.kind, command.request_id, exc_info=error)
    if isinstance(error, OutOfMemory):
        return Outcome(error=OUT_OF_MEMORY, error_category=ErrorCategory.SERVER)
    what = f"the server failed while it ran this command; the server's log says why, under {command.request_id}"
    return Outcome(error=what, error_category=ErrorCategory.SERVER)


def decode_pass(command: Command, body: bytes, backend: Backend) -> TrainingPass:
    """Raises RequestError or InvalidRequest naming the field and the datum."""
    assert command.model_id is not None  # whose it is was checked; what the body says is not asked again
    forward_only = command.kind is Kind.FORWARD
    decoded = decode_forward_backward(body, command.body_format, forward_only=forward_only)
    training_pass = TrainingPass(
        model_id=command.model_id,
        data=[Datum(tokens, inputs) for tokens, inputs in zip(decoded.tokens, decoded.loss_inputs, strict=True)],
        loss_fn=decoded.loss_fn,
        loss_config=decoded.loss_config,
        backward=not decoded.forward_only,
    )
    backend.check(training_pass)
    return training_pass


def run_passes(commands: Sequence[Command], bodies: dict[str, bytes], backend: Backend) -> Ran:
    """A bad request fails alone. Runs on the backend's thread."""
    outcomes: dict[str, Outcome] = {}
    tokens: Counter[str] = Counter()
    runnable: list[tuple[Command, TrainingPass]] = []
    for command in commands:
        try:
            runnable.append((command, decode_pass(command, bodies[command.request_id], backend)))
        except Exception as error:
            outcomes[command.request_id] = failed(error, command)
    results: Sequence[PassResult | Exception]
    try:
        results = backend.run([training_pass for _, training_pass in runnable]) if runnable else []
    except Exception as error:
        results = [error] * len(runnable)
    for (command, training_pass), result in zip(runnable, results, strict=True):
        if isinstance(result, Exception):
            outcomes[command.request_id] = failed(result, command)
        else:
            encoded = encode_forward_backward(result.logprobs, result.metrics)
            outcomes[command.request_id] = Outcome(encoded, "proto:forward_backward")
            tokens[training_pass.model_id] += sum(len(datum.tokens) for datum in training_pass.data)
    return Ran([(command, outcomes[command.request_id]) for command in commands], tokens)
