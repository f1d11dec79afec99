"""Sessions: create, heartbeat, finish, list, put into a project."""

from __future__ import annotations

from fastapi import Query
from starlette.responses import Response

from skyrl.base.wire.errors import NotFound, RequestError
from skyrl.base.wire.requests import (
    FINISH_REASONS,
    AssignProjectRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    SessionRequest,
)
from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply, strings
from skyrl.server.api.route import Body
from skyrl.server.api.routes import Routes
from skyrl.server.api.scope import AccessScope
from skyrl.server.api.services import Services

MAX_NAME = 1_000


def check_length(field: str, value: str | None) -> None:
    """Raises RequestError naming the field for a value that is too long."""
    if value is not None and len(value) > MAX_NAME:
        raise RequestError(f"must have at most {MAX_NAME} characters, got {len(value)}", field=field)


def router(services: Services) -> Routes:
    routes = Routes("sessions")

    @routes.post("/create_session", scope="any", body=CreateSessionRequest)
    async def create_session(call: Call, body: CreateSessionRequest) -> Response:
        tenant = call.tenant
        check_length("project_id", body.project_id)
        check_length("display_name", body.display_name)
        session = await services.sessions.create(
            tenant,
            body.tags or [],
            body.user_metadata,
            body.sdk_version,
            project_id=body.project_id or None,
            display_name=body.display_name,
            check=services.quotas.sessions(tenant),
        )
        warning = services.served.session_warning()
        notice = {} if warning is None else {"warning_message": warning}
        return reply({"type": "create_session", "session_id": session.id} | notice)

    @routes.post("/session_heartbeat", scope="any", body=SessionRequest)
    async def heartbeat(call: Call, body: SessionRequest) -> Response:
        await services.sessions.beat(await services.session_life.active(body.session_id, call.tenant))
        return reply({"type": "session_heartbeat"})

    @routes.post("/sessions/{session_id}/finish", scope="any", body=Body(FinishSessionRequest, optional=True))
    async def finish(call: Call, body: FinishSessionRequest, session_id: str) -> Response:
        session = await services.sessions.find(session_id, call.tenant)
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        reason = body.reason.type if body.reason is not None else None
        if reason is not None and reason not in FINISH_REASONS:
            raise RequestError(f"must be one of: {', '.join(FINISH_REASONS)}, got {reason!r}", field="reason.type")
        await services.session_life.close(session, "finished", reason, body.detail)
        return reply({})

    @routes.get("/sessions", scope="any")
    async def list_sessions(
        call: Call,
        limit: int = Query(20, ge=1, le=1000),
        offset: int = Query(0, ge=0, lt=2**31),
        access_scope: AccessScope = "owned",
    ) -> Response:
        return reply({"sessions": await services.sessions.list_ids(call.tenant, limit, offset)})

    @routes.get("/sessions/{session_id}", scope="any")
    async def get_session(call: Call, session_id: str, access_scope: AccessScope = "owned") -> Response:
        session = await services.sessions.find(session_id, call.tenant)
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        runs, samplers = await services.sessions.contents(session_id)
        return reply(
            {
                "training_run_ids": runs,
                "sampler_ids": samplers,
                "user_metadata": strings(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    @routes.put("/sessions/{session_id}/project", scope="any", body=AssignProjectRequest)
    async def assign_project(call: Call, body: AssignProjectRequest, session_id: str) -> Response:
        """Put a session into a project: any name that the tenant chooses. A project need not be created first."""
        if not body.project_id:
            raise RequestError("must not be empty: a session cannot be taken out of its project", field="project_id")
        check_length("project_id", body.project_id)
        session = await services.sessions.find(session_id, call.tenant)
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        await services.sessions.assign_project(session, body.project_id)
        return reply({})

    return routes
