"""What a client asks first: feature flags and capabilities; and where it reports to (telemetry is not kept)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.body import tenant_of
from skyrl.api.reply import reply
from skyrl.api.services import Services

CLIENT_CONFIG = {
    "credential_default_source": "api_key",
    "create_model_via_load_weights": True,
    "parallel_fwdbwd_chunks": True,
    "proto_write_fwdbwd": True,
    "sample_join_sampling_session": True,
}
"""Flags that differ from an SDK's own default, or that older SDKs default otherwise."""

MAX_CANCELS = 64
"""Cancellations that a client may send at once: each is a request of its own."""


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["capabilities"])

    @routes.post("/client/config")
    async def client_config() -> Response:
        config = services.config
        return reply(
            CLIENT_CONFIG
            | {
                "pjwt_auth_enabled": config.jwt_auth,
                "sample_use_retrieve_futures": config.sample_use_retrieve_futures,
            }
        )

    @routes.post("/client/dynamic_config")
    async def dynamic_config() -> Response:
        return reply(
            {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": MAX_CANCELS}
        )

    @routes.get("/get_server_capabilities")
    async def capabilities(request: Request) -> Response:
        tenant_of(request)
        return reply(
            {
                "supported_models": [
                    {
                        "model_name": name,
                        "max_context_length": services.watch.state.max_context,
                        "trainable": services.config.modes.trains,
                        "sampleable": True,
                    }
                    for name in services.config.served_names
                ]
            }
        )

    @routes.post("/telemetry")
    async def telemetry() -> Response:
        return reply({"status": "accepted"})

    return routes
