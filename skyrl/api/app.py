"""The application: all routes behind the HTTP table and its hooks, and their OpenAPI document.

Every HTTP request goes through the HTTP table and its hooks, on every route. A request to a route without parameters
goes straight to its handler: FastAPI's routing, dependencies and middleware cost several times what the handlers of a
sample do themselves. FastAPI finds all other routes and reads their parameters, or answers that there is no such path.

The document is FastAPI's, completed with each route's body (a msgspec struct), the shape of every refusal, and
whether the route needs an API key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl import __version__
from skyrl.api.bodies import BodyReader, bounds
from skyrl.api.call import BytesResponse, Call, Hook
from skyrl.api.error_answers import ErrorAnswers, Refusals
from skyrl.api.hooks import AccessCheck, AccessLog, BodyMemoryHook, RequestIds, RequestMetrics, TraceHook
from skyrl.api.route import Body, Route
from skyrl.api.routes.account import audit_routes, key_routes, usage_routes
from skyrl.api.routes.agent_sessions import agent_session_routes
from skyrl.api.routes.chats import chat_routes, completion_routes, is_anthropic, is_openai
from skyrl.api.routes.checkpoints import checkpoint_routes, copy_routes
from skyrl.api.routes.downloads import download_routes, timeline_routes
from skyrl.api.routes.futures import future_routes
from skyrl.api.routes.models import model_routes
from skyrl.api.routes.probes import capability_routes, metrics_routes, probe_routes
from skyrl.api.routes.sampling import sampling_routes
from skyrl.api.routes.sessions import search_routes, session_routes
from skyrl.api.routes.training import training_routes
from skyrl.api.routes.weights import weight_routes
from skyrl.api.routing import Routes, declared_at
from skyrl.api.services import Services
from skyrl.api.ui.page import page_routes
from skyrl.base.wire.training import PROTOBUF
from skyrl.chat.dialects.messages import AnthropicError
from skyrl.chat.openai.errors import ErrorBody
from skyrl.chat.openai.service import ClientGone


class Refusal(msgspec.Struct):
    """Every answer of 400 and above, except on the OpenAI-compatible routes. If `field` names the field at fault
    (dotted), `detail` begins with that name."""

    detail: str
    field: str | None


def _body_schema(body: Body) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body.schema.__name__}"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if body.protobuf:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": not body.optional, "content": content}


def describe(app: FastAPI, declared: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the application's routes."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    bodies = {route.body.schema for route in declared if route.body is not None}
    _, schemas = msgspec.json.schema_components(
        sorted({*bodies, Refusal, ErrorBody, AnthropicError}, key=lambda kind: kind.__name__),
        ref_template="#/components/schemas/{name}",
    )
    for route in declared:
        shape = AnthropicError if is_anthropic(route.path) else ErrorBody if is_openai(route.path) else Refusal
        refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}
        operation = document["paths"][route.path][route.method.lower()]
        operation["responses"].pop("422", None)  # FastAPI's own refusals, which `ErrorAnswers` answers with 400
        for statuses, description in (("4XX", "Refused; nothing was done."), ("5XX", "The server's fault; ask again.")):
            operation["responses"][statuses] = {"description": description, "content": refusal}
        if route.body is not None:
            operation["requestBody"] = _body_schema(route.body)
        if not route.keyless:
            operation["security"] = [{"key": []}, {"bearer": []}]
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        },
    }
    return document


class Framework(FastAPI):
    """FastAPI with all routes, for those that have parameters, and for `/openapi.json`."""

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
        self._of_routes = [
            (route, AsyncExitStackMiddleware(route.app), declared_at(route.endpoint))
            for route in self.routes
            if isinstance(route, APIRoute)
        ]

    def find(self, scope: Scope) -> tuple[Route | None, ASGIApp]:
        """The first declared route whose method and path fit, and what reads its parameters and runs it. Without such a
        route, what answers in its place: `/openapi.json`, 404, 405, or the redirect of a last slash."""
        scope["app"] = self
        for route, run, declared in self._of_routes:
            match, of_route = route.matches(scope)
            if match is Match.FULL:
                scope.update(of_route)
                return declared, run
        return None, self.router

    def openapi(self) -> dict[str, Any]:
        """The document of `/openapi.json`, made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(self, self._declared)
        return self.openapi_schema


class HttpTable:
    """An ASGI application. Each of `hooks` begins before the route, in their order; no request skips a hook."""

    def __init__(self, resources: Sequence[Routes], hooks: Sequence[Hook], errors: ErrorAnswers) -> None:
        self._resources = resources
        self.routes = tuple(route for routes in resources for route in routes.declared)
        self.hooks = (*hooks,)
        self._errors = errors
        self.direct = {(route.method, route.path): route for route in self.routes if route.is_direct}
        """The routes that are called without FastAPI, by method and path."""

    @cached_property
    def framework(self) -> Framework:
        """FastAPI with all routes, made when it is first needed."""
        return Framework(self._resources)

    def prepare(self) -> None:
        """Make FastAPI's routes now: that takes a tenth of a second, for which otherwise the first request that needs
        them would hold up all others."""
        assert self.framework.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.framework(scope, receive, send)
            return
        direct = self.direct.get((scope["method"], scope["path"]))
        route, run = (direct, None) if direct is not None else self.framework.find(scope)
        call = Call(scope, receive, send, route, self.hooks)
        try:
            for hook in self.hooks:
                if (waiting := hook.begin(call)) is not None:
                    await waiting
            if direct is not None:
                response = await direct.run(call)
                if isinstance(response, BytesResponse):
                    await call.answer(response)
                else:
                    await response(scope, receive, call.send)
            elif run is not None:
                scope["call"] = call
                await run(scope, receive, call.send)
        except ClientGone:
            pass
        except Exception as error:  # ErrorAnswers knows each kind, and logs the server's own faults
            if call.answered:
                raise
            await self._answer(call, error)
        finally:
            call.end()

    async def _answer(self, call: Call, error: Exception) -> None:
        try:
            await call.answer(self._errors.answer(call, error))
        except Exception as of_hook:  # the answer has ended the hooks, and one of them has failed
            if call.answered:
                raise
            await call.answer(self._errors.answer(call, of_hook))


ROUTES = (
    future_routes,
    sampling_routes,
    training_routes,
    weight_routes,
    model_routes,
    search_routes,
    session_routes,
    timeline_routes,
    capability_routes,
    checkpoint_routes,
    copy_routes,
    download_routes,
    completion_routes,
    chat_routes,
    agent_session_routes,
    key_routes,
    audit_routes,
    usage_routes,
    probe_routes,
    page_routes,
    metrics_routes,
)


def create_app(services: Services) -> HttpTable:
    """All routes over these services."""
    resources = [routes(services) for routes in ROUTES]
    declared = [route for routes in resources for route in routes.declared]
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
    return HttpTable(resources, hooks, ErrorAnswers(Refusals(services.access), services.quotas))
