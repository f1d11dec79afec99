"""The OpenAPI document describes every body, and says which routes need a key."""

from __future__ import annotations

from typing import Any

from skyrl.base.wire.training import PROTOBUF
from tests.fuzz.inputs import GOOD
from tests.fuzz.target import Target


def operations(target: Target) -> dict[tuple[str, str], Any]:
    document = target.http.get("/openapi.json").json()
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_the_document_describes_the_body_of_every_route_and_the_fuzzer_has_one(target: Target) -> None:
    described = operations(target).items()
    bodies = {path: operation["requestBody"] for (_, path), operation in described if "requestBody" in operation}
    assert {path for path, body in bodies.items() if PROTOBUF in body["content"]} == {
        "/api/v1/forward",
        "/api/v1/forward_backward",
    }
    assert {path for path, body in bodies.items() if not body["required"]} == {"/api/v1/sessions/{session_id}/finish"}
    posted = {path.rpartition("/")[2] for path in bodies if "{" not in path}
    assert len(posted) > 20
    assert posted <= {route.partition("?")[0].rpartition("/")[2] for route in GOOD}


def test_every_reference_of_the_document_resolves_and_requests_list_their_fields(target: Target) -> None:
    document = target.http.get("/openapi.json")
    schemas = document.json()["components"]["schemas"]
    references = {part.partition('"')[0] for part in document.text.split("#/components/schemas/")[1:]}
    assert references <= {*schemas}
    assert schemas["SampleRequest"]["required"] == ["prompt"]
    assert {"model_id", "seq_id", "path", "ttl_seconds"} <= {*schemas["SaveWeightsRequest"]["properties"]}


def test_exactly_the_routes_marked_with_security_need_a_key(target: Target) -> None:
    names = {"session_id": "s", "sampler_id": "x", "model_id": "m", "kind": "weights", "name": "n"}
    names |= {
        "save": "0123",
        "file": "app.css",
        "model": "tiny",
        "run_id": "m",
        "agent_session": "s",
        "agent_turn": "t",
        "upload_id": "u",
    }
    for (method, path), operation in operations(target).items():
        answer = target.http.request(method, path.format(**names), headers={"X-API-Key": ""})
        assert (answer.status_code == 401) == bool(operation.get("security")), path
