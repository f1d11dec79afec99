"""Probes: the SDK's healthz (the process answers), readyz (it can train and sample), statusz (what it has done); and
what this server is."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from skyrl import __version__
from skyrl.api.readiness import Readiness
from skyrl.api.reply import reply
from skyrl.api.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["health"])

    async def reasons_now() -> list[str]:
        await services.watch.refresh()
        reasons = services.watch.reasons()
        if not reasons and services.config.external_inference_url is not None and services.client is not None:
            trouble = await services.client.probe()
            reasons = [f"sampling: {trouble}"] if trouble is not None else []
        return reasons

    readiness = Readiness(reasons_now)

    @routes.get("/")
    async def about() -> Response:
        """What somebody sees who opens the base URL."""
        return reply(
            {
                "name": "skyrl",
                "version": __version__,
                "description": "A self-hosted server for the Tinker API: give an SDK this address as its base URL",
                "paths": {"openapi": "/openapi.json", "ready": "/readyz", "status": "/statusz"},
            }
        )

    @routes.get("/api/v1/healthz")
    async def healthz() -> Response:
        return reply({"status": "ok"})

    @routes.get("/readyz")
    async def readyz() -> Response:
        reasons = await readiness.reasons()
        return reply({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    @routes.get("/statusz")
    async def statusz() -> Response:
        state = services.watch.state
        return reply(
            {
                "version": __version__,
                "api_process": services.process_id,
                "samples": {
                    "mode": "colocated" if services.config.colocated else "forwarded",
                    "forwarded": services.sampling.forwarded,
                    "engine": services.sampling.to_engine,
                    "in_flight": services.sampling.in_flight,
                },
                "forwarding": dict(services.client.counts) if services.client is not None else {},
                "requests_pending": services.store.pending,
                "quotas": services.quotas.counts(),
                "inference_generation": state.generation,
            }
        )

    return routes
