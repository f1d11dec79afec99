"""No input breaks the server: inputs from the OpenAPI document, and inputs that the document does not allow."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # early: beside other threads an import may meet python/cpython#106905
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.training import PROTOBUF
from tests.fuzz.conftest import Run
from tests.fuzz.inputs import FRAGMENTS, GOOD, STRINGS, damaged, encoded, json_bodies, passes, path_of
from tests.fuzz.target import Target

pytestmark = [
    # Hypothesis gives this warning about an input that failed.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
    # Threads that SDKs of earlier tests have left draw random numbers too, and Hypothesis takes them for a strategy's.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]


def test_every_operation_of_the_openapi_document_survives_valid_and_invalid_requests(target: Target, run: Run) -> None:
    """Requests that fit the document, and requests that violate it slightly."""
    document = schemathesis.openapi.from_dict(target.http.get("/openapi.json").json())
    document.config.base_url = target.server.url
    operations = [found.ok() for found in document.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 50
    for operation in operations:
        wrong = [GenerationMode.NEGATIVE] if operation.body or operation.query else []
        for mode in (GenerationMode.POSITIVE, *wrong):

            @given(operation.as_strategy(generation_mode=mode))
            def answer_is_sound(case: Any) -> None:
                sent = case.as_transport_kwargs()
                body = {name: sent[name] for name in ("params", "json") if sent.get(name) is not None}
                target.send(sent["method"], sent["url"].removeprefix(target.server.url), **body)

            run(answer_is_sound, 2, share=1 / (2 * len(operations)))


@pytest.mark.parametrize("route", GOOD)
def test_nearly_valid_bodies_get_sound_answers(target: Target, run: Run, route: str) -> None:
    path = path_of(target.fill(route))

    @given(st.data())
    def answer_is_sound(data: st.DataObject) -> None:
        text = data.draw(json_bodies(GOOD[route])).decode("utf-8", "surrogateescape")
        body = data.draw(damaged(target.fill(text).encode("utf-8", "surrogateescape")))
        content, headers = data.draw(encoded(body))
        target.send("POST", path, content=content, headers=headers)

    run(answer_is_sound, 25)


def test_nearly_valid_json_passes_get_sound_answers(target: Target, run: Run) -> None:
    """The server accepts such passes; each succeeds or fails with category "user" when it runs."""

    @given(json_bodies(GOOD["forward_backward"]["forward_backward_input"]))
    def answer_is_sound(body: bytes) -> None:
        target.command("forward_backward", target.numbered(b'"forward_backward_input":' + body))

    run(answer_is_sound, 30)


def test_nearly_valid_protobuf_passes_get_sound_answers(target: Target, run: Run) -> None:
    @given(passes(), st.data())
    def answer_is_sound(message: pb.ForwardBackwardRequest, data: st.DataObject) -> None:
        body = data.draw(damaged(message.SerializeToString()))
        target.command("forward_backward", target.numbered_proto(body), PROTOBUF)

    run(answer_is_sound, 50)


def test_bodies_of_another_content_type_get_sound_answers(target: Target, run: Run) -> None:
    @given(st.sampled_from([*GOOD]), st.binary(max_size=200))
    def answer_is_sound(route: str, body: bytes) -> None:
        target.send("POST", path_of(target.fill(route)), content=body, headers={"Content-Type": PROTOBUF})

    run(answer_is_sound, 50)


LONGEST = 5_000
"""Bytes of a name. Percent-encoded and used twice in a URL, a name of this length still fits the client's limit."""
PLACES = (
    ("GET", "sessions/{}"),
    ("GET", "sessions/{}/trace_export"),
    ("PUT", "sessions/{}/project"),
    ("GET", "samplers/{}"),
    ("GET", "training_runs/{}"),
    ("GET", "training_runs/{}/checkpoints?access_scope=accessible"),
    ("GET", "training_runs/{}/checkpoints/weights/saved/archive"),
    ("GET", "training_runs/x/checkpoints/{}/saved/archive"),
    ("GET", "training_runs/x/checkpoints/weights/{}/archive"),
    ("DELETE", "training_runs/x/checkpoints/weights/{}"),
    ("POST", "training_runs/x/checkpoints/weights/{}/publish"),
    ("PUT", "training_runs/x/checkpoints/weights/{}/ttl"),
    ("GET", "downloads/files/x/weights/saved/0/{}"),
    ("GET", "downloads/archives/x/weights/saved/0/{}?expires=1&signature=x"),
    ("GET", "downloads/traces/{}?expires=1&signature=x"),
    ("GET", "downloads/traces/x?expires=1&signature={}"),
    ("GET", "downloads/traces/x?expires={}&signature=x"),
    ("GET", "sessions?limit={}"),
    ("GET", "sessions?offset={}"),
    ("GET", "training_runs?project_id={}"),
    ("GET", "audit?day={}"),
    ("GET", "billing/usage/events?starting_on={}&ending_before={}"),
    ("GET", "billing/usage/checkpoints/current?project_id={}"),
)


@pytest.mark.parametrize(("method", "place"), PLACES)
def test_odd_paths_and_queries_get_sound_answers(target: Target, run: Run, method: str, place: str) -> None:
    texts = st.one_of(st.sampled_from(STRINGS), st.sampled_from(FRAGMENTS), st.binary(max_size=20))

    @given(texts)
    def answer_is_sound(text: str | bytes) -> None:
        raw = target.fill(text).encode() if isinstance(text, str) else text
        name = quote(raw[:LONGEST], safe="")
        target.send(method, f"/api/v1/{place.format(name, name)}", json={} if method == "PUT" else None)

    run(answer_is_sound, 10)


CONTROL = {*range(32), 127}


def test_odd_headers_get_sound_answers(target: Target, run: Run) -> None:
    names = ("X-API-Key", "Content-Type", "Content-Encoding", "Accept", "X-Tinker-Request-Type", "X-Idempotency-Key")
    more = ("X-Stainless-Package-Version", "X-Tinker-Weights-Access-Token", "Host")
    values = st.binary(max_size=30).map(
        lambda value: bytes(byte for byte in value if byte >= 32 and byte != 127).strip()
    )

    @given(st.sampled_from([*names, *more]), values)
    def answer_is_sound(name: str, value: bytes) -> None:
        headers: Any = [(name.encode(), value)]
        for path, body in (("create_session", b"{}"), ("asample", b"{}"), ("copy_weights", b"{}")):
            target.send("POST", f"/api/v1/{path}", content=body, headers=headers)
        target.send("GET", "/api/v1/checkpoints", headers=headers)

    run(answer_is_sound, 30)
