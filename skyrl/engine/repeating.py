"""Repeating one finished command on a backend, when a model is restored.

Where the backend `repeats_exactly`, a command must end as it ended before. Elsewhere it may differ by rounding: a
number that was finite at the end of float32's range may overflow now. Then a warning is logged, and the model goes on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl.backends.base import Backend, InvalidRequest, TrainingPass
from skyrl.db.models import ModelRecord
from skyrl.engine.barriers import adam_params
from skyrl.engine.passes import decode_pass
from skyrl.types.command import Command, ExecutedCommand
from skyrl.types.kinds import Kind
from skyrl.wire.decoding import decode_json
from skyrl.wire.errors import RequestError
from skyrl.wire.requests import LoadWeightsCommand, OptimStepRequest

logger = logging.getLogger(__name__)


def repeat_command(
    executed: ExecutedCommand, body: bytes, model: ModelRecord, backend: Backend, loaded: Mapping[str, Path]
) -> None:
    """Do again what a command did to its model. Saves and forward passes did nothing to it.

    `loaded` has the directory with the files of each load, by request id. Runs on the backend's thread.
    """
    command = executed.command
    if command.kind is Kind.CREATE_MODEL:
        backend.create_model(model.id, model.lora)
    elif command.kind is Kind.FORWARD_BACKWARD:
        training_pass = decode_pass(command, body, backend)
        if training_pass.backward:
            _repeat_pass(command, training_pass, backend)
    elif command.kind is Kind.OPTIM_STEP:
        _repeat_step(executed, body, model.id, backend)
    elif command.kind is Kind.LOAD_WEIGHTS:
        if command.seq_id == 0:
            backend.create_model(model.id, model.lora)
        optimizer = decode_json(LoadWeightsCommand, body).optimizer
        backend.load_state(model.id, loaded[command.request_id], optimizer=optimizer)


def _repeat_pass(command: Command, training_pass: TrainingPass, backend: Backend) -> None:
    for result in backend.run([training_pass]):
        with _unless_rounding(command, backend, InvalidRequest):
            if isinstance(result, Exception):
                raise result


def _repeat_step(executed: ExecutedCommand, body: bytes, model_id: str, backend: Backend) -> None:
    """A step that failed is not tried again, because rounding might let it succeed now. Either its hyper-parameters
    were refused, which changed nothing, or its gradient was not finite and was dropped."""
    if executed.status == "done":
        params = adam_params(decode_json(OptimStepRequest, body))
        with _unless_rounding(executed.command, backend, FloatingPointError):
            backend.optim_step(model_id, params)
        return
    try:
        backend.check_step(adam_params(decode_json(OptimStepRequest, body)))
    except (InvalidRequest, RequestError):
        return
    backend.clear_gradient(model_id)


@contextlib.contextmanager
def _unless_rounding(command: Command, backend: Backend, error: type[Exception]) -> Iterator[None]:
    """`error` means that a number is not finite now, although it was when the command first ran. Raise it where
    repeating is exact: the model's state must be another one. Elsewhere rounding explains it: log it, and go on."""
    try:
        yield
    except error as found:
        if backend.repeats_exactly:
            raise
        name = command.model_id, command.seq_id
        logger.warning("model %s: command %d succeeded, and repeated it fails: %s", *name, found)
