"""Probes: the SDK's healthz (the process answers), readyz (it can train and sample), statusz (what it has done); and
what this server is."""

from __future__ import annotations

from starlette.responses import Response

from skyrl import __version__
from skyrl.api.call import Call
from skyrl.api.readiness import Readiness
from skyrl.api.reply import reply
from skyrl.api.routes import Routes
from skyrl.api.services import Services
from skyrl.storage.space import shortage


def router(services: Services) -> Routes:
    routes = Routes("health", prefix="")

    async def look() -> tuple[bool, list[str]]:
        """Whether the server is ready, and what is said of it. Little disk is said, and takes no server out of service:
        samples go on."""
        await services.watch.refresh()
        reasons = services.watch.reasons()
        if not reasons and services.config.external_inference_url is not None and services.client is not None:
            trouble = await services.client.probe()
            reasons = [f"sampling: {trouble}"] if trouble is not None else []
        low = shortage(services.config.state_dir)
        return not reasons, [*reasons, f"disk: {low}"] if low is not None else reasons

    readiness = Readiness(look)

    @routes.get("/", scope="open")
    async def about(call: Call) -> Response:
        """What somebody sees who opens the base URL."""
        return reply(
            {
                "name": "skyrl",
                "version": __version__,
                "description": "A self-hosted server for the Tinker API: give an SDK this address as its base URL",
                "paths": {"openapi": "/openapi.json", "ready": "/readyz", "status": "/statusz"},
            }
        )

    @routes.get("/api/v1/healthz", scope="open")
    async def healthz(call: Call) -> Response:
        return reply({"status": "ok"})

    @routes.get("/readyz", scope="open")
    async def readyz(call: Call) -> Response:
        ready, told = await readiness.now()
        return reply({"ready": ready, "reasons": told}, 200 if ready else 503)

    @routes.get("/statusz", scope="open")
    async def statusz(call: Call) -> Response:
        state = services.watch.state
        return reply(
            {
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
