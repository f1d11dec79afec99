"""The application: all routes behind the HTTP table and its hooks, and their OpenAPI document.

Every HTTP request goes through the HTTP table and its hooks, on every route. A POST to a path without parameters goes
straight to its handler: FastAPI's routing, dependencies and middleware cost several times what the handlers of a
sample do themselves. All other requests go on to FastAPI, which finds the handler and reads the parameters, or answers
that there is no such path.

The document is FastAPI's, completed with each route's body (a msgspec struct), the shape of every refusal, and
whether the route needs an API key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

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
from skyrl.api.routing import Routes
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


class HttpTable:
    """An ASGI application. Each of `hooks` begins before the route, in their order; no request skips a hook."""

    def __init__(
        self,
        make_framework: Callable[[], FastAPI],
        routes: Iterable[Route],
        hooks: Sequence[Hook],
        errors: ErrorAnswers,
    ) -> None:
        self._make_framework = make_framework
        self.routes = (*routes,)
        self.hooks = (*hooks,)
        self._errors = errors
        self.direct = {
            route.path: route
            for route in self.routes
            if route.method == "POST" and "{" not in route.path and not route.parameters
        }
        """The routes that are called without FastAPI, by path."""
        self._patterns: list[tuple[str, re.Pattern[str], Route]] = [
            (route.method, compile_path(route.template)[0], route) for route in self.routes
        ]

    @cached_property
    def framework(self) -> FastAPI:
        """FastAPI with all routes, made when it is first needed."""
        return self._make_framework()

    def prepare(self) -> None:
        """Make FastAPI's routes now: that takes a tenth of a second, for which otherwise the first request that needs
        them would hold up all others."""
        assert self.framework.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.framework(scope, receive, send)
            return
        direct = self.direct.get(scope["path"]) if scope["method"] == "POST" else None
        call = Call(scope, receive, send, direct or self._find(scope), self.hooks)
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
            else:
                scope["call"] = call
                await self.framework(scope, receive, call.send)
        except ClientGone:
            pass
        except Exception as error:  # ErrorAnswers knows each kind, and logs the server's own faults
            if call.answered:
                raise
            await call.answer(self._errors.answer(call, error))
        finally:
            call.end()

    def _find(self, scope: Scope) -> Route | None:
        """The route that FastAPI will find: the first with a method and a path that fit."""
        method, path = scope["method"], scope["path"]
        for route_method, pattern, route in self._patterns:
            if route_method == method and pattern.match(path):
                return route
        return None


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
    resources = [routes(services) for routes in ROUTES]
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
        RequestMetrics(services.metrics.http),
        RequestIds(),
        AccessCheck(services.access, services.urls),
        BodyMemoryHook(bodies),
        *((AccessLog(),) if services.config.access_log else ()),
    )
    return HttpTable(make_framework, declared, hooks, errors)
