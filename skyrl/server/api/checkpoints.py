"""Training runs and their checkpoints, as the SDK's RestClient sees them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.paths import KINDS, CheckpointKind, TinkerPath, parse_path
from skyrl.base.wire.requests import TtlRequest
from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply, strings, timestamp
from skyrl.server.api.routes import Routes
from skyrl.server.api.scope import AccessScope
from skyrl.server.api.services import Services
from skyrl.server.api.tokens import user_urn
from skyrl.storage.db.checkpoints import Checkpoint, Seen
from skyrl.storage.db.models import ModelRecord

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86_400
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_EXTERNAL_SINCE = (0, 30)
"""The first version of the SDK that knows the type `external`. Older versions cannot read a list that holds one."""
_KINDS_OF_OLD_SDKS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")


def seen_by_client(request: Request, scope: str) -> Seen:
    """What a list shows to this client: only the kinds that its version of the SDK can read."""
    version = request.headers.get("x-stainless-package-version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < 10)
    old = len(numbers) == 2 and numbers < _EXTERNAL_SINCE
    return Seen(published=scope == "accessible", kinds=_KINDS_OF_OLD_SDKS if old else KINDS)


def ttl_end(ttl_seconds: int | None) -> float | None:
    """The time `ttl_seconds` from now, in seconds since the epoch. Raises RequestError naming the field."""
    if ttl_seconds is None:
        return None
    if not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"must be in [{MIN_TTL_S}, {MAX_TTL_S}] or null, got {ttl_seconds}", field="ttl_seconds")
    return time.time() + ttl_seconds


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as the wire's Checkpoint."""
    path, expires_at = checkpoint.path, checkpoint.expires_at
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": _TYPES[path.kind],
        "time": timestamp(checkpoint.created_at),
        "tinker_path": str(path),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": strings(checkpoint.user_metadata),
        "expires_at": None if expires_at is None else timestamp(expires_at),
    }


def _training_run(model: ModelRecord, checkpoints: list[Checkpoint], tenant: str) -> dict[str, Any]:
    """A model as the wire's TrainingRun. Only its owner sees the metadata that the owner gave it."""
    latest = {saved.path.kind: checkpoint_json(saved) for saved in checkpoints if saved.path.model_id == model.id}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": user_urn(model.tenant),
        "is_lora": not model.lora.is_full,
        "corrupted": model.status == "failed",
        "lora_rank": None if model.lora.is_full else model.lora.rank,
        "last_request_time": timestamp(model.last_request_at),
        "last_checkpoint": latest.get("weights"),
        "last_sampler_checkpoint": latest.get("sampler_weights"),
        "user_metadata": strings(model.user_metadata) if model.tenant == tenant else None,
    }


def router(services: Services) -> Routes:
    routes = Routes("checkpoints")
    page_limit, page_offset = Query(20, ge=1, le=1000), Query(0, ge=0, lt=2**31)

    async def visible_run(model_id: str, tenant: str, seen: Seen) -> ModelRecord:
        """The model of a training run of the tenant. If `seen` includes published checkpoints, also that of another
        tenant's run with a published checkpoint."""
        model = await services.models.record(model_id, tenant)
        if model is None and seen.published and await services.checkpoints.of_model(model_id, tenant, seen):
            model = await services.models.record(model_id, None)
        if model is None:
            raise NotFound(f"no training run {model_id!r}", field="training_run_id")
        return model

    @routes.get("/training_runs", scope="any")
    async def list_training_runs(
        call: Call,
        limit: int = page_limit,
        offset: int = page_offset,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Response:
        """The caller's own runs, whatever the scope: tenants publish checkpoints, not runs."""
        tenant = call.tenant
        models, total = await services.models.page(tenant, limit, offset, project_id)
        seen = seen_by_client(call.request, access_scope)
        latest = await services.checkpoints.latest([model.id for model in models], tenant, seen)
        return reply(
            {
                "training_runs": [_training_run(model, latest, tenant) for model in models],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    @routes.get("/training_runs/{model_id}", scope="any")
    async def get_training_run(call: Call, model_id: str, access_scope: AccessScope = "owned") -> Response:
        tenant, seen = call.tenant, seen_by_client(call.request, access_scope)
        model = await visible_run(model_id, tenant, seen)
        return reply(_training_run(model, await services.checkpoints.latest([model_id], tenant, seen), tenant))

    @routes.get("/training_runs/{model_id}/checkpoints", scope="any")
    async def list_run_checkpoints(call: Call, model_id: str, access_scope: AccessScope = "accessible") -> Response:
        """By default also the published checkpoints of another tenant's run: the SDK finds single checkpoints in this
        way."""
        tenant, seen = call.tenant, seen_by_client(call.request, access_scope)
        await visible_run(model_id, tenant, seen)
        saved = await services.checkpoints.of_model(model_id, tenant, seen)
        return reply({"checkpoints": [checkpoint_json(checkpoint) for checkpoint in saved]})

    @routes.get("/checkpoints", scope="any")
    async def list_checkpoints(
        call: Call, limit: int = page_limit, offset: int = page_offset, access_scope: AccessScope = "owned"
    ) -> Response:
        seen = seen_by_client(call.request, access_scope)
        saved, total = await services.checkpoints.page(call.tenant, limit, offset, seen)
        return reply(
            {
                "checkpoints": [checkpoint_json(checkpoint) for checkpoint in saved],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    one_checkpoint = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

    async def change(call: Call, path: TinkerPath, event: str, details: dict[str, Any], **values: Any) -> Response:
        if not await services.checkpoints.change(path, call.tenant, event, details, **values):
            raise NotFound(f"no checkpoint {path}", field="checkpoint_id")
        return reply({})

    def path_of(model_id: str, kind: str, name: str) -> TinkerPath:
        return parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")

    @routes.delete(one_checkpoint, scope="train")
    async def delete_checkpoint(call: Call, model_id: str, kind: str, name: str) -> Response:
        """Clients no longer find the checkpoint. The engine deletes its files when nobody samples from them any
        more."""
        path = path_of(model_id, kind, name)
        if not await services.checkpoints.delete(path, call.tenant):
            raise NotFound(f"no checkpoint {path}", field="checkpoint_id")
        return reply({})

    @routes.post(f"{one_checkpoint}/publish", scope="train")
    async def publish(call: Call, model_id: str, kind: str, name: str) -> Response:
        return await change(call, path_of(model_id, kind, name), "checkpoint_published", {}, public=True)

    @routes.delete(f"{one_checkpoint}/publish", scope="train")
    async def unpublish(call: Call, model_id: str, kind: str, name: str) -> Response:
        return await change(call, path_of(model_id, kind, name), "checkpoint_unpublished", {}, public=False)

    @routes.put(f"{one_checkpoint}/ttl", scope="train", body=TtlRequest)
    async def set_ttl(call: Call, body: TtlRequest, model_id: str, kind: str, name: str) -> Response:
        path, details = path_of(model_id, kind, name), {"ttl_seconds": body.ttl_seconds}
        end = ttl_end(body.ttl_seconds)
        return await change(call, path, "checkpoint_ttl_changed", details, expires_at=end)

    return routes
