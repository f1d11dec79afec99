"""`GET /metrics` of an API process: who may read it, what it counts, and that it grows with no tenant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from api_harness import Api, Serve, sample_body, scrape, session_of
from engine_harness import until
from fake_upstream import FakeUpstream, error, never
from openai_requests import DEAD, PROMPT, TOTAL, Connection, ask, complete, events, piece
from prometheus_client import CollectorRegistry, Counter
from two_models import JUDGE, STUDENT, TEACHER

from skyrl import __version__
from skyrl.runtime.metrics.files import MetricsDirectory, MetricsWriter
from skyrl.sampling.metrics import EVENTS
from skyrl.storage.db import keys as key_rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import beat, publish_training

TENANTS = 200


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The counters and histograms' counts of samples and requests that have grown, and by how much."""
    names = re.compile(r"skyrl_(samples|sample|http)\w+(_total|_count)\{")
    return {
        series: value - before.get(series, 0)
        for series, value in after.items()
        if names.match(series) and value != before.get(series, 0) and "/metrics" not in series
    }


async def test_a_sample_is_counted_with_its_tokens_and_times(api: Api, upstream: FakeUpstream) -> None:
    sampler = await api.sampler()
    before = await scrape(api)
    promise = await api.sample(sampler, 1)
    assert (await api.result(promise["request_id"])).status_code == 200
    after = await scrape(api)
    assert grown(before, after) == {
        "skyrl_samples_total{outcome=ok}": 1,
        "skyrl_sample_tokens_total{kind=prompt}": 3,
        "skyrl_sample_tokens_total{kind=prompt_computed}": 3,
        "skyrl_sample_tokens_total{kind=sampled}": 3,
        "skyrl_sample_duration_seconds_count{}": 1,
        "skyrl_sample_overhead_seconds_count{}": 1,
        "skyrl_http_requests_total{method=POST,route=/api/v1/asample,status=2xx}": 1,
        "skyrl_http_requests_total{method=POST,route=/api/v1/retrieve_future,status=2xx}": 1,
        "skyrl_http_request_duration_seconds_count{method=POST,route=/api/v1/asample}": 1,
    }
    duration, overhead = (after[f"skyrl_sample_{name}_seconds_sum{{}}"] for name in ("duration", "overhead"))
    assert 0 < overhead < duration
    assert after["skyrl_db_rows_per_commit_sum{}"] >= 2
    assert after["skyrl_db_commit_seconds_count{}"] > 0


async def test_refusals_and_failures_are_counted_by_their_reason(serve: Serve, upstream: FakeUpstream) -> None:
    async with serve(max_pending_samples=1) as api:
        sampler = await api.sampler()
        upstream.script.append(never)
        waiting = await api.sample(sampler, 1)
        assert (await api.post("asample", sample_body(sampler, 2))).status_code == 429
        held = await scrape(api)
        assert held["skyrl_samples_in_flight{}"] == 1
        assert held["skyrl_samples_oldest_seconds{}"] > 0
        await api.post("cancel_future", {"request_id": waiting["request_id"]})
        api.services.sampling.refuse_new()
        assert (await api.post("asample", sample_body(sampler, 3))).status_code == 503
        after = await scrape(api)
    assert after["skyrl_samples_refused_total{reason=full}"] == 1
    assert after["skyrl_samples_refused_total{reason=stopping}"] == 1
    assert after["skyrl_samples_refused_total{reason=bytes}"] == 0
    assert after["skyrl_samples_total{outcome=cancelled}"] == 1
    assert after["skyrl_samples_in_flight{}"] == after["skyrl_samples_oldest_seconds{}"] == 0


