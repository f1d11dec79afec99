"""The application: all routes behind the HTTP table and its hooks, and their OpenAPI document.

The document is FastAPI's, completed with each route's body (a msgspec struct), the shape of every refusal, and
whether the route needs an API key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from skyrl.api.bodies import BodyReader, bounds
from skyrl.api.call import Body, Hook, Route
from skyrl.api.error_answers import ErrorAnswers, Refusals, is_anthropic, is_openai
from skyrl.api.routes.account import audit_routes, key_routes, usage_routes
from skyrl.api.routes.agent_sessions import agent_session_routes
from skyrl.api.routes.chats import chat_routes, completion_routes
from skyrl.api.routes.checkpoint_search import checkpoint_search_routes
from skyrl.api.routes.checkpoints import checkpoint_routes, copy_routes
from skyrl.api.routes.downloads import download_routes, timeline_routes
from skyrl.api.routes.futures import future_routes
from skyrl.api.routes.models import model_routes
from skyrl.api.routes.probes import capability_routes, metrics_routes, probe_routes
from skyrl.api.routes.sampling import sampling_routes
from skyrl.api.routes.sessions import search_routes, session_routes
from skyrl.api.routes.training import training_routes
from skyrl.api.routes.uploads import upload_routes
from skyrl.api.routes.weights import weight_routes
from skyrl.api.services import Services
from skyrl.api.table import AccessCheck, AccessLog, BodyMemoryHook, HttpTable, RequestIds, TraceHook
from skyrl.api.ui.page import page_routes
from skyrl.base.wire.training import PROTOBUF
from skyrl.chat.dialects.messages import AnthropicError
from skyrl.chat.openai.errors import ErrorBody


class Refusal(msgspec.Struct):
    """Every answer of 400 and above, except on the OpenAI-compatible routes. If `field` names the field at fault
    (dotted), `detail` begins with that name. A refusal of what is no HTTP has no `request_id`."""

    detail: str
    field: str | None
    request_id: str | None = None


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
    checkpoint_search_routes,
    upload_routes,
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
    services.metrics.http.watch(declared)
    bodies = BodyReader(services.config.state_dir, bounds(services.config.max_body_bytes))
    tracing = () if services.spans is None else (TraceHook(services.spans, services.config.trace_ratio),)
    hooks: tuple[Hook, ...] = (
        *tracing,
        services.metrics.http,
        RequestIds(),
        AccessCheck(services.access, services.urls),
        BodyMemoryHook(bodies),
        *((AccessLog(),) if services.config.access_log else ()),
    )
    errors = ErrorAnswers(Refusals(services.access), services.quotas, services.metrics.refusals)
    return HttpTable(resources, hooks, errors, describe)
