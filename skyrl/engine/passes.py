"""A batch of passes: read their pictures from the database, decode and check each body, run the valid passes together,
encode their results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl.base.pictures.places import place
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire.errors import FailedRequest, RequestError
from skyrl.base.wire.results import encode_forward_backward
from skyrl.base.wire.sample_request import LOCATION
from skyrl.base.wire.training import ForwardBackward, decode_forward_backward
from skyrl.engine.settlement import failed
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.run_steps import StepSums
from skyrl.trainer.protocol import Backend, Datum, PassResult, TrainingPass

GAP = "kl:mean"
"""The metric of a pass that compares its logprobs with the sampler's."""


@dataclass(frozen=True)
class PassOutcomes:
    """One outcome per command, in order. `tokens`: by model id, the number of tokens in passes that succeeded. `gaps`:
    for each of them with logprobs of the sampler, the mean of sampler's minus trainer's logprobs in nats. `trained`: by
    model id, the sums over the forward_backward passes that succeeded."""

    outcomes: list[tuple[Command, Outcome]]
    tokens: Mapping[str, int] = field(default_factory=dict)
    gaps: Sequence[float] = ()
    trained: Mapping[str, StepSums] = field(default_factory=dict)


def decode_pass(command: Command, body: bytes, backend: Backend, pictures: PassPictures) -> TrainingPass:
    """The command's pass, checked. Raises RequestError or InvalidRequest, naming field and datum, and FailedRequest."""
    assert command.model_id is not None  # checked by the API; the model_id in the body is ignored
    forward_only = command.kind is Kind.FORWARD
    decoded = decode_forward_backward(body, command.body_format, forward_only=forward_only)
    data, files = pictures.data_of(decoded, command.tenant)
    training_pass = TrainingPass(
        model_id=command.model_id,
        data=data,
        loss_fn=decoded.loss_fn,
        loss_config=decoded.loss_config,
        backward=not decoded.forward_only,
        files=files,
    )
    backend.check(training_pass)
    return training_pass


def run_passes(
    commands: Sequence[Command], bodies: dict[str, bytes], backend: Backend, pictures: PassPictures
) -> PassOutcomes:
    """Run passes on the backend thread. An invalid pass fails alone; the other passes run.

    Raises BackendLost: then no outcome is known, and the engine must end.
    """
    outcomes: dict[str, Outcome] = {}
    tokens: Counter[str] = Counter()
    gaps: list[float] = []
    trained: dict[str, StepSums] = {}
    runnable: list[tuple[Command, TrainingPass]] = []
    for command in commands:
        try:
            runnable.append((command, decode_pass(command, bodies[command.request_id], backend, pictures)))
        except Exception as error:  # the client gets it, or the log
            outcomes[command.request_id] = failed(error, command)
    results: Sequence[PassResult | Exception]
    try:
        results = backend.run([training_pass for _, training_pass in runnable]) if runnable else []
    except Exception as error:  # each pass gets it
        results = [error] * len(runnable)
    for (command, training_pass), result in zip(runnable, results, strict=True):
        if isinstance(result, Exception):
            outcomes[command.request_id] = failed(result, command)
        else:
            encoded = encode_forward_backward(result.logprobs, result.metrics)
            outcomes[command.request_id] = Outcome(encoded, "proto:forward_backward")
            size = sum(len(datum.tokens) for datum in training_pass.data)
            tokens[training_pass.model_id] += size
            if GAP in result.metrics:
                gaps.append(result.metrics[GAP])
            if training_pass.backward:
                sums = StepSums.of_pass(size, result.metrics)
                before = trained.get(training_pass.model_id)
                trained[training_pass.model_id] = sums if before is None else before + sums
    return PassOutcomes([(command, outcomes[command.request_id]) for command in commands], tokens, gaps, trained)


class PassPictures:
    """`sight`: how the base model sees."""

    def __init__(self, database: Database, sight: VisionConfig | NoVision) -> None:
        self._database = database
        self._files = PictureFiles(database)
        self._sight = sight

    def data_of(self, decoded: ForwardBackward, tenant: str) -> tuple[list[Datum], dict[str, bytes]]:
        """The data of a pass, and by digest the files of their pictures. Raises RequestError naming the chunk, and
        FailedRequest if a file is not stored any more. Reads nothing for a pass of text alone."""
        images = [image for of_datum in decoded.images for image in of_datum]
        if not images:
            pairs = zip(decoded.tokens, decoded.loss_inputs, strict=True)
            return [Datum(tokens, inputs) for tokens, inputs in pairs], {}
        if isinstance(self._sight, NoVision):
            raise RequestError(f"is an image, and the base model takes text only: {self._sight}", field=images[0].name)
        named = {image.location.removeprefix(LOCATION) for image in images}
        known = self._database.read(lambda c: rows.find(c, tenant, named))
        data: list[Datum] = []
        for text, of_datum, inputs in zip(decoded.tokens, decoded.images, decoded.loss_inputs, strict=True):
            tokens, pictures = place(text, of_datum, known, self._sight) if of_datum else (text, ())
            data.append(Datum(tokens, inputs, pictures))
        files = self._files.read(tenant, known)
        if len(files) < len(known):
            raise FailedRequest("an image of this request is not stored any more")
        return data, files