async def test_openai_requests_count_as_samples(api: Api, upstream: FakeUpstream, database: Database) -> None:
    upstream.default = complete
    before = await scrape(api)
    assert (await ask(api, PROMPT)).status_code == 200
    upstream.default = events(piece("a", 1), piece("b", 2, "stop"), TOTAL)
    assert (await ask(api, PROMPT | {"stream": True})).status_code == 200
    upstream.default = error(400, "no")
    assert (await ask(api, PROMPT)).status_code == 400
    upstream.default = events(piece("a", 1), DEAD)
    assert (await ask(api, PROMPT | {"stream": True})).status_code == 200
    upstream.default = never
    async with Connection(api, PROMPT):
        await upstream.until(lambda server: server.busy == 1)
        held = await scrape(api)
    after = await scrape(api)
    assert held["skyrl_samples_in_flight{}"] == 1
    assert held["skyrl_samples_oldest_seconds{}"] > 0
    assert after["skyrl_samples_in_flight{}"] == after["skyrl_samples_oldest_seconds{}"] == 0
    counted = {name: value for name, value in grown(before, after).items() if "http" not in name}
    assert counted == {
        "skyrl_samples_total{outcome=ok}": 2,
        "skyrl_samples_total{outcome=user_error}": 1,
        "skyrl_samples_total{outcome=server_error}": 1,
        "skyrl_samples_total{outcome=cancelled}": 1,
        "skyrl_sample_tokens_total{kind=prompt}": 9,
        "skyrl_sample_tokens_total{kind=prompt_cached}": 2,
        "skyrl_sample_tokens_total{kind=prompt_computed}": 7,
        "skyrl_sample_tokens_total{kind=sampled}": 5,
        "skyrl_sample_duration_seconds_count{}": 4,
    }


