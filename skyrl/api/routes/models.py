"""Models: create, describe and unload one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from skyrl.api.call import Call, reply, with_note
from skyrl.api.routes.training import submit
from skyrl.api.routing import Routes
from skyrl.api.served import ServedModel
from skyrl.api.services import Services
from skyrl.base.model_files import TRAIN_MLP_REFUSED
from skyrl.base.types.requests import Kind, NewRequest
from skyrl.base.types.weights import LoraSpec
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.paths import model_id_of
from skyrl.base.wire.rank_pattern import FIELD as RANKS
from skyrl.base.wire.rank_pattern import rank_pattern_of
from skyrl.base.wire.requests import CreateModelRequest, LoraConfig, ModelRequest, OptimizerConfig
from skyrl.storage.db.database import Connection
from skyrl.storage.db.full_weights import check_place
from skyrl.storage.db.models import Model, add_model


def asks_for_value_head(user_metadata: Mapping[str, Any] | None, *, full: bool) -> bool:
    """Whether a model's metadata ask for a value head. The SDK has no field for it.
    `full`: the whole model is trained. Raises RequestError."""
    asked = (user_metadata or {}).get("value_head", False)
    if asked is False or asked == "false":
        return False
    if asked is not True and asked != "true":
        raise RequestError(f"must be 'true' or 'false', got {asked!r}", field="user_metadata.value_head")
    if full:
        raise RequestError(
            "must be 'false': only adapters have value heads, and this is full fine-tuning",
            field="user_metadata.value_head",
        )
    return True


def check_optimizer(optimizer: OptimizerConfig | None) -> None:
    """Raises RequestError for all but AdamW."""
    if optimizer is None or optimizer.type == "adamw":
        return
    why = ": how it updates weights is not published" if optimizer.type == "dimuon" else ""
    raise RequestError(f"{optimizer.type!r} is not served{why}; there is: adamw", field="optimizer_config.type")


def lora_spec(
    lora: LoraConfig, metadata: dict[str, Any] | None, served: ServedModel, *, value_head: bool = False
) -> LoraSpec:
    """The adapter, or the whole model, that the request asks for. Raises RequestError naming the field."""
    limits = served.config.backend_config.lora
    rank_pattern = rank_pattern_of(lora, metadata, limits.max_lora_rank)
    if served.config.full_finetuning:
        if rank_pattern:
            raise RequestError(
                "this server trains whole models (trainer.full_finetuning), which have no rank", field=RANKS
            )
        return _whole(lora)
    if lora.rank == 0:
        raise RequestError(
            "0 asks for full fine-tuning, which needs a server that was started with trainer.full_finetuning",
            field="lora_config.rank",
        )
    if not 1 <= lora.rank <= limits.max_lora_rank:
        raise RequestError(
            f"must be in [1, {limits.max_lora_rank}] (the server's max_lora_rank), got {lora.rank}",
            field="lora_config.rank",
        )
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise RequestError("at least one of train_attn, train_mlp, train_unembed must be true", field="lora_config")
    if lora.train_mlp and served.refuses_mlp:
        raise RequestError(TRAIN_MLP_REFUSED, field="lora_config.train_mlp")
    if lora.seed is not None and not -(2**63) <= lora.seed < 2**63:
        raise RequestError("must fit signed 64 bits", field="lora_config.seed")
    return LoraSpec(
        rank=lora.rank,
        alpha=limits.alpha,
        seed=secrets.randbits(31) if lora.seed is None else lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        rank_pattern=rank_pattern,
        value_head=value_head,
    )


def _whole(lora: LoraConfig) -> LoraSpec:
    if lora.rank != 0:
        raise RequestError(
            f"must be 0, got {lora.rank}: this server trains whole models (trainer.full_finetuning), and no adapters",
            field="lora_config.rank",
        )
    if not (lora.train_attn and lora.train_mlp and lora.train_unembed):
        raise RequestError("with rank 0 train_attn, train_mlp and train_unembed must all be true", field="lora_config")
    return LoraSpec(rank=0, alpha=1.0, seed=0 if lora.seed is None else lora.seed)


def check_new_model(model: Model, services: Services) -> Callable[[Connection], None]:
    """The check before a model is added. Raises RequestError: the tenant's quota, and on a server for full fine-tuning
    also while another model of the base model lives."""
    check_quota = services.quotas.models(model.tenant)
    config = services.served.of(model.base_model).config
    if not config.full_finetuning:
        return check_quota
    check_turn = check_place(model.id, model.tenant, config.role.own)

    def check(connection: Connection) -> None:
        check_quota(connection)
        check_turn(connection)

    return check


async def free_place(model: Model, services: Services) -> None:
    """Before a model is added, on a server for full fine-tuning: see `FullPlace.free`."""
    config = services.served.of(model.base_model).config
    if config.full_finetuning:
        await services.full_place.free(model, config.role.own)


def described(lora: LoraSpec) -> dict[str, Any]:
    """What of a model is trained, as the wire says it. The ranks of some layers are there if the client gave them."""
    ranks = {"lora_rank_pattern": dict(lora.rank_pattern)} if lora.rank_pattern else {}
    return {"is_lora": not lora.is_full, "lora_rank": None if lora.is_full else lora.rank, **ranks}


def model_routes(services: Services) -> Routes:
    routes = Routes("models")

    @routes.post("/create_model", scope="train", body=CreateModelRequest)
    async def create_model(call: Call, body: CreateModelRequest) -> Response:
        tenant = call.tenant
        services.served.check_trains()
        session = await services.session_life.active(body.session_id, tenant)
        served = services.served.trainable(body.base_model)
        check_optimizer(body.optimizer_config)
        if not 0 <= body.model_seq_id < 2**31:
            raise RequestError("must be in [0, 2**31)", field="model_seq_id")
        value_head = asks_for_value_head(body.user_metadata, full=served.config.full_finetuning)
        model = Model(
            id=model_id_of(session.id, body.model_seq_id),
            session_id=session.id,
            tenant=tenant,
            base_model=body.base_model,
            lora=lora_spec(body.lora_config or LoraConfig(), body.user_metadata, served, value_head=value_head),
            user_metadata=body.user_metadata,
        )
        await free_place(model, services)
        add_row = add_model(model, body.model_seq_id, check_new_model(model, services))
        answer = await submit(services, call, Kind.CREATE_MODEL, model, 0, call.body, first=add_row)
        return with_note(answer, await services.tokenizers.note(session.id, served, trains=True))

    @routes.post("/unload_model", scope="train", body=ModelRequest)
    async def unload_model(call: Call, body: ModelRequest) -> Response:
        """Runs after all commands of the model that the server has by now: the client gives this command no number."""
        tenant = call.tenant
        services.served.check_trains()
        model = await services.models.named(body.model_id, tenant)
        request_id, _ = await services.futures.record(
            NewRequest(
                kind=Kind.UNLOAD_MODEL, tenant=tenant, session_id=model.session_id, body=call.body, model_id=model.id
            )
        )
        services.engine.ring()
        return reply({"request_id": request_id, "model_id": model.id})

    @routes.post("/get_info", scope="any", body=ModelRequest)
    async def get_info(call: Call, body: ModelRequest) -> Response:
        model = await services.models.named(body.model_id, call.tenant)
        return reply(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": {
                    "model_name": model.base_model,
                    "tokenizer_id": services.served.of(model.base_model).tokenizer_name(model.base_model),
                },
                **described(model.lora),
                "model_name": model.base_model,
            }
        )

    return routes
