"""The OpenAPI document tells of every body and of who needs a key."""

from __future__ import annotations

from typing import Any

from skyrl.wire.training import PROTOBUF
from tests.fuzz.inputs import GOOD
from tests.fuzz.target import Target


def operations(target: Target) -> dict[tuple[str, str], Any]:
    document = target.http.get("/openapi.json").json()
    return {
        (method.upper(), path): one for path, methods in document["paths"].items() for method, one in methods.items()
    }


def test_bodies(target: Target) -> None:
    """Of every route that takes one; the fuzzer has a good one of each."""
    bodies = {path: one["requestBody"] for (_, path), one in operations(target).items() if "requestBody" in one}
    assert {path for path, body in bodies.items() if PROTOBUF in body["content"]} == {
        "/api/v1/forward",
        "/api/v1/forward_backward",
    }
    assert {path for path, body in bodies.items() if not body["required"]} == {"/api/v1/sessions/{session_id}/finish"}
    posted = {path.rpartition("/")[2] for path in bodies if "{" not in path}
    assert len(posted) > 20
    assert posted <= {route.partition("?")[0].rpartition("/")[2] for route in GOOD}


def test_every_reference_leads_somewhere_and_requests_tell_their_fields(target: Target) -> None:
    document = target.http.get("/openapi.json")
    schemas = document.json()["components"]["schemas"]
    references = {part.partition('"')[0] for part in document.text.split("#/components/schemas/")[1:]}
    assert references <= {*schemas}
    assert schemas["SampleRequest"]["required"] == ["prompt"]
    assert {"model_id", "seq_id", "path", "ttl_seconds"} <= {*schemas["SaveWeightsRequest"]["properties"]}


def test_keys_are_needed_where_it_says_so(target: Target) -> None:
    names = {"session_id": "s", "sampler_id": "x", "model_id": "m", "kind": "weights", "name": "n"}
    names |= {"save": "0123", "file": "f"}
    for (method, path), operation in operations(target).items():
        answer = target.http.request(method, path.format(**names), headers={"X-API-Key": ""})
        assert (answer.status_code == 401) == bool(operation.get("security")), path
