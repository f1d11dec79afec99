"""One id finds a request: in its answer, in error bodies, in the access log, and in the inference server's own id."""

from __future__ import annotations

import logging

import pytest
from api_harness import Api, Serve, sample_body, tokens
from fake_upstream import FakeUpstream

from skyrl.inference.vllm_plugin.protocol import TOKENS_ONLY

GIVEN = {"X-Request-Id": "mine-7"}


async def test_an_error_names_the_request_in_its_body_and_header(api: Api) -> None:
    for path, body in (("asample", {}), ("no_such_path", {}), ("create_model", {"session_id": 3})):
        answer = await api.post(path, body, **GIVEN)
        assert answer.status_code >= 400
        assert answer.json()["request_id"] == answer.headers["x-request-id"] == "mine-7"
    made = await api.post("asample", {})
    assert made.json()["request_id"] == made.headers["x-request-id"] != ""


async def test_an_openai_error_keeps_openais_shape(api: Api) -> None:
    answer = await api.http.post("/v1/completions", json={}, headers=GIVEN)
    assert set(answer.json()) == {"error"}
    assert answer.headers["x-request-id"] == "mine-7"


async def test_a_sample_has_its_id_at_the_inference_server_and_asks_for_no_text(
    api: Api, upstream: FakeUpstream
) -> None:
    promise = await api.sample(await api.sampler(), 1)
    assert tokens(await api.result(promise["request_id"]))
    (sent,) = upstream.completions
    assert sent.headers["x-request-id"] == promise["request_id"]
    assert TOKENS_ONLY in sent.headers


async def test_the_access_log_has_a_line_for_each_request_but_polls(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "skyrl.access")
    async with serve(access_log=True) as api:
        sampler = await api.sampler()
        promise = await api.post("asample", sample_body(sampler, 1), **GIVEN)
        await api.result(promise.json()["request_id"])
        await api.http.get("/no/such/path")
        tenant = api.services.access.caller("tml-one").tenant[:8]
    lines = [record for record in caplog.records if record.name == "skyrl.access"]
    assert [vars(line)["route"] for line in lines] == [
        "/api/v1/create_session",
        "/api/v1/create_sampling_session",
        "/api/v1/asample",
        "/no/such/path",
    ]
    sample, unknown = vars(lines[2]), vars(lines[3])
    assert (sample["request_id"], sample["status"], sample["tenant"]) == ("mine-7", 200, tenant)
    assert sample["duration_ms"] > 0
    assert sample["recorded"] == promise.json()["request_id"]
    assert lines[2].getMessage().startswith("POST /api/v1/asample 200 ")
    assert (unknown["status"], unknown["tenant"]) == (404, None)


async def test_there_is_no_access_log_by_default(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skyrl.access")
    await api.sampler()
    assert "skyrl.access" not in {record.name for record in caplog.records}
