"""The OpenAPI document: FastAPI's routes and parameters, and with them what it cannot see of handlers that read their
requests themselves: the bodies (msgspec structs), the shape of every refusal, and which routes need an API key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi.openapi.utils import get_openapi

from skyrl.wire.requests import (
    AssignProjectRequest,
    CancelFutureRequest,
    CopyWeightsRequest,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    JoinSamplingSessionRequest,
    LoadWeightsRequest,
    ModelRequest,
    OptimStepRequest,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SessionRequest,
    SessionSearchRequest,
    TtlRequest,
    WeightsInfoRequest,
)
from skyrl.wire.training import PROTOBUF, JsonForwardBackward

_V1 = "/api/v1"
BODIES: dict[str, type[msgspec.Struct]] = {
    f"{_V1}/asample": SampleRequest,
    f"{_V1}/cancel_future": CancelFutureRequest,
    f"{_V1}/copy_weights": CopyWeightsRequest,
    f"{_V1}/create_model": CreateModelRequest,
    f"{_V1}/create_sampling_session": CreateSamplingSessionRequest,
    f"{_V1}/create_session": CreateSessionRequest,
    f"{_V1}/forward": JsonForwardBackward,
    f"{_V1}/forward_backward": JsonForwardBackward,
    f"{_V1}/get_info": ModelRequest,
    f"{_V1}/join_sampling_session": JoinSamplingSessionRequest,
    f"{_V1}/load_weights": LoadWeightsRequest,
    f"{_V1}/optim_step": OptimStepRequest,
    f"{_V1}/retrieve_future": RetrieveFutureRequest,
    f"{_V1}/retrieve_futures": RetrieveFuturesRequest,
    f"{_V1}/save_weights": SaveWeightsRequest,
    f"{_V1}/save_weights_external": SaveWeightsExternalRequest,
    f"{_V1}/save_weights_for_sampler": SaveWeightsForSamplerRequest,
    f"{_V1}/session_heartbeat": SessionRequest,
    f"{_V1}/sessions/search": SessionSearchRequest,
    f"{_V1}/sessions/{{session_id}}/finish": FinishSessionRequest,
    f"{_V1}/sessions/{{session_id}}/project": AssignProjectRequest,
    f"{_V1}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}/ttl": TtlRequest,
    f"{_V1}/unload_model": ModelRequest,
    f"{_V1}/weights_info": WeightsInfoRequest,
}
"""What each route's body is. The other routes read none."""
OPTIONAL = (f"{_V1}/sessions/{{session_id}}/finish",)
AS_PROTOBUF = (f"{_V1}/forward", f"{_V1}/forward_backward")
"""Routes that also take the same as protobuf."""
OPEN = (
    "/",
    f"{_V1}/healthz",
    "/readyz",
    "/statusz",
    f"{_V1}/client/config",
    f"{_V1}/client/dynamic_config",
    f"{_V1}/telemetry",
)
_SIGNED = f"{_V1}/downloads/"


class Refusal(msgspec.Struct):
    """Every answer of 400 and above. `field` is the one at fault, dotted, and then `detail` begins with it."""

    detail: str
    field: str | None


def _body(path: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if path in AS_PROTOBUF:
        content[PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": path not in OPTIONAL, "content": content}


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def describe(title: str, version: str, description: str, routes: Any) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    document = get_openapi(title=title, version=version, description=description, routes=routes)
    _, schemas = msgspec.json.schema_components(
        sorted({*BODIES.values(), Refusal}, key=lambda kind: kind.__name__), ref_template="#/components/schemas/{name}"
    )
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    for path, operation in _operations(document):
        operation["responses"].pop("422", None)  # FastAPI's own; what it refuses is answered as everything else
        for wrong, says in (("4XX", "Refused; nothing was done."), ("5XX", "The server's fault; ask again.")):
            operation["responses"][wrong] = {"description": says, "content": refusal}
        if path in BODIES and "requestBody" not in operation:
            operation["requestBody"] = _body(path)
        if path not in OPEN and not path.startswith(_SIGNED):
            operation["security"] = [{"key": []}]
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
    }
    return document
