"""Probes: healthz (the process answers), readyz (the server can train and sample) and statusz (counts); and what
a client finds at the base URL."""

from __future__ import annotations

from starlette.responses import Response

from skyrl import __version__
from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply
from skyrl.server.api.routes import Routes
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
        ready, reasons = await services.readiness.now()
        return reply({"ready": ready, "reasons": reasons}, 200 if ready else 503)

    @routes.get("/statusz", scope="open")
    async def statusz(call: Call) -> Response:
        state = services.watch.state
        shown: dict[str, object] = {}
        if services.readiness.replicas is not None:
            of = services.config.backend_config.inference.num_engines
            shown = {"replicas": {"in_use": await services.readiness.replicas.now(), "of": of}}
        return reply(
            {
                **shown,
                "version": __version__,
                "api_process": services.process_id,
                "samples": {
                    "mode": "forwarded" if services.config.modes.forwards else "colocated",
                    "forwarded": services.sampling.forwarded,
                    "engine": services.sampling.to_engine,
                    "in_flight": services.sampling.in_flight,
                    "max_tokens_cut": services.sampling.cuts.count,
                },
                "forwarding": dict(services.client.counts) if services.client is not None else {},
                "requests_pending": services.futures.pending,
                "quotas": services.quotas.counts(),
                "inference_generation": state.generation,
            }
        )

    return routes
