"""retrieve_future: the long poll. Result bytes go out as they were stored."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.body import read_body, tenant_of
from skyrl.api.reply import reply
from skyrl.api.services import Services
from skyrl.wire.requests import RetrieveFutureRequest, decode_json
from skyrl.wire.results import to_json
from skyrl.wire.training import PROTOBUF

HOLD_S = 30.0
"""How long a poll is held: the SDK gives up reading at 45 s."""


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["futures"])
    max_bytes = services.config.max_body_bytes

    @routes.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        tenant = tenant_of(request)
        wanted = decode_json(RetrieveFutureRequest, await read_body(request, max_bytes))
        try:
            outcome = await services.store.wait(wanted.request_id, tenant, HOLD_S)
        except KeyError:
            # 410 makes the SDK send a lost sample again; it cannot do so for a training command.
            status = 410 if request.headers.get("x-tinker-request-type") == "Sample" else 404
            return reply({"detail": f"request_id: no request {wanted.request_id!r}", "field": "request_id"}, status)
        if outcome is None:
            return reply({"type": "try_again", "request_id": wanted.request_id, "queue_state": "active"}, 408)
        if outcome.error is not None:
            return reply({"error": outcome.error, "category": outcome.error_category or "unknown"})
        if outcome.result_format != "json" and PROTOBUF in request.headers.get("accept", ""):
            return Response(outcome.result, media_type=PROTOBUF)
        return Response(to_json(outcome.result, outcome.result_format), media_type="application/json")

    return routes
