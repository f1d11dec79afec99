"""The OpenAPI document tells of every body and of who needs a key."""

from __future__ import annotations

from typing import Any

from skyrl.api.openapi import AS_PROTOBUF, BODIES
from skyrl.wire.training import PROTOBUF
from tests.fuzz.inputs import GOOD
from tests.fuzz.target import Target

WITHOUT_BODY = {
    "/api/v1/auth/token",
    "/api/v1/client/config",
    "/api/v1/client/dynamic_config",
    "/api/v1/create_custom_loss",
    "/api/v1/telemetry",
    "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/publish",
}


def operations(target: Target) -> dict[tuple[str, str], Any]:
    document = target.http.get("/openapi.json").json()
    return {
        (method.upper(), path): one for path, methods in document["paths"].items() for method, one in methods.items()
    }


def test_bodies(target: Target) -> None:
    """Of every route that writes; the fuzzer has a good one of each."""
    written = {path: one for (method, path), one in operations(target).items() if method in ("POST", "PUT")}
    assert {path for path, one in written.items() if "requestBody" in one} == {*BODIES}
    assert {path for path, one in written.items() if "requestBody" not in one} == WITHOUT_BODY
    assert {path for path, one in written.items() if PROTOBUF in one.get("requestBody", {}).get("content", {})} == {
        *AS_PROTOBUF
    }
    posted = {path.rpartition("/")[2] for path in written if path in BODIES and "{" not in path}
    assert posted - {route.partition("?")[0].rpartition("/")[2] for route in GOOD} == {"forward"}


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
