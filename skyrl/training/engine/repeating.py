"""Repeating one finished command on a backend, when a model is restored.

Where the backend `repeats_exactly`, a command must end as it ended before. Elsewhere results may differ by rounding: a
number near the end of float32's range may overflow now. Then a warning is logged, and the model goes on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl.base.types.requests import Command, ExecutedCommand, Kind
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import LoadWeightsCommand, OptimStepRequest
from skyrl.storage.db.models import ModelRecord
from skyrl.trainer.protocol import Backend, InvalidRequest, TrainingPass
from skyrl.training.engine.barriers import adam_params
from skyrl.training.engine.passes import decode_pass
from skyrl.training.engine.pictures import PassPictures

logger = logging.getLogger(__name__)


def repeat_command(
    executed: ExecutedCommand,
    body: bytes,
    model: ModelRecord,
    backend: Backend,
    loaded: Mapping[str, Path],
    pictures: PassPictures,
) -> None:
    """Repeat a command's change of its model. Saves and forward passes change nothing.

    `loaded`: by request id of a load, the directory with its files. Runs on the backend thread.
    """
    command = executed.command
    if command.kind is Kind.CREATE_MODEL:
        backend.create_model(model.id, model.lora)
    elif command.kind is Kind.FORWARD_BACKWARD:
        training_pass = decode_pass(command, body, backend, pictures)
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
    """A step that failed is not repeated, because rounding might let it succeed now. The step had either refused
    hyper-parameters, which changed nothing, or a gradient that was not finite and was dropped."""
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
    """`error` means that a number is not finite now, but was finite when the command first ran. Where repeating is
    exact, raise the error: the model's state must differ. Elsewhere rounding explains the error: log it and go on."""
    try:
        yield
    except error as found:
        if backend.repeats_exactly:
            raise
        name = command.model_id, command.seq_id
        logger.warning("model %s: command %d succeeded before and fails when repeated: %s", *name, found)
