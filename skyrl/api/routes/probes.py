"""What is asked about the server itself.

Probes: healthz (the process answers), readyz (the server can train and sample) and statusz (counts); what a client
finds at the base URL. `GET /metrics`: the metrics of all processes of this server, for Prometheus. What a client asks
first: feature flags and capabilities. Telemetry is accepted, and not kept."""

from __future__ import annotations

from starlette.responses import Response

from skyrl import __version__
from skyrl.api.call import Call, reply
from skyrl.api.routing import Routes
from skyrl.api.served import ServedModel
from skyrl.api.services import Services
from skyrl.base.config.keys import LOOPBACK
from skyrl.runtime.metrics.files import CONTENT_TYPE


def probe_routes(services: Services) -> Routes:
    routes = Routes("health", prefix="")

    @routes.get("/", scope="open")
    async def about(call: Call) -> Response:
        """Browsers are led to the status page. Other clients get the server's name and paths. The target is relative,
        so that a proxy may serve the page below a path of its own."""
        vary = {"Vary": "Accept"}
        if "text/html" in call.request.headers.get("accept", ""):
            return Response(status_code=307, headers=vary | {"Location": "ui"})
        return reply(
            {
                "name": "skyrl",
                "version": __version__,
                "description": "A self-hosted server for the Tinker API: give an SDK this address as its base URL",
                "paths": {"openapi": "/openapi.json", "ready": "/readyz", "status": "/statusz", "page": "/ui"},
            },
            headers=vary,
        )

    @routes.get("/api/v1/healthz", scope="open")
    async def healthz(call: Call) -> Response:
        return reply({"status": "ok"})

    @routes.get("/readyz", scope="open")
    async def readyz(call: Call) -> Response:
        """With several base models, each has its own line, and the server is ready while one of them is."""
        ready, reasons = await services.readiness.now()
        shown: dict[str, object] = {"ready": ready, "reasons": reasons}
        found = await services.readiness.by_model()
        if len(found) > 1:
            shown["base_models"] = {name: {"ready": each, "reasons": whys} for name, (each, whys) in found.items()}
        return reply(shown, 200 if ready else 503)

    @routes.get("/statusz", scope="open")
    async def statusz(call: Call) -> Response:
        of_models = {model.config.served_names[0]: await _inference(model) for model in services.served}
        return reply(
            {
                "version": __version__,
                "api_process": services.process_id,
                "samples": {
                    "mode": "colocated" if services.served[0].sampling.client is None else "forwarded",
                    "forwarded": services.sampling.forwarded,
                    "engine": services.sampling.to_engine,
                    "in_flight": services.sampling.in_flight,
                    "max_tokens_cut": services.sampling.cuts.count,
                },
                "requests_pending": services.futures.pending,
                "quotas": services.quotas.counts(),
                **({"base_models": of_models} if len(of_models) > 1 else next(iter(of_models.values()))),
            }
        )

    return routes


async def _inference(model: ServedModel) -> dict[str, object]:
    """What this process knows of the inference servers of one base model."""
    client, replicas = model.sampling.client, model.readiness.replicas
    shown: dict[str, object] = {
        "forwarding": {} if client is None else dict(client.counts),
        "inference_generation": model.watch.state.generation,
    }
    if replicas is not None:
        of = model.config.backend_config.inference.num_engines
        shown["replicas"] = {"in_use": await replicas.now(), "of": of}
    return shown


def metrics_routes(services: Services) -> Routes:
    """Where any key is accepted and only this machine can ask, no key is needed; elsewhere an admin's."""
    config, published = services.config, services.published_metrics
    routes = Routes("metrics", prefix="")
    is_open = config.api_keys == "open" and config.host in LOOPBACK

    @routes.get("/metrics", scope="open" if is_open else "admin")
    async def metrics(call: Call) -> Response:
        return Response(await published.answer(), headers={"content-type": CONTENT_TYPE})

    return routes


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


def capability_routes(services: Services) -> Routes:
    routes = Routes("capabilities")

    @routes.post("/client/config", scope="open")
    async def client_config(call: Call) -> Response:
        config = services.config
        return reply(
            CLIENT_CONFIG
            | {
                "pjwt_auth_enabled": config.jwt_auth,
                "sample_use_retrieve_futures": config.sample_use_retrieve_futures,
                "custom_loss_server_side": any(model.config.modes.trains for model in services.served),
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