async def test_openai_requests_over_a_quota_are_counted_as_refused(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.default = never
    async with serve(quota_requests_in_flight=1) as api:
        async with Connection(api, PROMPT):
            await upstream.until(lambda server: server.busy == 1)
            assert (await ask(api, PROMPT)).status_code == 429
        assert (await scrape(api))["skyrl_samples_refused_total{reason=quota}"] == 1


async def test_readiness_and_the_age_of_the_engines_heartbeat_are_shown(api: Api, database: Database) -> None:
    database.write(beat)
    await api.services.refresh()
    shown = await scrape(api)
    assert shown["skyrl_ready{part=training}"] == shown["skyrl_ready{part=sampling}"] == 1
    assert shown["skyrl_engine_heartbeat_age_seconds{}"] < 60
    database.write(lambda c: publish_training(c, ready=False, reason="loading"))
    await api.services.refresh()
    assert (await scrape(api))["skyrl_ready{part=training}"] == 0


async def test_every_kind_of_trouble_that_the_client_counts_is_a_known_event() -> None:
    """An event that is not in the list would not be shown."""
    package = Path(__file__).parents[3] / "skyrl/sampling"
    counted = {name for file in package.glob("*.py") for name in re.findall(r'counts\["(\w+)"', file.read_text())}
    counted |= {"upstream_away"}  # chosen in the same expression as upstream_busy
    assert counted == set(EVENTS)


async def visit(api: Api, number: int) -> None:
    """One tenant with a session, a sampler, a sample, a wrong path and a wrong id."""
    key = {"X-API-Key": f"tml-tenant-{number}"}
    sampler = await api.sampler(**key)
    promise = (await api.post("asample", sample_body(sampler, 1), **key)).json()
    await api.result(promise["request_id"], **key)
    await api.http.get(f"/api/v1/sessions/{session_of(sampler)}", headers=key)
    await api.http.get(f"/api/v1/sessions/none-{number}", headers=key)
    await api.http.get(f"/no/such/path/{number}", headers=key)
    await api.http.request(f"ODD{number}", "/api/v1/asample", headers=key)


async def test_two_hundred_tenants_add_no_series(api: Api, upstream: FakeUpstream) -> None:
    await visit(api, 0)
    await scrape(api)
    one = await scrape(api)
    for number in range(1, TENANTS):
        await visit(api, number)
    many = await scrape(api)
    assert many.keys() == one.keys()
    assert many["skyrl_samples_total{outcome=ok}"] == TENANTS
    other = "skyrl_http_requests_total{method=other,route=other,status=4xx}"
    assert many[other] == 2 * TENANTS


async def test_whichever_process_answers_the_counters_of_all_are_there(api: Api, tmp_path: Path) -> None:
    other = CollectorRegistry()
    counter = Counter("ends", "Ends.", registry=other)
    writer = MetricsWriter(MetricsDirectory(tmp_path / "metrics"), "api-1", other)
    counter.inc(5)
    writer.write()
    await until(lambda: api.services.published_metrics.prepared is not None)
    MetricsWriter(api.services.published_metrics, "api-0", api.services.metrics.registry).write()
    api.services.published_metrics.prepare()
    text = (await api.http.get("/metrics")).text
    assert 'ends_total{process="api-1"} 5.0' in text
    assert 'skyrl_samples_total{outcome="ok",process="api-0"}' in text
    assert text == MetricsDirectory(tmp_path / "metrics").read(), (
        "the answering process shows itself from its file, too"
    )


async def test_a_scrape_reads_no_file(serve: Serve, tmp_path: Path) -> None:
    """It would wait for a thread, and that thread for a full event loop at each file. The process prepares one answer,
    and no other (conftest.py)."""
    counter = Counter("ends", "Ends.", registry=(other := CollectorRegistry()))
    counter.inc(5)
    elsewhere = MetricsDirectory(tmp_path / "metrics")
    MetricsWriter(elsewhere, "api-1", other).write()
    async with serve() as api:
        await until(lambda: api.services.published_metrics.prepared is not None)
        elsewhere.remove("api-1")
        text = (await api.http.get("/metrics")).text
    assert 'ends_total{process="api-1"} 5.0' in text
    assert 'skyrl_samples_total{outcome="ok",process="api-0"}' in text


@pytest.mark.parametrize("header", ["X-API-Key", "Authorization"])
async def test_where_keys_are_managed_only_an_admins_key_opens_the_metrics(
    serve: Serve, database: Database, header: str
) -> None:
    def key(*scopes: Any) -> str:
        made = database.write(lambda c: key_rows.create(c, tenant=None, name="k", scopes=scopes, expires_at=None))
        return f"Bearer {made[0]}" if header == "Authorization" else made[0]

    admin, user = key("admin"), key("train", "sample")
    async with serve(api_keys="managed") as api:
        del api.http.headers["X-API-Key"]
        for headers, status in (({}, 401), ({header: user}, 403), ({header: admin}, 200)):
            answer = await api.http.get("/metrics", headers=headers)
            assert answer.status_code == status, answer.text
        wins = {"X-API-Key": user.removeprefix("Bearer "), "Authorization": f"Bearer {admin.removeprefix('Bearer ')}"}
        assert (await api.http.get("/metrics", headers=wins)).status_code == 403


async def test_a_server_that_other_machines_reach_wants_a_key_for_its_metrics(serve: Serve) -> None:
    async with serve(host="0.0.0.0", allow_remote=True) as api:
        assert (await api.http.get("/metrics")).status_code == 200
        del api.http.headers["X-API-Key"]
        assert (await api.http.get("/metrics")).status_code == 401


async def test_several_base_models_have_a_label_and_everything_else_has_none(two_models: Api) -> None:
    promise = await two_models.sample(await two_models.sampler(base_model=TEACHER), 0)
    assert (await two_models.result(promise["request_id"])).status_code == 200
    found = await scrape(two_models)
    ended = {name: found[f"skyrl_samples_total{{base_model={name},outcome=ok}}"] for name in (STUDENT, TEACHER, JUDGE)}
    assert ended == {STUDENT: 0, TEACHER: 1, JUDGE: 0}
    labels = "backend={backend},base_model={name},version=" + __version__
    for name, backend in ((STUDENT, "fsdp"), (TEACHER, "fsdp")):
        assert found[f"skyrl_build_info{{{labels.format(backend=backend, name=name)}}}"] == 1
    assert found[f"skyrl_ready{{base_model={TEACHER},part=sampling}}"] == 1
    assert [series for series in found if "heartbeat_age" in series] == [
        f"skyrl_engine_heartbeat_age_seconds{{base_model={STUDENT}}}"
    ]
    families = {series.partition("{")[0] for series in found if "base_model=" in series}
    alone = {series.partition("{")[0] for series in found if "base_model=" not in series}
    assert not families & alone, "a family has the label in all series or in none"
    assert {"skyrl_samples_refused_total", "skyrl_images_total", "skyrl_http_requests_total"} <= alone
