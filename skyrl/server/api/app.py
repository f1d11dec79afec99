"""The application: all routes, behind the HTTP table and its hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from skyrl import __version__
from skyrl.server.api import (
    agent_sessions,
    audit,
    auth,
    billing,
    capabilities,
    chats,
    checkpoints,
    copying,
    downloads,
    futures,
    health,
    metrics,
    models,
    openai,
    sampling,
    search,
    sessions,
    traces,
    training,
    ui,
    weights,
)
from skyrl.server.api.access_log import AccessLog
from skyrl.server.api.body_memory import BodyReader, bounds
from skyrl.server.api.call import Hook
from skyrl.server.api.error_answers import ErrorAnswers
from skyrl.server.api.hooks import AccessCheck, BodyMemoryHook, RequestIds, RequestMetrics
from skyrl.server.api.http_table import HttpTable
from skyrl.server.api.openapi import describe
from skyrl.server.api.refusals import Refusals
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services
from skyrl.server.api.tracing import TraceHook

RESOURCES = (
    futures,
    sampling,
    training,
    weights,
    models,
    search,
    sessions,
    traces,
    capabilities,
    checkpoints,
    copying,
    downloads,
    openai,
    chats,
    agent_sessions,
    auth,
    audit,
    billing,
    health,
    ui,
    metrics,
)


class Framework(FastAPI):
    """FastAPI for the routes with parameters, and for `/openapi.json`."""

    def __init__(self, resources: Sequence[Routes]) -> None:
        super().__init__(
            title="skyrl",
            version=__version__,
            description="A self-hosted server for the Tinker API",
            docs_url=None,  # FastAPI's pages load scripts from other servers; /openapi.json stays
            redoc_url=None,
        )
        for routes in resources:
            routes.add_to(self)
        self._declared = [route for routes in resources for route in routes.declared]

    def openapi(self) -> dict[str, Any]:
        """The document of `/openapi.json`, made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(self, self._declared)
        return self.openapi_schema


def create_app(services: Services) -> HttpTable:
    """All routes over these services."""
    resources = [resource.router(services) for resource in RESOURCES]
    declared = [route for routes in resources for route in routes.declared]
    errors = ErrorAnswers(Refusals(services.access), services.quotas)

    async def answer(request: Request, error: Exception) -> Response:
        return errors.answer(request.scope["call"], error)

    def make_framework() -> Framework:
        framework = Framework(resources)
        for kind in errors.kinds:
            framework.add_exception_handler(kind, answer)
        return framework

    bodies = BodyReader(services.config.state_dir, bounds(services.config.max_body_bytes))
    tracing = () if services.spans is None else (TraceHook(services.spans, services.config.trace_ratio),)
    hooks: tuple[Hook, ...] = (
        *tracing,
        RequestMetrics(services.metrics.http, declared),
        RequestIds(),
        AccessCheck(services.access, services.urls),
        BodyMemoryHook(bodies),
        *((AccessLog(),) if services.config.access_log else ()),
    )
    return HttpTable(make_framework, declared, hooks, errors)
