"""Saves and loads of weights, and the description of a saved checkpoint."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from starlette.responses import Response

from skyrl.api.call import Body, Call, reply
from skyrl.api.routes.models import asks_for_value_head, check_new_model, check_optimizer, described, free_place
from skyrl.api.routes.training import command_of, submit, submit_sequenced
from skyrl.api.routing import Routes
from skyrl.api.served import ServedModel
from skyrl.api.services import Services
from skyrl.base.types.requests import Kind
from skyrl.base.wire.decoding import decode_json, raw_fields, raw_value
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.paths import model_id_of, parse_path
from skyrl.base.wire.rank_pattern import check_same
from skyrl.base.wire.requests import (
    RESOLVED,
    LoadTarget,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SequencedRequest,
    WeightsInfoRequest,
)
from skyrl.storage.db.checkpoints import Checkpoint
from skyrl.storage.db.models import Model, add_model


def _resolved(body: bytes, services: Services) -> tuple[bytes, str | None]:
    """A load as the command log keeps it, and the tenant of the access token in it (None without a token).

    The log keeps that tenant, and not the token, in the fields `RESOLVED`, which a client cannot set. Raises
    RequestError for a token that is not valid."""
    fields = raw_fields(body)
    if fields.keys().isdisjoint(("weights_access_token", *RESOLVED)):
        return body, None
    for name in RESOLVED:
        fields.pop(name, None)
    token = raw_value(fields.pop("weights_access_token", msgspec.Raw(b"null")), "weights_access_token")
    reader = None
    if isinstance(token, str) and token:
        reader = services.access.tenant_of_access_token(token)
        fields["source_tenant"] = msgspec.Raw(msgspec.json.encode(reader))
    elif token not in (None, ""):
        raise RequestError("must be a string", field="weights_access_token")
    return msgspec.json.encode(fields, order="deterministic"), reader


def _refused(model_id: str, error: RequestError) -> bytes:
    """A command that fails when its turn comes, in place of a load that is wrong. If the API refused the load now, its
    number would be missing in its model's order."""
    return msgspec.json.encode({"model_id": model_id, "path": "", "refused": error.message})


def check_mode(saved: Checkpoint, served: ServedModel) -> None:
    """Raises RequestError for a checkpoint that a model of this base model cannot begin with."""
    if saved.lora.is_full == served.config.full_finetuning:
        return
    if saved.lora.is_full:
        refused = "holds a whole model, which needs a server that was started with trainer.full_finetuning"
    else:
        refused = "holds a LoRA adapter, and this server trains whole models (trainer.full_finetuning)"
    raise RequestError(f"{saved.path} {refused}", field="path")


def weight_routes(services: Services) -> Routes:
    routes = Routes("weights")

    @routes.post("/save_weights", scope="train", body=command_of(SaveWeightsRequest))
    async def save_weights(call: Call, header: SequencedRequest) -> Response:
        return await submit_sequenced(services, call, Kind.SAVE_WEIGHTS, header, call.body)

    @routes.post("/save_weights_for_sampler", scope="train", body=command_of(SaveWeightsForSamplerRequest))
    async def save_weights_for_sampler(call: Call, header: SequencedRequest) -> Response:
        return await submit_sequenced(services, call, Kind.SAVE_WEIGHTS_FOR_SAMPLER, header, call.body)

    @routes.post("/save_weights_external", scope="train", body=command_of(SaveWeightsExternalRequest))
    async def save_weights_external(call: Call, header: SequencedRequest) -> Response:
        return await submit_sequenced(services, call, Kind.SAVE_WEIGHTS_EXTERNAL, header, call.body)

    @routes.post("/load_weights", scope="train", body=Body(LoadWeightsRequest, read_as=LoadTarget))
    async def load_weights(call: Call, target: LoadTarget) -> Response:
        """Loads into a model that exists (model_id, seq_id), or makes one (session_id, model_seq_id)."""
        tenant, body = call.tenant, call.body
        if target.model_id is not None:
            header = SequencedRequest(target.model_id, target.seq_id)
            try:
                command, _ = _resolved(body, services)
            except RequestError as error:
                command = _refused(target.model_id, error)
            return await submit_sequenced(services, call, Kind.LOAD_WEIGHTS, header, command)
        new_model = decode_json(LoadWeightsRequest, body)
        command, reader = _resolved(body, services)
        if new_model.session_id is None or new_model.model_seq_id is None:
            raise RequestError("give model_id, or session_id and model_seq_id")
        services.served.check_trains()
        session = await services.session_life.active(new_model.session_id, tenant)
        check_optimizer(new_model.optimizer_config)
        if not 0 <= new_model.model_seq_id < 2**31:
            raise RequestError("must be in [0, 2**31)", field="model_seq_id")
        path = parse_path(new_model.path)
        saved = await services.checkpoints.find(path, reader or tenant)
        if saved is None or not saved.is_trainable:
            raise NotFound(f"no training checkpoint {new_model.path!r}", field="path")
        wants_head = asks_for_value_head(new_model.user_metadata, full=saved.lora.is_full)
        base_model = new_model.base_model or saved.base_model
        served = services.served.for_checkpoint(saved.base_model, new_model.base_model)
        model = Model(
            id=model_id_of(session.id, new_model.model_seq_id),
            session_id=session.id,
            tenant=tenant,
            base_model=base_model,
            lora=replace(saved.lora, value_head=saved.lora.value_head or wants_head),
            user_metadata=new_model.user_metadata,
        )
        check_mode(saved, served)
        check_same(new_model.user_metadata, saved.lora.rank_pattern)
        await free_place(model, services)
        add_row = add_model(model, new_model.model_seq_id, check_new_model(model, services))
        return await submit(services, call, Kind.LOAD_WEIGHTS, model, 0, command, first=add_row)

    @routes.post("/weights_info", scope="any", body=WeightsInfoRequest)
    async def weights_info(call: Call, body: WeightsInfoRequest) -> Response:
        saved = await services.checkpoints.find(parse_path(body.tinker_path, "tinker_path"), call.tenant)
        if saved is None:
            raise NotFound(f"no checkpoint {body.tinker_path!r}", field="tinker_path")
        return reply(
            {
                "base_model": saved.base_model,
                **described(saved.lora),
                "train_unembed": saved.lora.train_unembed,
                "train_mlp": saved.lora.train_mlp,
                "train_attn": saved.lora.train_attn,
            }
        )

    return routes
