"""Commands that run alone for their model: one method for each kind of command that is no pass. Saves are in `saving`.

Most of these commands run on the backend thread, one at a time. Saves and loads run on file threads, because they wait
for files. A load calls the backend thread when its files have been fetched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from skyrl.base.config.server import ServerConfig
from skyrl.base.types.requests import Command, Kind
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import FailedRequest, RequestError
from skyrl.base.wire.paths import parse_path
from skyrl.base.wire.requests import LoadWeightsCommand, OptimStepRequest
from skyrl.engine.saving import ExclusiveResult, Saves
from skyrl.engine.threads import EngineThreads
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.checkpoint_store.held import HeldVersions
from skyrl.storage.db import audit, checkpoints, futures
from skyrl.storage.db.database import Connection, FencedDatabase
from skyrl.storage.db.models import ModelRecord, find_model, set_status
from skyrl.trainer.protocol import AdamParams, Backend, PlaceTaken

PLACE_S, PLACE_POLL_S = 10.0, 0.05
"""How long a load that makes a model waits for the place of a model that has ended, and how often it looks."""
ON_A_TIED_HEAD = (
    "model %s has an adapter on lm_head, which its base model ties to the embeddings: the adapter does not change "
    "those. Programs that merge it into both, or take no adapter on lm_head, need `skyrl adapter merge` or `skyrl "
    "adapter without-lm-head`; train_unembed=False avoids this"
)
logger = logging.getLogger(__name__)


def model_is_gone(command: Command) -> FailedRequest:
    return FailedRequest(
        f"model_id: model {command.model_id!r} is not there any more: it was unloaded, its session has ended, or it "
        "could not be made or restored"
    )


def unloaded(model_id: str | None) -> dict[str, Any]:
    """The result of unloading a model, also when the model was closed before."""
    return {"type": "unload_model", "model_id": model_id}


def adam_params(body: bytes) -> AdamParams:
    """The values of an optimizer step. Raises RequestError naming the field, also for those of another optimizer."""
    request = decode_json(OptimStepRequest, body)
    if request.optimizer_params is not None:
        raise RequestError("this model's optimizer is AdamW; send AdamParams", field="optimizer_params")
    return request.adam_params or AdamParams()


class ExclusiveCommands:
    """One method per kind. Raises FailedRequest, RequestError or InvalidRequest for the client's mistakes."""

    def __init__(
        self,
        config: ServerConfig,
        database: FencedDatabase,
        backend: Backend,
        store: CheckpointStore,
        threads: EngineThreads,
        held: HeldVersions,
    ) -> None:
        self._own = config.role.own
        self._database = database
        self._backend = backend
        self._store = store
        self._threads = threads
        saves = Saves(config, database, backend, store, held)
        self._handlers: dict[Kind, Callable[[Command, bytes, ModelRecord], ExclusiveResult]] = {
            Kind.CREATE_MODEL: self._create_model,
            Kind.OPTIM_STEP: self._optim_step,
            Kind.SAVE_WEIGHTS: saves.weights,
            Kind.SAVE_WEIGHTS_FOR_SAMPLER: saves.for_sampler,
            Kind.SAVE_WEIGHTS_EXTERNAL: saves.external,
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.UNLOAD_MODEL: self._unload_model,
        }

    def run(self, command: Command, body: bytes) -> ExclusiveResult:
        return self._handlers[command.kind](command, body, self._living(command))

    def _living(self, command: Command) -> ModelRecord:
        model_id = command.model_id
        model = None if model_id is None else self._database.read(lambda c: find_model(c, model_id))
        if model is None or not model.is_living:
            raise model_is_gone(command)
        return model

    def _create_model(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        self._backend.create_model(model.id, model.lora)
        if self._backend.limits.ties_unembedding and model.lora.train_unembed and not model.lora.is_full:
            logger.info(ON_A_TIED_HEAD, model.id)
        return ExclusiveResult({"type": "create_model", "model_id": model.id}, set_status(model.id, "ready"))

    def _with_place(self, work: Callable[[], None]) -> None:
        """Run on the backend thread, and wait. A model that was closed just before has its place until the event loop
        drops it."""
        waits_until = time.monotonic() + PLACE_S
        while True:
            try:
                return self._threads.wait_for_backend(work)
            except PlaceTaken:
                if time.monotonic() > waits_until:
                    raise
                time.sleep(PLACE_POLL_S)

    def _unload_model(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        """Changes only the row. `ModelEnds` drops the model after the commit, as when a session ends."""
        return ExclusiveResult(unloaded(model.id), set_status(model.id, "closed"))

    def _optim_step(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        params = adam_params(body)
        return ExclusiveResult({"type": "optim_step", "metrics": self._backend.optim_step(model.id, params)})

    def _load_weights(self, command: Command, body: bytes, model: ModelRecord) -> ExclusiveResult:
        request = decode_json(LoadWeightsCommand, body)
        if request.refused is not None:
            raise FailedRequest(request.refused)
        path = parse_path(request.path)
        reader = request.source_tenant or model.tenant
        saved = self._database.read(lambda c: checkpoints.find_checkpoint(c, path, reader))
        if saved is None:
            raise FailedRequest(f"path: no training checkpoint {request.path!r}")
        if saved.base_model not in self._own:  # its shapes may fit by chance
            raise FailedRequest(
                f"path: {request.path} was saved from a model of {saved.base_model!r}, and model {model.id!r} has the "
                f"base model {model.base_model!r}: load the checkpoint into a model of {saved.base_model!r}"
            )
        if not saved.is_trainable:
            raise FailedRequest(f"path: {request.path!r} cannot be trained on; load what save_weights has saved")
        if path.kind != "weights" and request.optimizer:
            raise FailedRequest(f"optimizer: {request.path!r} holds weights alone; load it without the optimizer")
        creates = command.seq_id == 0

        def load() -> None:
            self._living(command)  # the session may have ended while the files were fetched
            if creates:
                self._backend.create_model(model.id, model.lora)
            try:
                self._backend.load_state(model.id, directory, optimizer=request.optimizer)
            except Exception:
                if creates:
                    self._backend.delete_model(model.id)
                raise

        with self._store.reading(saved.store_key) as directory:
            self._with_place(load)
        ready = set_status(model.id, "ready")

        details = {"tinker_path": request.path, "model_id": path.model_id, "into": model.id}
        if saved.tenant != model.tenant:
            details["reader"] = model.tenant

        done = msgspec.json.encode(msgspec.structs.replace(request, loaded_key=saved.store_key))

        def change(connection: Connection) -> None:
            if creates:
                ready(connection)
            futures.rewrite_body(connection, command.request_id, done)
            audit.record(connection, saved.tenant, "checkpoint_loaded", **details)

        return ExclusiveResult({"type": "load_weights", "path": request.path, "model_id": model.id}, change)
