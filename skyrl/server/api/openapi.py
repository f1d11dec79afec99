"""The OpenAPI document: FastAPI's routes and parameters, completed with each route's body (a msgspec struct), the shape
of every refusal, and whether the route needs an API key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from skyrl.base.wire.training import PROTOBUF
from skyrl.chat.dialects.messages import AnthropicError
from skyrl.chat.openai.errors import ErrorBody
from skyrl.server.api.openai import is_anthropic, is_openai
from skyrl.server.api.route import Body, Route


class Refusal(msgspec.Struct):
    """Every answer of 400 and above, except on the OpenAI-compatible routes. If `field` names the field at fault
    (dotted), `detail` begins with that name."""

    detail: str
    field: str | None


def _body(body: Body) -> dict[str, Any]:
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
            operation["requestBody"] = _body(route.body)
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
