"""Training runs and their checkpoints, as the SDK's RestClient sees them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.body import read_body, tenant_of
from skyrl.api.reply import reply, timestamp
from skyrl.api.services import Services
from skyrl.wire.errors import NotFound, RequestError
from skyrl.wire.paths import TinkerPath, parse_path
from skyrl.wire.requests import decode_json

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86_400
_TYPES = {"weights": "training", "sampler_weights": "sampler"}


class TtlRequest(msgspec.Struct):
    ttl_seconds: int | None = None


def _strings(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def checkpoint_json(row: Any) -> dict[str, Any]:
    """A checkpoints row as the wire's Checkpoint."""
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": _TYPES[row.kind],
        "time": timestamp(row.created_at),
        "tinker_path": str(TinkerPath(row.model_id, row.kind, row.name)),
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": _strings(row.user_metadata),
        "expires_at": None if row.expires_at is None else timestamp(row.expires_at),
    }


def _training_run(row: Any, checkpoints: list[Any]) -> dict[str, Any]:
    mine = [checkpoint for checkpoint in checkpoints if checkpoint.model_id == row.id]

    def last(kind: str) -> dict[str, Any] | None:
        return next((checkpoint_json(c) for c in reversed(mine) if c.kind == kind), None)

    return {
        "training_run_id": row.id,
        "base_model": row.base_model,
        "model_owner": row.tenant,
        "is_lora": True,
        "corrupted": row.status == "failed",
        "lora_rank": row.lora_rank,
        "last_request_time": timestamp(row.last_request_at),
        "last_checkpoint": last("weights"),
        "last_sampler_checkpoint": last("sampler_weights"),
        "user_metadata": _strings(row.user_metadata),
    }


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["checkpoints"])
    page_limit, page_offset = Query(20, ge=1, le=1000), Query(0, ge=0, lt=2**31)

    @routes.get("/training_runs")
    async def list_training_runs(request: Request, limit: int = page_limit, offset: int = page_offset) -> Response:
        rows, total = await services.models.page(tenant_of(request), limit, offset)
        checkpoints = await services.checkpoints.latest([row.id for row in rows])
        return reply(
            {
                "training_runs": [_training_run(row, checkpoints) for row in rows],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    @routes.get("/training_runs/{model_id}")
    async def get_training_run(model_id: str, request: Request) -> Response:
        row = await services.models.row(model_id, tenant_of(request))
        if row is None:
            raise NotFound(f"no training run {model_id!r}", field="training_run_id")
        return reply(_training_run(row, await services.checkpoints.latest([model_id])))

    @routes.get("/training_runs/{model_id}/checkpoints")
    async def list_run_checkpoints(model_id: str, request: Request) -> Response:
        tenant = tenant_of(request)
        if await services.models.row(model_id, tenant) is None:
            raise NotFound(f"no training run {model_id!r}", field="training_run_id")
        rows = await services.checkpoints.of_model(model_id, tenant)
        return reply({"checkpoints": [checkpoint_json(row) for row in rows]})

    @routes.get("/checkpoints")
    async def list_checkpoints(request: Request, limit: int = page_limit, offset: int = page_offset) -> Response:
        rows, total = await services.checkpoints.page(tenant_of(request), limit, offset)
        return reply(
            {
                "checkpoints": [checkpoint_json(row) for row in rows],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    async def change(request: Request, model_id: str, kind: str, name: str, **values: Any) -> Response:
        path = parse_path(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")
        if not await services.checkpoints.change(path, tenant_of(request), **values):
            raise NotFound(f"no checkpoint {path}", field="checkpoint_id")
        return reply({})

    one = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

    @routes.delete(one)
    async def delete_checkpoint(model_id: str, kind: str, name: str, request: Request) -> Response:
        """Gone at once for clients; the engine deletes the files when nobody samples from them any more."""
        answer = await change(request, model_id, kind, name, expires_at=time.time())
        services.engine.ring()
        return answer

    @routes.post(f"{one}/publish")
    async def publish(model_id: str, kind: str, name: str, request: Request) -> Response:
        return await change(request, model_id, kind, name, public=True)

    @routes.delete(f"{one}/publish")
    async def unpublish(model_id: str, kind: str, name: str, request: Request) -> Response:
        return await change(request, model_id, kind, name, public=False)

    @routes.put(f"{one}/ttl")
    async def set_ttl(model_id: str, kind: str, name: str, request: Request) -> Response:
        wanted = decode_json(TtlRequest, await read_body(request, services.config.max_body_bytes))
        if wanted.ttl_seconds is None:
            return await change(request, model_id, kind, name, expires_at=None)
        if not MIN_TTL_S <= wanted.ttl_seconds <= MAX_TTL_S:
            raise RequestError(f"must be in [{MIN_TTL_S}, {MAX_TTL_S}] or null", field="ttl_seconds")
        return await change(request, model_id, kind, name, expires_at=time.time() + wanted.ttl_seconds)

    return routes
