"""Sessions: create, heartbeat, finish, list."""

from __future__ import annotations

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.body import read_body, tenant_of
from skyrl.api.reply import reply
from skyrl.api.services import Services
from skyrl.wire.errors import NotFound
from skyrl.wire.requests import CreateSessionRequest, FinishSessionRequest, SessionRequest, decode_json


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["sessions"])
    max_bytes = services.config.max_body_bytes

    @routes.post("/create_session")
    async def create_session(request: Request) -> Response:
        tenant = tenant_of(request)
        wanted = decode_json(CreateSessionRequest, await read_body(request, max_bytes))
        session = await services.sessions.create(tenant, wanted.tags or [], wanted.user_metadata, wanted.sdk_version)
        warning = services.session_warning()
        notice = {} if warning is None else {"warning_message": warning}
        return reply({"type": "create_session", "session_id": session.id} | notice)

    @routes.post("/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        tenant = tenant_of(request)
        wanted = decode_json(SessionRequest, await read_body(request, max_bytes))
        await services.sessions.beat(await services.active_session(wanted.session_id, tenant))
        return reply({"type": "session_heartbeat"})

    @routes.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, request: Request) -> Response:
        tenant = tenant_of(request)
        wanted = decode_json(FinishSessionRequest, await read_body(request, max_bytes) or b"{}")
        session = await services.sessions.find(session_id, tenant)
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        reason = wanted.reason.type if wanted.reason is not None else None
        await services.close_session(session, "finished", reason, wanted.detail)
        return reply({})

    @routes.get("/sessions")
    async def list_sessions(
        request: Request, limit: int = Query(20, ge=1, le=1000), offset: int = Query(0, ge=0, lt=2**31)
    ) -> Response:
        return reply({"sessions": await services.sessions.list_ids(tenant_of(request), limit, offset)})

    @routes.get("/sessions/{session_id}")
    async def get_session(session_id: str, request: Request) -> Response:
        session = await services.sessions.find(session_id, tenant_of(request))
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        runs, samplers = await services.sessions.contents(session_id)
        return reply({"training_run_ids": runs, "sampler_ids": samplers, "user_metadata": session.user_metadata})

    return routes
