"""Training runs and their checkpoints, as the SDK's RestClient sees them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.call import Call
from skyrl.api.reply import reply, strings, timestamp
from skyrl.api.routes import Routes
from skyrl.api.scope import AccessScope
from skyrl.api.services import Services
from skyrl.api.tokens import user_urn
from skyrl.db.checkpoints import Seen
from skyrl.wire.errors import NotFound, RequestError
from skyrl.wire.paths import KINDS, CheckpointKind, TinkerPath, parse_path
from skyrl.wire.requests import TtlRequest

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86_400
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_KNOWS_EXTERNAL = (0, 30)
"""The first version of the SDK that takes the type `external`: older ones refuse a whole list for one."""
_BEFORE_EXTERNAL: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")


def seen_by_client(request: Request, scope: str) -> Seen:
    """What a list shows to the client that asks: no kinds that its version of the SDK cannot read."""
    version = request.headers.get("x-stainless-package-version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < 10)
    old = len(numbers) == 2 and numbers < _KNOWS_EXTERNAL
    return Seen(published=scope == "accessible", kinds=_BEFORE_EXTERNAL if old else KINDS)


def ttl_end(ttl_seconds: int | None) -> float | None:
    """When something with that time to live expires. Raises RequestError naming the field."""
    if ttl_seconds is None:
        return None
    if not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise RequestError(f"must be in [{MIN_TTL_S}, {MAX_TTL_S}] or null, got {ttl_seconds}", field="ttl_seconds")
    return time.time() + ttl_seconds


def checkpoint_json(row: Any) -> dict[str, Any]:
    """A checkpoints row as the wire's Checkpoint."""
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": _TYPES[row.kind],
        "time": timestamp(row.created_at),
        "tinker_path": str(TinkerPath(row.model_id, row.kind, row.name)),
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": strings(row.user_metadata),
        "expires_at": None if row.expires_at is None else timestamp(row.expires_at),
    }


def _training_run(row: Any, checkpoints: list[Any], tenant: str) -> dict[str, Any]:
    """A models row as the wire's TrainingRun. What its owner noted about it is for the owner alone."""
    last = {checkpoint.kind: checkpoint_json(checkpoint) for checkpoint in checkpoints if checkpoint.model_id == row.id}
    return {
        "training_run_id": row.id,
        "base_model": row.base_model,
        "model_owner": user_urn(row.tenant),
        "is_lora": True,
        "corrupted": row.status == "failed",
        "lora_rank": row.lora_rank,
        "last_request_time": timestamp(row.last_request_at),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": strings(row.user_metadata) if row.tenant == tenant else None,
    }


def router(services: Services) -> Routes:
    routes = Routes("checkpoints")
    page_limit, page_offset = Query(20, ge=1, le=1000), Query(0, ge=0, lt=2**31)

    async def run_seen(model_id: str, tenant: str, seen: Seen) -> Any:
        """The row of a training run: the tenant's own or, if that is asked for, one with something published."""
        row = await services.models.row(model_id, tenant)
        if row is None and seen.published and await services.checkpoints.of_model(model_id, tenant, seen):
            row = await services.models.row(model_id, None)
        if row is None:
            raise NotFound(f"no training run {model_id!r}", field="training_run_id")
        return row

    @routes.get("/training_runs", scope="any")
    async def list_training_runs(
        call: Call,
        limit: int = page_limit,
        offset: int = page_offset,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> Response:
        """The caller's own runs, whatever the scope: what others have published are checkpoints."""
        tenant = call.tenant
        rows, total = await services.models.page(tenant, limit, offset, project_id)
        seen = seen_by_client(call.request, access_scope)
        latest = await services.checkpoints.latest([row.id for row in rows], tenant, seen)
        return reply(
            {
                "training_runs": [_training_run(row, latest, tenant) for row in rows],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    @routes.get("/training_runs/{model_id}", scope="any")
    async def get_training_run(call: Call, model_id: str, access_scope: AccessScope = "owned") -> Response:
        tenant, seen = call.tenant, seen_by_client(call.request, access_scope)
        row = await run_seen(model_id, tenant, seen)
        return reply(_training_run(row, await services.checkpoints.latest([model_id], tenant, seen), tenant))

    @routes.get("/training_runs/{model_id}/checkpoints", scope="any")
    async def list_run_checkpoints(call: Call, model_id: str, access_scope: AccessScope = "accessible") -> Response:
        """Without a scope also what another tenant has published of its run: the SDK looks up single checkpoints so."""
        tenant, seen = call.tenant, seen_by_client(call.request, access_scope)
        await run_seen(model_id, tenant, seen)
        rows = await services.checkpoints.of_model(model_id, tenant, seen)
        return reply({"checkpoints": [checkpoint_json(row) for row in rows]})

    @routes.get("/checkpoints", scope="any")
    async def list_checkpoints(
        call: Call, limit: int = page_limit, offset: int = page_offset, access_scope: AccessScope = "owned"
    ) -> Response:
        seen = seen_by_client(call.request, access_scope)
        rows, total = await services.checkpoints.page(call.tenant, limit, offset, seen)
        return reply(
            {
                "checkpoints": [checkpoint_json(row) for row in rows],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    one = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

    async def change(call: Call, path: TinkerPath, event: str, details: dict[str, Any], **values: Any) -> Response:
        if not await services.checkpoints.change(path, call.tenant, event, details, **values):
            raise NotFound(f"no checkpoint {path}", field="checkpoint_id")
        return reply({})

    def at(model_id: str, kind: str, name: str) -> TinkerPath:
        return parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")

    @routes.delete(one, scope="train")
    async def delete_checkpoint(call: Call, model_id: str, kind: str, name: str) -> Response:
        """Gone at once for clients; the engine deletes the files when nobody samples from them any more."""
        path = at(model_id, kind, name)
        if not await services.checkpoints.delete(path, call.tenant):
            raise NotFound(f"no checkpoint {path}", field="checkpoint_id")
        return reply({})

    @routes.post(f"{one}/publish", scope="train")
    async def publish(call: Call, model_id: str, kind: str, name: str) -> Response:
        return await change(call, at(model_id, kind, name), "checkpoint_published", {}, public=True)

    @routes.delete(f"{one}/publish", scope="train")
    async def unpublish(call: Call, model_id: str, kind: str, name: str) -> Response:
        return await change(call, at(model_id, kind, name), "checkpoint_unpublished", {}, public=False)

    @routes.put(f"{one}/ttl", scope="train", body=TtlRequest)
    async def set_ttl(call: Call, wanted: TtlRequest, model_id: str, kind: str, name: str) -> Response:
        path, details = at(model_id, kind, name), {"ttl_seconds": wanted.ttl_seconds}
        end = ttl_end(wanted.ttl_seconds)
        return await change(call, path, "checkpoint_ttl_changed", details, expires_at=end)

    return routes
