"""The application: all routes, behind the HTTP table and its hooks."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from skyrl import __version__
from skyrl.api import (
    audit,
    auth,
    billing,
    capabilities,
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
from skyrl.api.access_log import AccessLog
from skyrl.api.body_memory import BodyReader, bounds
from skyrl.api.call import Hook
from skyrl.api.error_answers import ErrorAnswers
from skyrl.api.hooks import AccessCheck, BodyMemoryHook, RequestIds, RequestMetrics
from skyrl.api.http_table import HttpTable
from skyrl.api.openapi import describe
from skyrl.api.refusals import Refusals
from skyrl.api.route import Route
from skyrl.api.services import Services
from skyrl.api.tracing import TraceHook

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
    auth,
    audit,
    billing,
    health,
    ui,
    metrics,
)


class Framework(FastAPI):
    """FastAPI for the routes with parameters, and for `/openapi.json`."""

    def __init__(self) -> None:
        super().__init__(
            title="skyrl",
            version=__version__,
            description="A self-hosted server for the Tinker API",
            docs_url=None,  # FastAPI's pages load scripts from other servers; /openapi.json stays
            redoc_url=None,
        )
        self.declared: list[Route] = []

    def openapi(self) -> dict[str, Any]:
        """The document of `/openapi.json`, made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(self, self.declared)
        return self.openapi_schema


def create_app(services: Services) -> HttpTable:
    """All routes over these services."""
    framework = Framework()
    for resource in RESOURCES:
        routes = resource.router(services)
        framework.include_router(routes.router)
        framework.declared += routes.declared
    errors = ErrorAnswers(Refusals(services.access), services.quotas)

    async def answer(request: Request, error: Exception) -> Response:
        return errors.answer(request.scope["call"], error)

    for kind in errors.kinds:
        framework.add_exception_handler(kind, answer)
    bodies = BodyReader(services.config.state_dir, bounds(services.config.max_body_bytes))
    tracing = () if services.spans is None else (TraceHook(services.spans, services.config.trace_ratio),)
    hooks: tuple[Hook, ...] = (
        *tracing,
        RequestMetrics(services.metrics.http, framework.declared),
        RequestIds(),
        AccessCheck(services.access, services.urls),
        BodyMemoryHook(bodies),
        *((AccessLog(),) if services.config.access_log else ()),
    )
    return HttpTable(framework, framework.declared, hooks, errors)
