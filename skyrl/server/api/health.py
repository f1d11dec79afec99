"""Probes: healthz (the process answers), readyz (the server can train and sample) and statusz (counts); and what
a client finds at the base URL."""

from __future__ import annotations

from starlette.responses import Response

from skyrl import __version__
from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply
from skyrl.server.api.routes import Routes
from skyrl.server.api.served import ServedModel
from skyrl.server.api.services import Services


def router(services: Services) -> Routes:
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
                    "mode": "colocated" if services.served[0].lane.client is None else "forwarded",
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
    client, replicas = model.lane.client, model.readiness.replicas
    shown: dict[str, object] = {
        "forwarding": {} if client is None else dict(client.counts),
        "inference_generation": model.watch.state.generation,
    }
    if replicas is not None:
        of = model.config.backend_config.inference.num_engines
        shown["replicas"] = {"in_use": await replicas.now(), "of": of}
    return shown
