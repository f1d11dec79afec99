"""A session's timeline for Perfetto, behind a signed link that needs no API key."""

from __future__ import annotations

from starlette.responses import Response

from skyrl.base.wire.errors import NotFound
from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services

LINK_S = 3600.0
"""How long the link is valid."""


def router(services: Services) -> Routes:
    routes = Routes("traces")

    @routes.get("/sessions/{session_id}/trace_export", scope="any")
    async def trace_export(call: Call, session_id: str) -> Response:
        """Answers with a link. The trace is made when the link is opened."""
        if await services.sessions.find(session_id, call.tenant) is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        link = services.urls.sign(call.request, f"/api/v1/downloads/traces/{session_id}", LINK_S)
        return reply({"status": "ready", "url": link.url})

    @routes.get("/downloads/traces/{session_id}", scope="signed")
    async def download_trace(call: Call, session_id: str) -> Response:
        headers = {"Content-Disposition": f'attachment; filename="{session_id}.pftrace"'}
        return Response(await services.traces.of_session(session_id), media_type="application/json", headers=headers)

    return routes
