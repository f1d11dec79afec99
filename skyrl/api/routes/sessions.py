"""Sessions: create, heartbeat, finish, list, search, put into a project."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Query
from starlette.responses import Response

from skyrl.api.access import user_urn
from skyrl.api.call import Body, Call, reply, strings
from skyrl.api.routing import AccessScope, Routes
from skyrl.api.services import Services
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.requests import (
    FINISH_REASONS,
    AssignProjectRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    SearchOwner,
    SessionRequest,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionStatusQuery,
)
from skyrl.storage.db.session_search import FoundSession, SessionQuery, Status
from skyrl.storage.db.sessions import DEFAULT_PROJECT
from skyrl.storage.shares import ROW_BYTES

MAX_NAME = 1_000


def check_length(field: str, value: str | None) -> None:
    """Raises RequestError naming the field for a value that is too long."""
    if value is not None and len(value) > MAX_NAME:
        raise RequestError(f"must have at most {MAX_NAME} characters, got {len(value)}", field=field)


def session_routes(services: Services) -> Routes:
    routes = Routes("sessions")

    @routes.post("/create_session", scope="any", body=CreateSessionRequest)
    async def create_session(call: Call, body: CreateSessionRequest) -> Response:
        tenant = call.tenant
        services.shares.check(tenant)
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
        services.shares.keep_session(tenant, len(call.body) + ROW_BYTES)
        warning = services.served.session_warning()
        notice = {} if warning is None else {"warning_message": warning}
        return reply({"type": "create_session", "session_id": session.id} | notice)

    @routes.post("/session_heartbeat", scope="any", body=SessionRequest)
    async def heartbeat(call: Call, body: SessionRequest) -> Response:
        await services.sessions.beat(await services.session_life.active(body.session_id, call.tenant))
        return reply({"type": "session_heartbeat"})

    @routes.post("/sessions/{session_id}/finish", scope="any", body=Body(FinishSessionRequest, optional=True))
    async def finish(call: Call, body: FinishSessionRequest, session_id: str) -> Response:
        session = await services.sessions.named(session_id, call.tenant)
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
        session = await services.sessions.named(session_id, call.tenant)
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
        session = await services.sessions.named(session_id, call.tenant)
        await services.sessions.assign_project(session, body.project_id)
        return reply({})

    return routes


MAX_LIMIT = 200
MAX_LISTED = 100
"""The most projects, and the most statuses, in one search."""
MAX_OWNERS = 10
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STATUSES = {"active": "active", "client_finished": "finished"}
"""Statuses on the wire, and as they are stored. The wire has two more, which no session here ever has."""
_UNUSED_STATUSES = ("cancelled", "failed")


def _status(index: int, query: SessionStatusQuery) -> Status | None:
    """The status to search for; None for one that no session here ever has."""
    if query.type not in (*_STATUSES, *_UNUSED_STATUSES):
        known = ", ".join((*_STATUSES, *_UNUSED_STATUSES))
        raise RequestError(f"{query.type!r} is not known; there is: {known}", field=f"statuses[{index}].type")
    if query.type != "client_finished" or query.reasons is None:
        return Status(_STATUSES[query.type]) if query.type in _STATUSES else None
    unknown = [reason for reason in query.reasons if reason not in FINISH_REASONS]
    if unknown or not query.reasons:
        raise RequestError(f"must be some of: {', '.join(FINISH_REASONS)}", field=f"statuses[{index}].reasons")
    return Status(_STATUSES[query.type], tuple(query.reasons))


def _statuses(queries: list[SessionStatusQuery] | None) -> tuple[Status, ...] | None:
    if queries is None:
        return None
    if not queries:
        raise RequestError("must name at least one, or be left out", field="statuses")
    found = [_status(index, query) for index, query in enumerate(queries)]
    return tuple(status for status in found if status is not None)


def check_owner(owner: SearchOwner | None) -> list[str] | None:
    """The owners that a search names; None if it names none. Raises RequestError for an owner that is not known."""
    if owner is None or owner.type in ("own", "accessible"):
        return None
    if owner.type != "user":
        raise RequestError(f"{owner.type!r} is not known; there is: own, accessible, user", field="owner.type")
    if owner.owner_urns is None or not 1 <= len(owner.owner_urns) <= MAX_OWNERS:
        raise RequestError(f"must name 1 to {MAX_OWNERS} owners", field="owner.owner_urns")
    return owner.owner_urns


def microseconds(at: datetime, field: str) -> int:
    """A time of a cursor in microseconds since the epoch, the resolution of times on the wire."""
    if at.tzinfo is None:
        raise RequestError("must have an offset from UTC", field=field)
    return (at - _EPOCH) // timedelta(microseconds=1)


def moment(after_epoch_us: int) -> str:
    """The reverse of `microseconds`."""
    return (_EPOCH + timedelta(microseconds=after_epoch_us)).isoformat()


def _position(cursor: SessionSearchCursor | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    return microseconds(cursor.last_created_at, "cursor.last_created_at"), cursor.last_session_id


def _created_at(session: FoundSession) -> str:
    return moment(session.created_us)


def _status_json(session: FoundSession) -> dict[str, Any] | None:
    """A session's status on the wire; None for a session that expired, or finished without a reason."""
    if session.status == "active":
        return {"type": "active"}
    if session.status == "finished" and session.finish_reason in FINISH_REASONS:
        return {"type": "client_finished", "reason": {"type": session.finish_reason}, "detail": session.finish_detail}
    return None


def _summary(session: FoundSession) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "created_at": _created_at(session),
        "owner": user_urn(session.tenant),
        "project_id": session.project_id or DEFAULT_PROJECT,
        "status": _status_json(session),
        "checkpoints_count": session.checkpoints,
        "display_name": session.display_name,
        "user_metadata": strings(session.user_metadata),
        "checkpoint_storage_bytes": session.checkpoint_bytes,
    }


def search_routes(services: Services) -> Routes:
    routes = Routes("sessions")

    @routes.post("/sessions/search", scope="any", body=SessionSearchRequest)
    async def search_sessions(call: Call, body: SessionSearchRequest) -> Response:
        tenant = call.tenant
        if not 1 <= body.limit <= MAX_LIMIT:
            raise RequestError(f"must be in [1, {MAX_LIMIT}], got {body.limit}", field="limit")
        for field in ("project_ids", "statuses"):
            if len(getattr(body, field) or ()) > MAX_LISTED:
                raise RequestError(f"must hold at most {MAX_LISTED}", field=field)
        check_length("display_name", body.display_name)
        if body.display_name == "":
            raise RequestError("must hold at least one character, or be left out", field="display_name")
        query = SessionQuery(
            session_id=body.session_id,
            words=tuple((body.display_name or "").split()),
            project_ids=None if body.project_ids is None else tuple(body.project_ids),
            user_metadata=body.user_metadata or {},
            statuses=_statuses(body.statuses),
            after=_position(body.cursor),
        )
        owners = check_owner(body.owner)
        if owners is not None and user_urn(tenant) not in owners:  # a tenant finds no sessions of others
            return reply({"sessions": []})
        async with services.search_turns.turn(tenant):
            found, last = await services.search.page(tenant, query, body.limit)
        cursor = None if last is None else {"last_created_at": moment(last[0]), "last_session_id": last[1]}
        return reply({"sessions": [_summary(session) for session in found], "next_cursor": cursor})

    return routes
