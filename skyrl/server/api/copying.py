"""copy_weights: stores a checkpoint again under another model, to keep it longer or to have it in another account."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response

from skyrl.base.types.requests import new_session_id
from skyrl.base.types.weights import FullWeights
from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.paths import TinkerPath, model_id_of, parse_path
from skyrl.base.wire.requests import CopyWeightsRequest
from skyrl.server.api.call import Call
from skyrl.server.api.checkpoints import ttl_end
from skyrl.server.api.reply import reply
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services
from skyrl.server.api.sessions import check_length
from skyrl.storage.checkpoint_store.base import StoreError, in_store
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.db.checkpoints import Checkpoint, Copy

logger = logging.getLogger(__name__)


def router(services: Services) -> Routes:
    routes = Routes("checkpoints")
    copying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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
        if path.kind == "external_weights":
            raise RequestError(
                "exports cannot be copied; copy the checkpoint that they were made from", field="source_path"
            )
        source = await services.checkpoints.find(path, reader)
        if source is None or source.store_key is None:
            raise NotFound(f"no checkpoint {body.source_path!r}", field="source_path")
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
