"""What a client asks first: feature flags and capabilities. Also accepts telemetry, which is not kept."""

from __future__ import annotations

from starlette.responses import Response

from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services

CLIENT_CONFIG = {
    "credential_default_source": "api_key",
    "create_model_via_load_weights": True,
    "parallel_fwdbwd_chunks": True,
    "proto_write_fwdbwd": True,
    "sample_join_sampling_session": True,
}
"""Flags whose value differs from the default of the current SDK or of an older one."""

MAX_CANCELS = 64
"""How many cancellations a client may send at once. Each is a separate request."""


def router(services: Services) -> Routes:
    routes = Routes("capabilities")

    @routes.post("/client/config", scope="open")
    async def client_config(call: Call) -> Response:
        config = services.config
        return reply(
            CLIENT_CONFIG
            | {
                "pjwt_auth_enabled": config.jwt_auth,
                "sample_use_retrieve_futures": config.sample_use_retrieve_futures,
            }
        )

    @routes.post("/client/dynamic_config", scope="open")
    async def dynamic_config(call: Call) -> Response:
        return reply(
            {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": MAX_CANCELS}
        )

    @routes.get("/get_server_capabilities", scope="any")
    async def capabilities(call: Call) -> Response:
        return reply(
            {
                "supported_models": [
                    {
                        "model_name": name,
                        "max_context_length": model.watch.state.max_context,
                        "trainable": model.config.modes.trains,
                        "sampleable": True,
                    }
                    for model in services.served
                    for name in model.config.served_names
                ]
            }
        )

    @routes.post("/telemetry", scope="open")
    async def telemetry(call: Call) -> Response:
        return reply({"status": "accepted"})

    return routes
