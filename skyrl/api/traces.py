"""A session's timeline for Perfetto, behind a signed link that needs no API key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.body import tenant_of
from skyrl.api.reply import reply
from skyrl.api.services import Services
from skyrl.wire.errors import NotFound

LINK_S = 3600.0
"""How long the link is valid."""


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["traces"])

    @routes.get("/sessions/{session_id}/trace_export")
    async def trace_export(session_id: str, request: Request) -> Response:
        """Answers with a link at once. The trace is made when the link is opened."""
        if await services.sessions.find(session_id, tenant_of(request)) is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        link = services.urls.sign(request, f"/api/v1/downloads/traces/{session_id}", LINK_S)
        return reply({"status": "ready", "url": link.url})

    @routes.get("/downloads/traces/{session_id}")
    async def download_trace(session_id: str, request: Request) -> Response:
        services.urls.verify(request)
        headers = {"Content-Disposition": f'attachment; filename="{session_id}.pftrace"'}
        return Response(await services.traces.of_session(session_id), media_type="application/json", headers=headers)

    return routes
