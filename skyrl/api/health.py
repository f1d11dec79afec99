"""Probes: healthz (the process answers), readyz (the server can train and sample) and statusz (counts); and a page that
names the server."""

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

    async def find_reasons() -> tuple[bool, list[str]]:
        """Whether the server is ready, and the reasons to list. Too little disk space and missing replicas are listed,
        but the server stays ready while one replica is in use: samples go on."""
        await services.watch.refresh()
        reasons = services.watch.reasons()
        if not reasons and services.config.external_inference_url is not None and services.client is not None:
            failure = await services.client.probe()
            reasons = [f"sampling: {failure}"] if failure is not None else []
        ready = not reasons
        if ready and used_replicas is not None and (used := await used_replicas.now()) < replicas:
            ready = used > 0
            reasons = [f"sampling: {used} of {replicas} replicas are in use"]
        disk_shortage = shortage(services.config.state_dir)
        return ready, [*reasons, f"disk: {disk_shortage}"] if disk_shortage is not None else reasons

    replicas = services.config.backend_config.inference.num_engines
    routed = services.config.modes.manages_inference and replicas > 1
    used_replicas = Readiness(services.client.replicas_in_use) if routed and services.client is not None else None
    readiness = Readiness(find_reasons)

    @routes.get("/", scope="open")
    async def about(call: Call) -> Response:
        """What a browser shows at the base URL."""
        return reply(
            {
                "name": "skyrl",
                "version": __version__,
                "description": "A self-hosted server for the Tinker API: give an SDK this address as its base URL",
                "paths": {"openapi": "/openapi.json", "ready": "/readyz", "status": "/statusz", "page": "/ui"},
            }
        )

    @routes.get("/api/v1/healthz", scope="open")
    async def healthz(call: Call) -> Response:
        return reply({"status": "ok"})

    @routes.get("/readyz", scope="open")
    async def readyz(call: Call) -> Response:
        ready, reasons = await readiness.now()
        return reply({"ready": ready, "reasons": reasons}, 200 if ready else 503)

    @routes.get("/statusz", scope="open")
    async def statusz(call: Call) -> Response:
        state = services.watch.state
        shown: dict[str, object] = {}
        if used_replicas is not None:
            shown = {"replicas": {"in_use": await used_replicas.now(), "of": replicas}}
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
