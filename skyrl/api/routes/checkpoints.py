"""Training runs and their checkpoints, as the SDK's RestClient sees them.

`copy_weights` stores a checkpoint again under another model, to keep it longer or to have it in another account."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.access import user_urn
from skyrl.api.call import Call, reply, strings, timestamp
from skyrl.api.routes.sessions import check_length
from skyrl.api.routing import AccessScope, Routes
from skyrl.api.services import Services
from skyrl.base.types.requests import new_session_id
from skyrl.base.types.weights import FullWeights
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.paths import KINDS, CheckpointKind, TinkerPath, model_id_of, parse_path
from skyrl.base.wire.requests import CopyWeightsRequest, TtlRequest
from skyrl.storage.checkpoint_store.base import StoreError, in_store
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.db.checkpoints import Checkpoint, Copy, Seen
from skyrl.storage.db.models import ModelRecord

MANY = 500
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86_400
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_EXTERNAL_SINCE = (0, 30)
"""The first version of the SDK that knows the type `external`. Older versions cannot read a list that holds one."""
_KINDS_OF_OLD_SDKS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights")


def sdk_version(request: Request) -> tuple[int, ...] | None:
    """The first two numbers of the client's version of the SDK; None for clients that do not tell one."""
    version = request.headers.get("x-stainless-package-version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < 10)
    return numbers if len(numbers) == 2 else None


def seen_by_client(request: Request, scope: str) -> Seen:
    """What a list shows to this client: only the kinds that its version of the SDK can read."""
    version = sdk_version(request)
    old = version is not None and version < _EXTERNAL_SINCE
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
        "checkpoint_type": TYPES[path.kind],
        "time": timestamp(checkpoint.created_at),
        "tinker_path": str(path),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": strings(checkpoint.user_metadata),
        "expires_at": None if expires_at is None else timestamp(expires_at),
        "base_model": checkpoint.base_model,
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


def checkpoint_routes(services: Services) -> Routes:
    routes = Routes("checkpoints")
    page_limit, page_offset = Query(20, ge=1, le=1000), Query(0, ge=0, lt=2**31)

    async def visible_run(model_id: str, tenant: str, seen: Seen) -> ModelRecord:
        """The model of a training run of the tenant. If `seen` includes published checkpoints, also that of another
        tenant's run with a published checkpoint."""
        model = await services.models.record(model_id, tenant)
        if model is None and seen.published and await services.checkpoints.of_model(model_id, tenant, seen, 1):
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

        def answer() -> Response:
            return reply({"checkpoints": [checkpoint_json(checkpoint) for checkpoint in saved]})

        # The SDK reads them all at once. A thread, because 100,000 take a second.
        return answer() if len(saved) <= MANY else await asyncio.to_thread(answer)

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


logger = logging.getLogger(__name__)

COPIES_AT_ONCE = 2
"""Of all tenants in this process; a tenant has one at a time. Others wait for their turn. A large copy takes a thread
of `in_store` for minutes, and loads of adapters and downloads need these threads, too."""


def copy_routes(services: Services) -> Routes:
    routes = Routes("checkpoints")
    copying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
    of_tenant: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
    turns = asyncio.Semaphore(COPIES_AT_ONCE)

    @routes.post("/copy_weights", scope="train", body=CopyWeightsRequest)
    async def copy_weights(call: Call, body: CopyWeightsRequest) -> Response:
        """Answers when the copy is stored. A repeated request with the same X-Idempotency-Key gets the same copy."""
        tenant = call.tenant
        idempotency_key = call.request.headers.get("x-idempotency-key")
        if idempotency_key is None:
            return reply({"tinker_path": str(await copy(call.request, body, tenant, None))})
        copy_key = hashlib.blake2b(f"{tenant}\n{idempotency_key}".encode(), digest_size=16).hexdigest()
        # The client may give up the first try and send a second one while the first still copies.
        async with copying.setdefault(copy_key, asyncio.Lock()):
            path = await services.copies.made_by(copy_key) or await copy_once(call.request, body, tenant, copy_key)
        return reply({"tinker_path": str(path)})

    async def copy_once(request: Request, body: CopyWeightsRequest, tenant: str, copy_key: str) -> TinkerPath:
        """Copy, unless another process has recorded the same copy: the lock holds in this process only. This try may
        then be refused, because the model's number is used or the bytes are over the quota, and the recorded copy is
        the answer."""
        try:
            return await copy(request, body, tenant, copy_key)
        except RequestError:
            if (recorded := await services.copies.made_by(copy_key)) is None:
                raise
            return recorded

    async def copy(request: Request, body: CopyWeightsRequest, tenant: str, copy_key: str | None) -> TinkerPath:
        source, store_key = await find_source(request, body, tenant)
        expires_at = ttl_end(body.ttl_seconds)
        session_id, model_seq_id = await destination(body, tenant)
        model_id = model_id_of(session_id, model_seq_id)
        new_copy = Copy(
            path=TinkerPath(model_id, source.path.kind, source.path.name),
            tenant=tenant,
            session_id=session_id,
            model_seq_id=model_seq_id,
            store_key=f"{safe_name(model_id)}/{safe_name(source.path.name)[:180]}-{secrets.token_hex(6)}",
            project_id=body.destination_project_id,
            expires_at=expires_at,
            copy_key=copy_key,
        )
        check = services.quotas.stored_bytes(tenant, source.size_bytes)
        async with of_tenant.setdefault(tenant, asyncio.Lock()), turns:
            await services.quotas.check(check)
            await in_store(services.checkpoint_store.copy, store_key, new_copy.store_key)
        try:
            recorded = await services.copies.add(new_copy, source, check)
        except RequestError:
            await discard(new_copy.store_key)
            raise
        if not recorded.new:
            await discard(new_copy.store_key)
        if recorded.path is None:
            raise number_used(model_seq_id)
        return recorded.path

    async def discard(store_key: str) -> None:
        """Remove the files of a copy that is not recorded. The engine removes later what cannot be removed now."""
        try:
            await in_store(services.checkpoint_store.delete, store_key)
        except StoreError as error:
            logger.warning("the files of a copy that was not recorded stay for now (%s): %s", store_key, error)

    def number_used(model_seq_id: int) -> RequestError:
        return RequestError(f"{model_seq_id} is used by another model", field="model_seq_id")

    async def find_source(request: Request, body: CopyWeightsRequest, tenant: str) -> tuple[Checkpoint, str]:
        """The checkpoint to copy, and its key in the checkpoint store. The caller, or the tenant of the access token,
        may read it."""
        token = body.weights_access_token or request.headers.get("x-tinker-weights-access-token")
        reader = tenant if token is None else services.access.tenant_of_access_token(token)
        path = parse_path(body.source_path, "source_path")
        source = await services.checkpoints.find(path, reader)
        if source is None:
            raise NotFound(f"no checkpoint {body.source_path!r}", field="source_path")
        if path.kind == "external_weights" and source.weights is None:
            raise RequestError(
                "exports cannot be copied; copy the checkpoint that they were made from", field="source_path"
            )
        if isinstance(source.weights, FullWeights):
            raise RequestError("this server does not copy full weights, only adapters", field="source_path")
        return source, source.store_key

    async def destination(body: CopyWeightsRequest, tenant: str) -> tuple[str, int]:
        """The session and the number of the new model."""
        project_id, slot = body.destination_project_id, (body.session_id, body.model_seq_id)
        if (project_id is None and None in slot) or (project_id is not None and slot != (None, None)):
            raise RequestError("give destination_project_id, or session_id and model_seq_id")
        if project_id is not None:
            check_length("destination_project_id", project_id)
            if not project_id:
                raise RequestError("must not be empty", field="destination_project_id")
            return new_session_id(), 0
        assert body.session_id is not None
        assert body.model_seq_id is not None
        session = await services.session_life.active(body.session_id, tenant)
        if not 0 <= body.model_seq_id < 2**31:
            raise RequestError("must be in [0, 2**31)", field="model_seq_id")
        if await services.models.record(model_id_of(session.id, body.model_seq_id), None) is not None:
            raise number_used(body.model_seq_id)
        return session.id, body.model_seq_id

    return routes
