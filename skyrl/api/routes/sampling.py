"""Sampling sessions and samples."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import Response

from skyrl.api.call import Body, Call, reply, with_note
from skyrl.api.routing import Routes
from skyrl.api.served import ServedModel
from skyrl.api.services import Services
from skyrl.base.types.weights import AdapterVersion, BaseWeights, WeightsRef
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.paths import CheckpointKind, parse_path, sampling_session_id_of
from skyrl.base.wire.requests import CreateSamplingSessionRequest, JoinSamplingSessionRequest
from skyrl.base.wire.sample_request import SampleRequest
from skyrl.inference.adapter_host import AdapterMissing, AdapterUnavailable
from skyrl.sampling.base_model import served_name
from skyrl.storage.db.checkpoints import Checkpoint
from skyrl.storage.db.samplers import Sampler
from skyrl.storage.shares import ROW_BYTES

logger = logging.getLogger(__name__)


def _not_for_sampling(path: str, kind: CheckpointKind) -> str:
    saved = "training state, saved by save_weights" if kind == "weights" else "an export, made by save_weights_external"
    return f"{path!r} is {saved}; sample from what save_weights_for_sampler saved"


def sampling_routes(services: Services) -> Routes:
    routes = Routes("sampling")

    async def saved_weights(model_path: str, tenant: str) -> tuple[ServedModel, Checkpoint, WeightsRef]:
        """A checkpoint that the tenant can sample from, with its base model and its weights. Raises NotFound or
        RequestError."""
        path = parse_path(model_path, "model_path")
        saved = await services.checkpoints.find(path, tenant)
        if saved is None:
            raise NotFound(f"no sampler weights {model_path!r}", field="model_path")
        if saved.weights is None:
            raise NotFound(_not_for_sampling(model_path, path.kind), field="model_path")
        model = services.served.named(saved.base_model, "model_path")
        full = model.config.full_finetuning
        served_name(saved.weights, saved.base_model, "model_path", full_finetuning=full)
        return model, saved, saved.weights

    async def bring(model: ServedModel, weights: WeightsRef) -> None:
        """Copy an adapter's files to where the inference server reads them, so that the first sample need not wait."""
        if isinstance(weights, AdapterVersion):
            try:
                await model.adapters.bring(weights)
            except AdapterMissing as error:
                logger.error("%s", error)
                raise NotFound("the checkpoint's files are not in the checkpoint store any more") from error
            except AdapterUnavailable as error:
                raise error.cause from error  # each cause is answered by its own error handler

    @routes.post("/create_sampling_session", scope="sample", body=CreateSamplingSessionRequest)
    async def create_sampling_session(call: Call, body: CreateSamplingSessionRequest) -> Response:
        tenant = call.tenant
        services.shares.check(tenant)
        session = await services.session_life.active(body.session_id, tenant)
        if not 0 <= body.sampling_session_seq_id < 2**31:
            raise RequestError("must be in [0, 2**31)", field="sampling_session_seq_id")
        sampler_id = sampling_session_id_of(session.id, body.sampling_session_seq_id)
        weights: WeightsRef = BaseWeights()
        saved = None
        if body.model_path is not None:
            model, saved, weights = await saved_weights(body.model_path, tenant)
            base_model = saved.base_model
            if body.base_model is not None and services.served.named(body.base_model) is not model:  # any of its names
                raise RequestError(f"{body.model_path} was trained from {base_model!r}", field="base_model")
            await bring(model, weights)
        elif body.base_model is not None:
            model, base_model = services.served.named(body.base_model), body.base_model
        else:
            raise RequestError("give base_model or model_path", field="model_path")
        if (current_weights := model.sampling.current_weights) is not None:
            await current_weights.check(weights, "base_model" if body.model_path is None else "model_path")
        sampler = Sampler(sampler_id, session.id, tenant, base_model, body.model_path, weights)
        check = services.quotas.sampling_sessions(tenant)
        stored = await services.samplers.create(sampler, body.sampling_session_seq_id, saved, check)
        services.shares.keep_session(tenant, len(call.body) + ROW_BYTES)
        if stored != sampler:
            raise RequestError(
                f"{body.sampling_session_seq_id} was used before for another sampler",
                field="sampling_session_seq_id",
            )
        note = await services.tokenizers.note(session.id, model, trains=False)
        return with_note(reply({"type": "create_sampling_session", "sampling_session_id": stored.id}), note)

    @routes.post("/join_sampling_session", scope="sample", body=JoinSamplingSessionRequest)
    async def join_sampling_session(call: Call, body: JoinSamplingSessionRequest) -> Response:
        """Give a copy of a sampling client in another process its number, from which it numbers its samples."""
        sampler = await services.sampling.open_sampler(body.sampling_session_id, call.tenant)
        return reply({"type": "join_sampling_session", "client_counter": await services.samplers.join(sampler)})

    @routes.get("/samplers/{sampler_id}", scope="any")
    async def get_sampler(call: Call, sampler_id: str) -> Response:
        sampler = await services.samplers.find(sampler_id, call.tenant)
        if sampler is None:
            raise NotFound(f"no sampling session {sampler_id!r}", field="sampler_id")
        # The SDK loads a tokenizer by this name, and uses it for nothing else.
        name = services.served.of(sampler.base_model).tokenizer_name(sampler.base_model)
        return reply({"sampler_id": sampler.id, "base_model": name, "model_path": sampler.model_path})

    @routes.post("/asample", scope="sample", body=Body(SampleRequest, read_as=bytes, bound="sample"))
    async def asample(call: Call, body: bytes) -> Response:
        promise = await services.sampling.submit(body, call.tenant)
        call.recorded = promise.request_id
        answer: dict[str, Any] = {
            "request_id": promise.request_id,
            "sample_sequence_ids": promise.sample_sequence_ids,
        }
        if promise.max_tokens is not None:
            answer["max_tokens"] = promise.max_tokens
        return with_note(reply(answer), promise.note)

    return routes
