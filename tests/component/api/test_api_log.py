"""`api.log` gets one line for each refused key, refused quota, refused request and failed request, and none for
others."""

from __future__ import annotations

import logging
import re

import pytest
from api_harness import BASE, Api, Serve, sample_body, session_of
from fake_upstream import FakeUpstream, error
from sqlalchemy import update

from skyrl.api.access import tenant_of_key
from skyrl.base.wire.errors import ErrorCategory
from skyrl.storage.db import keys
from skyrl.storage.db.database import Database
from skyrl.storage.db.futures import Outcome, futures

pytestmark = pytest.mark.usefixtures("drain_at_once")

ONE = tenant_of_key("tml-one")


@pytest.fixture(autouse=True)
def log_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skyrl")


def log_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    names = ("skyrl.api.error_answers", "skyrl.storage.futures.store")
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name in names]


async def test_log_names_a_refused_key_by_its_prefix_only(
    serve: Serve, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    make = lambda c: keys.create(c, tenant=None, name="k", scopes=("sample",), expires_at=None)  # noqa: E731
    text, key = database.write(make)
    async with serve(api_keys="managed") as api:
        forged = f"{text[:17]}{'x' * 43}"
        refused = [forged, "tml-somebodys-password", "eyJhbGciOi.eyJhIjox.c2VjcmV0", ""]
        for given in refused:
            answer = await api.http.get("/api/v1/sessions", headers={"X-API-Key": given})
            assert answer.status_code == 401
        answer = await api.post("create_model", {}, **{"X-API-Key": text})
        assert answer.status_code == 403
    lines = log_lines(caplog)
    assert {level for level, _ in lines} == {"WARNING"}
    assert [line for _, line in lines] == [
        f"refused GET /api/v1/sessions with 401 (key tml-{key.id}-...): this API key is unknown here, or was revoked",
        "refused GET /api/v1/sessions with 401 (key tml-s...): this API key is unknown here, or was revoked",
        lines[2][1],
        "refused GET /api/v1/sessions with 401 (no key): send an API key in X-API-Key, or in Authorization as Bearer",
        f"refused POST /api/v1/create_model with 403 (tenant {key.tenant}, key {key.id}): this needs an API key with "
        "the scope 'train'; the given one has: sample",
    ]
    assert lines[2][1].startswith("refused GET /api/v1/sessions with 401 (a token): the token was not made")
    for secret in (text[17:], "x" * 43, "password", "c2VjcmV0"):
        assert secret not in caplog.text


async def test_a_refused_quota_is_logged_once_however_often_the_client_retries(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(quota_models=0) as api:
        session = session_of(await api.sampler())
        for number in range(20):
            wanted = {"session_id": session, "model_seq_id": number, "base_model": BASE}
            assert (await api.post("create_model", wanted)).status_code == 403
    assert log_lines(caplog) == [
        (
            "WARNING",
            f"refused POST /api/v1/create_model with 403, quota models (tenant {ONE}): models: this API key's tenant "
            "may have 0 in training, and has 0: unload one, or finish a session that is done",
        )
    ]


async def test_each_bad_request_and_each_unknown_path_is_logged_on_one_line(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = await api.sampler()
    answer = await api.post("asample", sample_body(sampler, 1, sampling_params={"max_tokens": 3, "temperature": -1.0}))
    assert answer.status_code == 400
    assert (await api.http.get("/api/v1/sessions/s-nobody")).status_code == 404
    assert (await api.http.get("/api/v1/sessions?limit=x")).status_code == 400
    assert (await api.http.get("/nowhere%0Afake line")).status_code == 404
    assert [re.sub(r": [^:]*$", "", line) for _, line in log_lines(caplog)] == [
        f"refused POST /api/v1/asample with 400, field sampling_params.temperature (tenant {ONE}): "
        "sampling_params.temperature",
        f"refused GET /api/v1/sessions/{{session_id}} with 404, field session_id (tenant {ONE}): session_id",
        f"refused GET /api/v1/sessions with 400, field limit (tenant {ONE}): limit",
        f"refused GET /nowhere\\nfake line with 404 (tenant {ONE})",
    ]
    assert {level for level, _ in log_lines(caplog)} == {"INFO"}


async def test_failed_requests_are_logged_and_successful_ones_are_not(
    api: Api, upstream: FakeUpstream, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = await api.sampler()
    good = await api.sample(sampler, 1)
    assert (await api.result(good["request_id"])).status_code == 200
    assert log_lines(caplog) == []
    upstream.default = error(400, "no such thing")
    failed = [(await api.sample(sampler, number))["request_id"] for number in range(2, 6)]
    for request_id in failed:
        assert "no such thing" in (await api.result(request_id)).json()["error"]
    ((level, line),) = log_lines(caplog)
    assert level == "INFO"
    assert re.match(rf"failed EXTERNAL ({'|'.join(failed)}) \(tenant {ONE}, category user\): .*no such thing", line)


async def test_a_failed_command_of_the_engine_is_logged(
    api: Api, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(await api.sampler())
    made = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE})
    request_id = made.json()["request_id"]
    outcome = Outcome(error="out of memory", error_category=ErrorCategory.SERVER)
    values = {"status": "failed", "error": outcome.error, "error_category": outcome.error_category, "completed_at": 1.0}
    database.write(lambda c: c.execute(update(futures).where(futures.c.id == request_id).values(values)))
    await api.services.futures.read_outcomes([request_id])
    expected = f"failed CREATE_MODEL {request_id} (tenant {ONE}, category server): out of memory"
    assert log_lines(caplog) == [("WARNING", expected)]
